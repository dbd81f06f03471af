"""Groups by name: what a schedule launches and waits for."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

from ebbtide.errors import UsageError
from ebbtide.hyper_parallel.chain import Chains
from ebbtide.hyper_parallel.groups import Current, Group, GroupRun, Stage, current
from ebbtide.hyper_parallel.naming import name_in_group
from ebbtide.hyper_parallel.runtime import hooks_now, modules_for, session_for
from ebbtide.modules import Module, tensors_in
from ebbtide.sizes import SHOWN


class UnknownGroupError(UsageError, RuntimeError):
    """A call for a group that was never made."""


class SwapManager:
    """The groups of this process; ``SwapManager()`` is always the same object.

    What is saved while a group is current belongs to that group's newest forward, up to ``launch_offload``; the next
    forward through the group has tickets of its own. So with several forwards in flight (micro-batches) offloads are
    launched for the newest, and loads for the oldest, as a pipeline runs them.

    Calls decide when copies happen, never what backward gets: it loads what nobody has loaded. A call that comes too
    early, twice, or without what it waits for warns, naming the group and its state; for a group that was never made
    launches, waits, release and abort raise UnknownGroupError (a UsageError and a RuntimeError). None of the calls blocks on an accelerator; on memory without streams the waits do.

    Any thread may call. The current group is a context variable, each thread has its own; threads that run at the same
    time need groups of their own.
    """

    _instance: SwapManager | None = None
    _making = threading.Lock()

    _groups: dict[str, Group]
    _chains: Chains

    def __new__(cls) -> SwapManager:
        with cls._making:
            if cls._instance is None:
                made = super().__new__(cls)
                made._groups = {}
                made._chains = Chains(made._groups)
                cls._instance = made
            return cls._instance

    # --- groups

    def ensure_group(self, group_name: str) -> None:
        """Makes the group where there is none of this name. Raises UsageError for what is no name."""
        self._ensure(group_name)

    def _ensure(self, name: str) -> Group:
        group = self._groups.get(name) if isinstance(name, str) else None
        if group is None:
            if not isinstance(name, str) or not name.strip() or not name.isprintable():
                raise UsageError(
                    f"[SwapManager] {SHOWN.repr(name)} is no name of a group: give a text such as 'stage0/micro1'"
                )
            group = self._groups.setdefault(name, Group(name))
        return group

    def _known(self, call: str, name: str) -> Group:
        group = self._groups.get(name) if isinstance(name, str) else None
        if group is None:
            nearest = get_close_matches(str(name), list(self._groups), n=8, cutoff=0)
            known = ", ".join(map(repr, nearest)) or "none"
            raise UnknownGroupError(
                f"[SwapManager.{call}] no group {SHOWN.repr(name)}; there are {len(self._groups)} ({known}): make it "
                "current around the forward first, or call ensure_group"
            )
        return group

    def active_group_count(self) -> int:
        """Groups in which something is saved."""
        return sum(bool(group.runs()) for group in list(self._groups.values()))

    def get_current_group_name(self) -> str | None:
        now = current.get()
        return None if now is None else now.group.name

    def set_current_group_name(self, group_name: str | None) -> None:
        """What this thread saves from now on belongs to the group; with None or an empty text, to none."""
        current.set(Current(self._ensure(group_name)) if group_name else None)

    @contextmanager
    def group_context(self, group_name: str) -> Iterator[None]:
        """What is saved inside belongs to the group; afterwards the one before is current again."""
        now = Current(self._ensure(group_name), hooks=hooks_now())
        token = current.set(now)
        try:
            yield
        finally:
            current.reset(token)
            scope, now.scope, now.named = now.scope, None, None
            if scope is not None:
                scope.__exit__(None, None, None)

    def is_last_group(self, group_name: str) -> bool:
        """Whether it is the group of the last layer of a chain, which stays on the device."""
        group = self._groups.get(group_name)
        return group is not None and group.is_last()

    def add_storage(
        self, group_name: str, tensors: Any, *, group_swap: bool = False, cpu_pool: Any = None
    ) -> None:
        """The storages of these (nested) tensors leave with the group's newest forward, where autograd saves them in it.

        For use where the group is current. Elsewhere it is about what the group's forward has saved so far; where nothing
        is saved in it nothing happens but a warning.
        """
        group = self._ensure(group_name)
        modules = modules_for(tensors)
        if modules.in_backward() or not modules.records():
            return
        now = current.get()
        if now is not None and now.group is group:
            place = "SwapManager.add_storage"
            name_in_group(place, now, tensors, modules, group_swap, cpu_pool)
            return
        run = group.saving()
        if run is None:
            text = "it is not current, and no forward is being saved in it: call this in its group_context"
            _warn("add_storage", group, text)
            return
        session = session_for(modules, group_swap=group_swap, cpu_pool=cpu_pool).session
        run.request(tensors_in(tensors, modules), session)

    # --- copies

    def launch_offload(self, group_name: str, copy_stream: object = None) -> None:
        """Starts copying out what the newest forward saved. ``copy_stream`` has no effect: there is one per device."""
        group = self._known("launch_offload", group_name)
        if group.is_last():
            return
        run = group.saving()
        if run is not None:
            run.launch_offload()
        elif group.runs():
            _warn("launch_offload", group, "it was launched already: once per forward")

    def wait_offload(self, group_name: str) -> None:
        """Lets go of what was launched. Memory is free afterwards, in the order of the device."""
        group = self._known("wait_offload", group_name)
        runs = group.runs()
        launched = [run for run in runs if run.stage is Stage.OFFLOADING]
        for run in launched:
            run.wait_offload()
        if not launched and any(run.stage is Stage.SAVING for run in runs) and not group.is_last():
            _warn("wait_offload", group, "call launch_offload first")

    def launch_load(self, group_name: str, copy_stream: object = None) -> None:
        """Starts bringing back what the oldest forward has away. ``copy_stream`` has no effect."""
        group = self._known("launch_load", group_name)
        runs = group.runs()
        run = _oldest(runs, Stage.OFFLOADING, Stage.AWAY)
        if run is not None:
            run.launch_load()
        elif runs and not group.is_last():
            text = "nothing of it was offloaded: call launch_offload after its forward"
            if _oldest(runs, Stage.LOADING, Stage.LOADED) is not None:
                text = "it was loaded already: once per forward"
            _warn("launch_load", group, text)

    def wait_load(self, group_name: str) -> None:
        """What this thread issues from now on comes after the oldest load; without streams, blocks until it is done."""
        group = self._known("wait_load", group_name)
        runs = group.runs()
        run = _oldest(runs, Stage.LOADING)
        if run is not None:
            run.wait_load()
        elif _oldest(runs, Stage.OFFLOADING, Stage.AWAY) is not None:
            _warn("wait_load", group, "call launch_load first; backward loads what it asks for")

    def release_group_storage(self, group_name: str) -> None:
        """Lets go of what was loaded and no backward has asked for; it can be loaded again."""
        for run in self._known("release_group_storage", group_name).runs():
            if run.stage in (Stage.LOADING, Stage.LOADED):
                run.release()

    def abort_group(self, group_name: str) -> None:
        """Ends the schedule of the group's forwards, after an exception: what has not left stays, backward still works."""
        for run in self._known("abort_group", group_name).runs():
            run.keep()

    # --- chains of layers

    def set_forward_prefetch_layer(self, first_layer: Module, second_layer: Module) -> None:
        """Links two layers, the second behind the first, and installs hooks on both.

        After a layer's forward its offload is launched and that of the layer before is waited for; before its backward
        the load of the layer before is launched and its own waited for. The last layer of a chain is never offloaded.
        Layers need not be adjacent. A layer has one before and one behind it: linked anew, it leaves the old one.

        Raises UsageError for what is no module, and where the chain would become a ring.
        """
        self._chains.link(first_layer, second_layer)

    def unregister_forward_prefetch_layer(self, layer: Module) -> None:
        """Takes the layer out of its chain and its hooks off; what was before and behind it is linked."""
        self._chains.unlink(layer)

    def unregister_forward_prefetch_hooks(self, layers: Iterable[Module] | None = None) -> None:
        """Takes these layers, or all, out of their chains."""
        self._chains.unlink_all(layers)


def _oldest(runs: list[GroupRun], *stages: Stage) -> GroupRun | None:
    return next((run for run in runs if run.stage in stages), None)


def _warn(call: str, group: Group, text: str) -> None:
    warnings.warn(
        f"[SwapManager.{call}] group {group.name!r}: {text} ({group.state()})",
        RuntimeWarning,
        stacklevel=3,
    )
