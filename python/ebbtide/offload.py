"""The context that users enter, for any framework."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, NoReturn, SupportsIndex

from ebbtide import _core, process
from ebbtide._core import Saving
from ebbtide.config import OffloadConfig
from ebbtide.errors import UsageError
from ebbtide.framework import Framework, Tensor
from ebbtide.peaks import render_peaks
from ebbtide.report import GroupTotals, Stats, metrics, render_report
from ebbtide.resolved import Resolved
from ebbtide.session import Packed, Session
from ebbtide.sizes import SHOWN
from ebbtide.transfers import Transfers


def frees_nothing(framework: Framework, resolved: Resolved) -> bool:
    """Whether offload would only move bytes within the memory that device and host share."""
    streams = framework.streams
    return resolved.tier == "host" and streams is not None and streams.unified()


def totals(session: Session) -> Stats:
    return totals_of(session.stats(), session.transfers)


def totals_of(core: _core.Stats, transfers: Transfers) -> Stats:
    """The engine's statistics, ``core``, with what its tiers and transfers know."""
    tiers = transfers.tiers
    return Stats.from_core(
        core,
        first_tier=tiers.first,
        host_reserved_bytes=0 if tiers.first == "disk" else tiers.space.reserved_bytes,
        exposed_wait_s=transfers.exposed_wait_s,
    )


def group_totals(session: Session) -> list[GroupTotals]:
    """Per name of a group, in the order of first use."""
    return named_totals(session.labels, session.group_stats())


def named_totals(names: Iterable[str], groups: Sequence[_core.GroupStats]) -> list[GroupTotals]:
    """The engine's statistics of groups by name; the first are of what was saved outside of groups, and left out."""
    return [
        GroupTotals(name, *(getattr(group, field) for field in _GROUP_FIELDS))
        for name, group in zip(list(names), groups[1:], strict=False)
    ]


class PackHook:
    """What autograd calls with each tensor that it saves. It holds no scope: one that nobody leaves ends with its object."""

    __slots__ = ("_saving", "_session")

    def __init__(self, session: Session, saving: Saving) -> None:
        self._session = session
        self._saving = saving

    def __call__(self, tensor: Tensor) -> Packed:
        return self._session.pack(tensor, self._saving)


class Scope:
    """One entry of the context on one thread."""

    def __init__(self, session: Session, framework: Framework, saving: Saving) -> None:
        self._session = session
        self._saving = saving
        self._epoch = session.begin_epoch()
        saving.epoch = self._epoch.number
        self._labels = [0]  # of the groups that are running, the innermost last
        self._hooks: AbstractContextManager[Any] = framework.saved_tensor_hooks(
            PackHook(session, saving), session.unpack
        )

    def begin_group(self, name: str) -> int:
        """Returns what `end_group` takes."""
        depth = len(self._labels)
        self._labels.append(self._session.begin_group(self._saving.epoch, name))
        self._saving.label = self._labels[-1]
        return depth

    def end_group(self, depth: int) -> None:
        """Ends the group, and those inside it that were left by an exception and never ended."""
        while len(self._labels) > depth:
            self._labels.pop()
            self._saving.label = self._labels[-1]
            self._session.end_group()

    def enter(self) -> None:
        self._hooks.__enter__()

    def exit(self) -> None:
        try:
            self._hooks.__exit__(None, None, None)
        finally:
            self._epoch.end()


class _NoScope:
    """An entry of the context where offload cannot pay: nothing is hooked."""

    def exit(self) -> None:
        pass

    def begin_group(self, name: str) -> int:
        return 0

    def end_group(self, depth: int) -> None:
        pass


class _Blocks:
    """The repeated blocks of a model, watched for as long as any thread is inside the context."""

    def __init__(
        self,
        framework: Framework,
        model: Any,
        begin: Callable[[str], None],
        end: Callable[[str], None],
    ) -> None:
        self._watch: Callable[[], Callable[[], None]] = lambda: framework.watch_blocks(
            model, begin, end
        )
        self._lock = threading.Lock()
        self._entered = 0
        self._stop: Callable[[], None] | None = None

    def enter(self) -> None:
        with self._lock:
            if self._entered == 0:
                self._stop_watching()
                self._stop = self._watch()
            self._entered += 1

    def exit(self) -> None:
        with self._lock:
            self._entered -= 1
            if self._entered == 0:
                self._stop_watching()

    def _stop_watching(self) -> None:
        if self._stop is not None:
            self._stop()
            # Only now: cut short by a signal handler's exception, it is done again at the next entry.
            self._stop = None


_GROUP_FIELDS = (
    "runs",
    "storages",
    "unique_bytes",
    "d2h_bytes",
    "h2d_bytes",
    "prefetch_misses",
)


class _Entered(threading.local):
    def __init__(self) -> None:
        self.scopes: list[Scope | _NoScope] = []
        self.block = 0  # what ends the block that is running


class Offload:
    """Offloads what autograd saves while the context is entered; backward may run inside it or after it.

    May be entered many times, nested, and by several threads at once. Totals run from the object's making or from
    ``reset_stats``. Cannot be copied or pickled: UsageError.
    """

    def __init__(
        self,
        framework: Framework,
        config: OffloadConfig,
        resolved: Resolved,
        model: Any,
    ) -> None:
        self.config = config
        self._framework = framework
        self._resolved = resolved
        self._weights = framework.weights(model)
        self._session = Session(framework, resolved)
        self._entered = _Entered()
        self._blocks = _Blocks(framework, model, self._begin_block, self._end_block)
        self._idle = frees_nothing(framework, resolved)
        if self._idle:
            warnings.warn(
                f"[offload] the memory of {framework.device_type} is the host's own: to='host' would free nothing, so "
                "nothing is moved; a disk is another place: to='disk'",
                RuntimeWarning,
                stacklevel=3,
            )
        self._watches = model is not None and (
            resolved.group_swap
            or resolved.keep_last_groups is not None
            or resolved.prefetch_groups is not None
        )

    def __enter__(self) -> Offload:
        process.require_usable("offload")
        if self._idle:
            self._entered.scopes.append(_NoScope())
            return self
        self._weights.refresh()
        saving = Saving(0, self._weights, self.config.policy, self._resolved.only == "layer_inputs")
        scope = Scope(self._session, self._framework, saving)
        if self._watches:
            self._blocks.enter()
        try:
            scope.enter()
        except BaseException:
            if self._watches:
                self._blocks.exit()
            raise
        self._entered.scopes.append(scope)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._entered.scopes:
            raise UsageError(
                "[offload] left on a thread that has not entered it: enter and leave on one thread"
            )
        try:
            if self._watches and not self._idle:
                self._blocks.exit()
        finally:
            self._entered.scopes.pop().exit()

    @contextmanager
    def group(self, name: str) -> Iterator[None]:
        """What autograd saves inside is scheduled together: it leaves the device, and comes back, as one.

        Inside the context, on the thread that entered it. Groups of a name may run many times (once per forward) and
        lie within each other; the innermost counts. Repeated blocks of ``model`` are groups by themselves.

        Raises UsageError outside of the context, and for a name that is empty or has control characters.
        """
        if not isinstance(name, str) or not name.strip() or not name.isprintable():
            raise UsageError(
                f"[offload.group] {SHOWN.repr(name)} is no name: give a text such as 'encoder'"
            )
        if not self._entered.scopes:
            raise UsageError(
                f"[offload.group] {name!r} outside of the context, or on a thread that has not entered it: write "
                "'with offload(model) as tide:' around it there"
            )
        scope = self._entered.scopes[-1]
        depth = scope.begin_group(name)
        try:
            yield
        finally:
            scope.end_group(depth)

    def wrap(self, model: Any) -> Any:
        """Makes each forward of the model run inside the context; returns the model.

        For code that calls the model where no ``with`` can be written, such as a trainer. Weights keep their names; copies
        of the model are not wrapped. Where the model raises, the context is left.

        Raises UsageError for what is no model of this framework, and where it was wrapped before.
        """
        self._framework.run_inside(model, lambda: self)
        return model

    def _begin_block(self, name: str) -> None:
        if self._entered.scopes:
            self._entered.block = self._entered.scopes[-1].begin_group(name)

    def _end_block(self, name: str) -> None:
        if self._entered.scopes:
            self._entered.scopes[-1].end_group(self._entered.block)

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        raise UsageError(
            "[offload] is a context, not a decorator: write 'with offload(model):' around the forward"
        )

    def stats(self) -> Stats:
        """Totals and what is held now, as a frozen dataclass. Bytes, counts, seconds."""
        return totals(self._session)

    def group_stats(self) -> list[GroupTotals]:
        """Per name of a group, in the order of first use."""
        return group_totals(self._session)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise UsageError(
            "[offload] an offload object cannot be copied or pickled, nor what holds it: "
            "make one for the copy, with offload(model, ...)"
        )

    def reset_stats(self) -> None:
        """Totals to zero; what is held now stays and is the new peak."""
        self._session.reset_stats()

    def metrics(self) -> dict[str, float]:
        """The statistics as one flat dict for loggers."""
        return metrics(self.stats())

    def report(self) -> str:
        """The statistics as a table; below, which devices' peak sits where a checkpointed region is recomputed."""
        table = render_report(
            self.stats(),
            f"ebbtide: {self._framework.device_type} to {self._resolved.tier}",
            self.group_stats(),
        )
        return table + ("" if self._framework.memory is None else render_peaks())

    def synchronize(self) -> None:
        """Block until no copy of this object is running, and the host has done what the framework queued there: only then
        ``stats`` tells what a step of a framework that runs behind has left."""
        self._session.synchronize()
