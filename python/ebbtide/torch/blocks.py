"""How torch's models are put together, and hooks that tell when a block of one runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ebbtide import blocks
from ebbtide.blocks import BlockCalls, NamedModule
from ebbtide.torch.compiler import skip_frames

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)

# Where wrappers keep what they wrap: torch.compile, torch's checkpoint and offload wrappers, FSDP1.
_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_PARALLEL = (nn.parallel.DistributedDataParallel, nn.DataParallel)
# Put before the class name by those who change a module's class to a subclass made for it.
_PREFIXES = ("FSDP", "Replicate", "DDP", "Parametrized")

# Of the backward that runs on this thread; -1 where none does.
graph_task_id: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)


def current_pass() -> int:
    """Of the backward that runs on this thread; 0 where none does."""
    return graph_task_id() + 1


def repeated_blocks(model: nn.Module) -> list[NamedModule]:
    return blocks.repeated_blocks(model, _Structure())


def watch(
    named: Iterable[NamedModule], begin: Callable[[str], None], end: Callable[[str], None]
) -> Callable[[], None]:
    """Calls ``begin(name)`` before and ``end(name)`` after each forward of a block, until the result is called; in pairs,
    see :class:`ebbtide.blocks.BlockCalls`.

    Nothing is called for what a compiler traces, nor while a backward runs on the thread: blocks that it recomputes
    were told of in their forward.

    The hooks hold no module. A pickled or deep-copied block has hooks that do nothing in their place. Call the result
    when no other thread is inside a block; a second call does nothing.
    """
    calls = BlockCalls(begin, end)
    handles: list[Any] = []

    def remove() -> None:
        while handles:  # as often as it takes, should a signal handler raise in between
            handles[-1].remove()
            handles.pop()
        calls.finish()

    try:
        for name, module in named:
            handles.append(module.register_forward_pre_hook(_Hook(calls.start, name), prepend=True))
            handles.append(_AtEnd(module, _Hook(calls.stop, name)))
    except BaseException:
        remove()
        raise
    return remove


class _AtEnd:
    """As ``register_forward_hook(always_call=True)``, also called where forward raises, under the same number each time:
    compiled code is guarded by these numbers, and would be compiled anew for every installation."""

    def __init__(self, module: nn.Module, hook: _Hook) -> None:
        hooks = module._forward_hooks
        self._key = -1
        while self._key in hooks:
            self._key -= 1
        # Private to torch: where there is none, the end is seen with the next begin.
        always: dict[int, bool] = getattr(module, "_forward_hooks_always_called", {})
        self._dicts: tuple[Any, ...] = hooks, always
        always[self._key] = True
        hooks[self._key] = hook

    def remove(self) -> None:
        for of_hooks in self._dicts:
            of_hooks.pop(self._key, None)


class _Hook:
    """Calls ``call(name)`` where a block really runs its forward."""

    def __init__(self, call: Callable[[str], None], name: str) -> None:
        self._call = call
        self._name = name

    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        # First: the rest cannot be traced.
        if torch.compiler.is_compiling():
            return
        if graph_task_id() == -1:
            self._call(self._name)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _Hook, (_ignore, self._name)


def _ignore(name: str) -> None:
    pass


skip_frames((_Hook.__call__,))


class _Structure:
    """See :class:`ebbtide.blocks.Structure`."""

    def unwrapped(self, module: nn.Module) -> nn.Module:
        inner: nn.Module | None = module
        while inner is not None:
            module = inner
            places = ("module",) if isinstance(module, _PARALLEL) else _WRAPPED
            inner = next((child for name, child in module.named_children() if name in places), None)
        return module

    def class_of(self, module: nn.Module) -> type:
        found: type = type(self.unwrapped(module))
        base: type | None = found
        while base is not None:
            found = base
            names = {
                prefix + base.__name__: base for base in found.__bases__ for prefix in _PREFIXES
            }
            base = names.get(found.__name__)
        return found

    def children(self, module: nn.Module) -> Iterator[NamedModule]:
        return ((name, child) for name, child in module._modules.items() if child is not None)

    def is_container(self, module: nn.Module) -> bool:
        return isinstance(module, _CONTAINERS)

    def has_parameters(self, module: nn.Module) -> bool:
        return next(module.parameters(), None) is not None

    def is_hookable(self, module: nn.Module) -> bool:
        core = self.unwrapped(module)
        # Scripted modules take no hooks.
        if isinstance(core, torch.jit.ScriptModule):
            return False
        return type(core).forward is not nn.Module.forward
