"""Chains of layers: hooks that launch a layer's offload behind its forward, and the load of the one before ahead of its
backward."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from ebbtide.errors import UsageError
from ebbtide.hyper_parallel.groups import Current, Group, GroupRun, Joins, Stage, current
from ebbtide.hyper_parallel.runtime import Scope, modules_for, saving
from ebbtide.modules import Module, Modules, tensors_in


class _Forward(NamedTuple):
    """A forward of a layer that runs."""

    run: GroupRun
    current: Current

    def leave(self) -> None:
        scope, self.current.scope = self.current.scope, None
        if scope is not None:
            scope.__exit__(None, None, None)


class _Here(threading.local):
    def __init__(self) -> None:
        self.running: list[_Forward | None] = []  # None: one that is not watched
        self.newest: Callable[[], GroupRun | None] = lambda: None


class Layer:
    """A module in a chain. Its hooks hold this, and this no module."""

    def __init__(self, modules: Modules, module: Module, group: Group) -> None:
        self.group = group
        self.before: Layer | None = None
        self.behind: Callable[[], Layer | None] = lambda: None
        self._modules = modules
        self._module = weakref.ref(module)
        self._here = _Here()
        self._joins: Joins | None = Joins()  # at the last forward, if anything was named there
        group.is_last = self._is_last_of_chain(weakref.ref(self))
        self.remove_hooks = modules.watch_forward(module, self._begin, self._end)

    @staticmethod
    def _is_last_of_chain(layer: weakref.ref[Layer]) -> Callable[[], bool]:
        def is_last() -> bool:
            found = layer()
            return found is not None and found.behind() is None

        return is_last

    def _begin(self) -> None:
        here = self._here
        if self._modules.in_backward() or not self._modules.records():
            here.running.append(None)
            return
        if self.before is None:
            self._leave_unfinished()
        run = self.group.begin()
        if self.before is not None:
            run.previous = self.before._here.newest
        scope = self._scope()
        now = Current(self.group, run, scope, outer=current.get())
        current.set(now)
        try:
            if scope is not None:
                scope.__enter__()
        except BaseException:
            current.set(now.outer)
            raise
        here.running.append(_Forward(run, now))
        here.newest = weakref.ref(run)

    def _leave_unfinished(self) -> None:
        """The chain begins anew: what still runs in it was ended by an exception that frameworks call no hooks for, such as
        Ctrl-C."""
        unfinished: list[_Forward] = []
        layer: Layer | None = self
        while layer is not None:
            unfinished += filter(None, layer._here.running)
            layer._here.running.clear()
            layer = layer.behind()
        left = [forward.current for forward in unfinished]
        now = current.get()
        while now is not None:
            if now in left:
                current.set(now.outer)
            now = now.outer
        for forward in reversed(unfinished):
            forward.leave()
            forward.run.keep()

    def _scope(self) -> Scope | None:
        """For what the layer saves outside of wrappers: of it leaves what ``swap_tensor_wrapper`` names."""
        module = self._module()
        if module is None or not self._joins or self._modules.wrapped(module) is not None:
            return None
        return saving(
            module,
            modules=self._modules,
            on_request=True,
            group_swap=self._joins.group_swap,
            cpu_pool=self._joins.cpu_pool,
        )

    def _end(self, output: Any) -> None:
        here = self._here
        if not here.running:
            return  # hooked while its forward was running
        forward = here.running.pop()
        if forward is None:
            return
        run, now = forward
        current.set(now.outer)
        forward.leave()
        self._joins = now.joins
        if output is None:  # it raised
            run.keep()
            return
        if self.behind() is None:
            run.keep()
        else:
            run.launch_offload()
        previous = run.previous()
        if previous is not None and previous.stage is Stage.OFFLOADING:
            previous.wait_offload()
        for tensor in tensors_in(output, self._modules):
            self._modules.before_backward(tensor, _loads(run))


def _loads(run: GroupRun) -> Callable[[], None]:
    def load() -> None:
        previous = run.previous()
        if previous is not None:
            previous.launch_load()
        run.wait_load()

    return load


class Chains:
    """All chains of the process."""

    def __init__(self, groups: dict[str, Group]) -> None:
        self._groups = groups
        self._layers: weakref.WeakKeyDictionary[Module, Layer] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def link(self, first: Module, second: Module) -> None:
        modules = modules_for(first, second)
        for layer in (first, second):
            if not modules.is_module(layer):
                raise UsageError(
                    f"[set_forward_prefetch_layer] {type(layer).__name__} is no module: pass layers of the model"
                )
        with self._lock:
            head: Layer | None = self._layers.get(first)
            last = self._layers.get(second)
            ring = first is second
            while head is not None and last is not None:
                ring = ring or head is last
                head = head.before
            if ring:
                raise UsageError(
                    f"[set_forward_prefetch_layer] {type(second).__name__} is before {type(first).__name__} already, or the "
                    "same layer: link layers in the order of forward"
                )
            one, two = self._layer(modules, first), self._layer(modules, second)
            self._join(one, two)

    def _layer(self, modules: Modules, module: Module) -> Layer:
        layer = self._layers.get(module)
        if layer is None:
            inner = modules.wrapped(module)
            name = f"{type(inner if inner is not None else module).__name__}-{next(self._numbers)}"
            group = self._groups[name] = Group(name)
            layer = self._layers[module] = Layer(modules, module, group)
            weakref.finalize(module, self._groups.pop, name, None).atexit = False
        return layer

    @staticmethod
    def _join(first: Layer, second: Layer) -> None:
        behind = first.behind()
        if behind is not None:
            behind.before = None
        if second.before is not None:
            second.before.behind = lambda: None
        first.behind = weakref.ref(second)
        second.before = first

    def unlink(self, module: Module) -> None:
        with self._lock:
            layer = self._layers.pop(module, None)
            if layer is None:
                raise UsageError(
                    f"[unregister_forward_prefetch_layer] this {type(module).__name__} is in no chain: pass a layer that "
                    "set_forward_prefetch_layer was called with"
                )
            layer.remove_hooks()
            self._groups.pop(layer.group.name, None)
            before, behind = layer.before, layer.behind()
            if before is not None:
                before.behind = lambda: None
            if behind is not None:
                behind.before = None
            if before is not None and behind is not None:
                self._join(before, behind)

    def unlink_all(self, modules: Iterable[Module] | None) -> None:
        for module in list(self._layers) if modules is None else list(modules):
            self.unlink(module)
