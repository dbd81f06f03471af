"""Groups and their runs. A run is one forward through a group: what it saved leaves and comes back together.

Every forward has a run of its own, so micro-batches share nothing. A run lives as long as something that was saved in it:
the graph holds it through its hooks, everybody else weakly.
"""

from __future__ import annotations

import contextvars
import enum
import itertools
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from ebbtide import process
from ebbtide.framework import Tensor
from ebbtide.session import Session


class Stage(enum.IntEnum):
    """How far a run has been told to go."""

    SAVING = 0
    OFFLOADING = 1
    AWAY = 2
    LOADING = 3
    LOADED = 4


class GroupRun:
    """One forward through a group, in every session that its tensors go through. Any thread may call any method."""

    __slots__ = ("__weakref__", "_numbers", "group", "previous", "stage")

    def __init__(self, group: Group) -> None:
        self.group = group
        self.stage = Stage.SAVING
        self.previous: Callable[[], GroupRun | None] = (
            _none  # of the group before, in the same forward
        )
        self._numbers: dict[Session, tuple[int, int]] = {}

    def number(self, session: Session) -> tuple[int, int]:
        """Its number in the session, and the label of its group there; from 1."""
        found = self._numbers.get(session)
        if found is None:
            found = self._numbers.setdefault(session, session.runs.open(self.group.name))
        return found

    def request(self, tensors: Iterable[Tensor], session: Session) -> None:
        """In this session and every one so far, the tensors' storages leave with the run."""
        self.number(session)
        for tensor in tensors:
            for each, (run, _) in list(self._numbers.items()):
                each.runs.request(run, tensor)

    def launch_offload(self) -> None:
        self._all(lambda session, run: session.runs.offload(run))
        self.stage = Stage.OFFLOADING

    def wait_offload(self) -> None:
        self._all(lambda session, run: session.runs.let_go(run))
        self.stage = Stage.AWAY

    def launch_load(self) -> None:
        self._all(lambda session, run: session.runs.load(run))
        self.stage = Stage.LOADING

    def wait_load(self) -> None:
        self._all(lambda session, run: session.runs.await_loads(run))
        self.stage = Stage.LOADED

    def release(self) -> None:
        """Lets go of what was loaded and not asked for; it can be loaded again."""
        self._all(lambda session, run: session.runs.release(run))
        self.stage = Stage.AWAY

    def keep(self) -> None:
        """What has not left stays; nothing more is done to the run."""
        self._all(lambda session, run: session.runs.keep(run))
        self.close()

    def close(self) -> None:
        self.group.forget(self)
        while self._numbers:
            session, (run, _) = self._numbers.popitem()
            session.runs.close(run)

    def _all(self, call: Callable[[Session, int], None]) -> None:
        for session, (run, _) in list(self._numbers.items()):
            call(session, run)

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not finalizing() and process.usable():
            self.close()


def _none() -> None:
    return None


class Group:
    """What goes by one name: its runs that something is still saved in, oldest first."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_last: Callable[[], bool] = _no
        self._runs: dict[int, weakref.ref[GroupRun]] = {}
        self._numbers = itertools.count()

    def begin(self) -> GroupRun:
        run = GroupRun(self)
        number, runs = next(self._numbers), self._runs

        def forget(_: object) -> None:
            runs.pop(number, None)

        runs[number] = weakref.ref(run, forget)
        return run

    def runs(self) -> list[GroupRun]:
        found = [ref() for ref in list(self._runs.values())]
        return [run for run in found if run is not None]

    def saving(self) -> GroupRun | None:
        """The newest run that was not launched."""
        return next((run for run in reversed(self.runs()) if run.stage is Stage.SAVING), None)

    def forget(self, run: GroupRun) -> None:
        for number, ref in list(self._runs.items()):
            if ref() is run:
                self._runs.pop(number, None)

    def state(self) -> str:
        """For texts of errors."""
        runs = self.runs()
        if not runs:
            return "nothing is saved in it"
        return "its forwards are " + ", ".join(run.stage.name.lower() for run in runs)


def _no() -> bool:
    return False


class Joins(NamedTuple):
    """Where tensors that a layer names go."""

    group_swap: bool = False
    cpu_pool: Any = None


class Current:
    """The group that is current on a thread. With hooks around a layer: the run of this forward, and the ``scope`` of what
    the layer saves. In a ``with`` statement: ``hooks``, those that were entered when it began; the scope is entered once
    something is named in it."""

    __slots__ = ("_run", "group", "hooks", "joins", "named", "outer", "scope")

    def __init__(
        self,
        group: Group,
        run: GroupRun | None = None,
        scope: Any = None,
        hooks: list[Any] | None = None,
        outer: Current | None = None,
    ) -> None:
        self.group = group
        self._run = run
        self.scope = scope
        self.hooks = hooks
        self.outer = outer  # of a layer's forward: what was current when it began
        self.joins: Joins | None = None  # what was named in this forward
        # The run that it leaves with, until something is saved in it.
        self.named: GroupRun | None = None

    def run(self) -> GroupRun:
        return self._run or self.group.saving() or self.group.begin()

    def begins(self) -> bool:
        """Whether what is saved next begins a run."""
        return self._run is None and self.group.saving() is None


current: contextvars.ContextVar[Current | None] = contextvars.ContextVar(
    "ebbtide_group", default=None
)
