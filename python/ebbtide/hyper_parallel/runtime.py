"""The sessions behind the layer, and the context that everything in it saves through.

There is one session per framework, device type, pool and ``group_swap``, made at first use; it lives as long as its pool
and its tickets.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from ebbtide._core import Saving
from ebbtide.config import OffloadConfig, environment_name
from ebbtide.errors import UsageError
from ebbtide.framework import Tensor
from ebbtide.hyper_parallel.counted import count
from ebbtide.hyper_parallel.groups import Current, GroupRun, Stage, current
from ebbtide.modules import Modules, name_of, tensors_in
from ebbtide.offload import frees_nothing
from ebbtide.session import Packed, Session
from ebbtide.sizes import SHOWN

if TYPE_CHECKING:
    from ebbtide.hyper_parallel.pool import PinnedMemoryPool

# HyperParallel moves whatever its user does not filter out, and to host memory.
_DEFAULTS: dict[str, Any] = {"to": "host", "min_bytes": 0}

_FRAMEWORKS = ("torch", "mindspore")


def modules_for(*things: object) -> Modules:
    """The modules of the framework that these modules, functions or (nested) tensors are of; where they do not tell, of
    the only framework that is loaded. Imports no framework. Raises UsageError."""
    loaded = [name for name in _FRAMEWORKS if name in sys.modules]
    if len(loaded) == 1:
        return _modules_of(loaded[0])
    for name in loaded:
        modules = _modules_of(name)
        for thing in things:
            owner = getattr(thing, "__self__", thing)
            if modules.is_module(owner) or next(tensors_in(thing, modules), None) is not None:
                return modules
    if loaded:
        raise UsageError(
            f"[hyper_parallel] {' and '.join(loaded)} are loaded, and neither the function nor its arguments tell which is "
            "meant: pass a module or a tensor"
        )
    raise UsageError("[hyper_parallel] neither torch nor mindspore is loaded: import one first")


def modules_to_wrap(place: str, module: object) -> Modules:
    """The modules of the framework of what is to be wrapped. Raises UsageError for what cannot be called."""
    if not callable(module):
        raise UsageError(
            f"[{place}] {SHOWN.repr(module)} cannot be called: pass a module or a function"
        )
    return modules_for(module)


def _modules_of(name: str) -> Modules:
    if name == "torch":
        from ebbtide.torch.modules import TorchModules

        return TorchModules()
    modules: Any = importlib.import_module("ebbtide.mindspore.modules")
    return cast(Modules, modules.MindSporeModules())


class _Epoch:
    """One forward on one thread, as far as can be told: until something in it runs a second time, or a backward began.

    What several modules of a forward save of one storage is one entry.
    """

    def __init__(self, session: Session, others: weakref.WeakSet[_Epoch]) -> None:
        self.session = session
        self.others = others  # of the session, this one too
        self.end_idle()
        self._epoch = session.begin_epoch()
        self.number = self._epoch.number
        self.seen: set[Hashable] = set()
        self.depth = 0  # of scopes that are entered
        self.backward_began = False
        others.add(self)

    def end(self) -> None:
        self.number = 0
        self._epoch.end()

    def end_idle(self) -> None:
        """After a call that was cut short the session recovers when nobody is in it."""
        if self.session.transfers.interrupted:
            for epoch in list(self.others):
                if epoch.depth == 0:
                    epoch.end()


class _Here(threading.local):
    epoch: _Epoch | None = None


class SwapSession:
    """A session, and the forward that each thread is in."""

    def __init__(self, modules: Modules, pool: PinnedMemoryPool | None, group_swap: bool) -> None:
        options = {
            name: value
            for name, value in _DEFAULTS.items()
            if not os.environ.get(environment_name(name) or "", "").strip()
        }
        if pool is not None:
            options["max_host_bytes"] = pool.max_host_bytes
        config = OffloadConfig.from_options(**options, group_swap=group_swap)
        self.framework, self.options = modules.resolve(config)
        self.group_swap = group_swap
        self.session = Session(self.framework, self.options)
        self.idle = frees_nothing(self.framework, self.options)
        if self.idle:
            warnings.warn(
                f"[swap] the memory of {self.framework.device_type} is the host's own: nothing is moved",
                RuntimeWarning,
                stacklevel=2,
            )
        self._here = _Here()
        self._epochs: weakref.WeakSet[_Epoch] = weakref.WeakSet()
        count(self.session, self.framework, self.options)

    def enter(self, keys: Iterable[Hashable]) -> _Epoch:
        """The epoch for something that runs now and goes by these keys."""
        here = self._here
        keys = set(keys)
        epoch = here.epoch
        if epoch is not None and epoch.depth == 0:
            if epoch.number == 0 or epoch.backward_began or keys & epoch.seen:
                here.epoch = None
                epoch.end()
                epoch = None
        if epoch is None:
            epoch = here.epoch = _Epoch(self.session, self._epochs)
        epoch.seen |= keys
        epoch.depth += 1
        return epoch


_Sessions = dict[tuple[Any, ...], SwapSession]
_of_no_pool: _Sessions = {}


def session_for(
    modules: Modules, *, group_swap: bool = False, cpu_pool: PinnedMemoryPool | None = None
) -> SwapSession:
    """The session of this pool; one pool has one, whose ``group_swap`` is that of its first use: its cap is one cap."""
    sessions = _of_no_pool if cpu_pool is None else cpu_pool.sessions
    group_swap = bool(group_swap)
    device = os.environ.get("EBBTIDE_DEVICE", "")
    key = (type(modules), device) if cpu_pool is not None else (type(modules), device, group_swap)
    found = sessions.get(key)
    if found is None:
        found = sessions.setdefault(key, SwapSession(modules, cpu_pool, group_swap))
    if found.group_swap != group_swap:
        warnings.warn(
            f"[swap] group_swap={group_swap} with a pool that was first used with group_swap={found.group_swap}, which "
            "stays: give each its own PinnedMemoryPool",
            RuntimeWarning,
            stacklevel=4,
        )
    return found


class _Entered(threading.local):
    scopes = 0  # with hooks


_entered = _Entered()


def hooks_now() -> list[Any]:
    """The saved-tensor hooks that this thread has entered last, where the loaded frameworks tell."""
    return [_modules_of(name).current_hooks() for name in _FRAMEWORKS if name in sys.modules]


def saves_through_scope() -> bool:
    """Whether this thread is in a scope with hooks."""
    return _entered.scopes > 0


class Unpack:
    """What the graph holds: takes what ``Scope.pack`` returned. It keeps the runs alive that were saved in."""

    __slots__ = ("_session", "epoch", "runs")

    def __init__(self, epoch: _Epoch) -> None:
        self.runs: list[GroupRun] = []
        self.move_to(epoch)

    def move_to(self, epoch: _Epoch) -> None:
        self.epoch = epoch
        self._session = epoch.session

    def __call__(self, saved: Packed) -> Tensor:
        self.epoch.backward_began = True
        if self._session.transfers.interrupted:
            self.epoch.end_idle()
        return self._session.unpack(saved)


class Scope:
    """What autograd saves inside is offloaded: with the current group where there is one, else as the session's options
    say. Enter once, and leave on the same thread.

    Without ``hooked`` nothing is hooked: the caller passes tensors to ``pack`` and holds ``unpack`` as long as what it
    returned.
    """

    unpack: Callable[[Packed], Tensor]

    def __init__(
        self, swap: SwapSession, saving: Saving, keys: tuple[Hashable, ...], name: str, hooked: bool
    ) -> None:
        self._swap = swap
        self._session = swap.session
        self._saving = saving
        self._keys = keys
        self._name = name
        self._hooked = hooked
        self._unpack: Unpack | None = None
        self._hooks: AbstractContextManager[Any] | None = None
        self._label = 0  # outside of groups whose copies the caller starts
        self._packs = False
        self._group: Current | None = None
        self._run: GroupRun | None = None  # what is saved now goes with it

    def __enter__(self) -> Scope:
        framework, session = self._swap.framework, self._session
        self.unpack = session.unpack
        if self._swap.idle and self._hooked:
            return self
        try:
            # What a backward recomputes it needs at once.
            if not self._swap.idle and not framework.current_pass():
                self._begin(current.get())
            if self._hooked:
                hooks = framework.saved_tensor_hooks(self.pack, self.unpack)
                hooks.__enter__()
                self._hooks = hooks
                _entered.scopes += 1
        except BaseException:
            self._end()
            raise
        return self

    def _begin(self, group: Current | None) -> None:
        if group is not None and group.begins():
            self._keys += (("group", group.group.name),)
        self._unpack = Unpack(self._swap.enter(self._keys))
        self.unpack = self._unpack
        self._saving.epoch = self._unpack.epoch.number
        if group is None:
            self._label = self._session.begin_group(self._saving.epoch, self._name)
            self._saving.label = self._label
        self._packs = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if self._hooks is not None:
                _entered.scopes -= 1
                self._hooks.__exit__(None, None, None)
        finally:
            self._end()

    def _end(self) -> None:
        unpack, self._unpack = self._unpack, None
        self._packs = False
        self._group = self._run = self._hooks = None
        if unpack is None:
            return
        unpack.epoch.depth -= 1
        if self._label:
            self._session.end_group()

    def pack(self, tensor: Tensor) -> Packed:
        if not self._packs:
            # Also when left: frameworks restore the hooks that a backward began with.
            return self._session.keep(tensor)
        group = current.get()
        known = self._run
        if group is not self._group or (known is not None and known.stage is not Stage.SAVING):
            self._join(group)
        return self._session.pack(tensor, self._saving)

    def pack_inside(self, tensor: Tensor) -> Packed:
        """Packs what is no input of a region, also where only those leave by themselves."""
        saving = self._saving
        inputs_only, saving.inputs_only = saving.inputs_only, False
        try:
            return self.pack(tensor)
        finally:
            saving.inputs_only = inputs_only

    def _join(self, group: Current | None) -> None:
        saving, unpack = self._saving, self._unpack
        assert unpack is not None
        self._group = group
        self._run = None if group is None else group.run()
        if self._run is None:
            saving.run, saving.label = 0, self._label
        else:
            saving.run, saving.label = self._run.number(self._session)
            unpack.runs.append(self._run)

    def request(self, swap: SwapSession) -> None:
        """Something is about to be asked for in this session: it is the scope's, where nothing was saved yet."""
        unpack = self._unpack
        if unpack is None or unpack.runs or swap is self._swap or swap.idle:
            return
        unpack.epoch.depth -= 1
        self._swap, self._session = swap, swap.session
        unpack.move_to(swap.enter(self._keys))
        self._saving.epoch = unpack.epoch.number


def saving(
    function: Callable[..., Any] | None,
    args: object = (),
    kwargs: object = None,
    *,
    modules: Modules | None = None,
    policy: Callable[[Tensor], Any] | None = None,
    inputs_only: bool = False,
    on_request: bool = False,
    hooked: bool = True,
    name: str = "",
    group_swap: bool = False,
    cpu_pool: PinnedMemoryPool | None = None,
) -> Scope:
    """The context for one call of ``function``.

    Args:
        function: what will be called; the parameters of a module, or of a bound method's module, stay on the device.
        args, kwargs: its arguments; they tell which framework is meant where the function does not.
        policy: answers a member of CheckpointPolicy for each tensor.
        inputs_only: only the inputs of checkpointed regions are offloaded.
        on_request: of the current group's run, only what is requested leaves.
        hooked: see ``Scope``.
        name: of its group, where no other is current; default: what ``function`` tells.
    """
    modules = modules or modules_for(function, args, kwargs)
    swap = session_for(modules, group_swap=group_swap, cpu_pool=cpu_pool)
    owner = getattr(function, "__self__", function)
    module = owner if modules.is_module(owner) else None
    # Whatever runs a second time runs in another forward; contexts around anything, each in their own.
    key: Hashable = object()
    if function is not None:
        key = (id(owner), id(getattr(function, "__func__", function)), on_request)
    saved = Saving(0, swap.framework.weights(module), policy, inputs_only, on_request=on_request)
    return Scope(swap, saved, (key,), name or name_of(function, modules), hooked)
