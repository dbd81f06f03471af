"""Which modules of a model make good groups, and hooks that tell when they run."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ebbtide.torch.compiler import skip_frames

NamedModule = tuple[str, nn.Module]

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)

# Where wrappers keep what they wrap: torch.compile, torch's checkpoint and offload wrappers, FSDP1.
_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_PARALLEL = (nn.parallel.DistributedDataParallel, nn.DataParallel)
# Put before the class name by those who change a module's class to a subclass made for it.
_PREFIXES = ("FSDP", "Replicate", "DDP", "Parametrized")

_graph_task_id: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)


def repeated_blocks(model: nn.Module) -> list[NamedModule]:
    """The layers of a model: outermost modules of classes that occur more than once, with their names.

    Where a model (or a part of it) names its blocks in ``_no_split_modules``, as those of transformers do, these are
    taken. Elsewhere children of a ``ModuleList``, ``Sequential`` or ``ModuleDict`` are, if they have parameters and
    submodules of their own.

    A wrapped block counts by what it wraps: the module listed is the outermost wrapper, as only that one is called from
    outside, and names go without wrappers. A module that occurs several times is listed once, under its first name. In
    order of registration, which usually is that of forward.
    """
    names: dict[nn.Module, str] = {}
    for name, module in _find(model, ""):
        names.setdefault(module, name)
    return [(name, module) for module, name in names.items()]


def watch(
    blocks: Iterable[NamedModule], begin: Callable[[str], None], end: Callable[[str], None]
) -> Callable[[], None]:
    """Calls ``begin(name)`` before and ``end(name)`` after each forward of a block, until the result is called.

    Both are called on the thread that runs the block, one block at a time: every begin has its end before the next begin
    on that thread. Where forward raises, the end comes with the next begin or with the removal. What ``begin`` raises is
    raised by the block, which then has not begun.

    Nothing is called for what a compiler traces, nor while a backward runs on the thread: blocks that it recomputes
    were told of in their forward.

    The hooks hold no module. A pickled or deep-copied block has hooks that do nothing in their place. Call the result
    when no other thread is inside a block; a second call does nothing.
    """
    running = _Running()

    def finish() -> None:
        name, running.name = running.name, None
        if name is not None:
            end(name)

    def start(name: str) -> None:
        finish()
        running.name = name
        try:
            begin(name)
        except BaseException:
            running.name = None
            raise

    def stop(name: str) -> None:
        if running.name == name:
            finish()

    handles: list[Any] = []

    def remove() -> None:
        while handles:  # as often as it takes, should a signal handler raise in between
            handles[-1].remove()
            handles.pop()
        finish()

    # No always_call: compiled code is guarded by the numbers of such hooks, so each installation would compile anew.
    try:
        for name, module in blocks:
            handles.append(module.register_forward_pre_hook(_Hook(start, name), prepend=True))
            handles.append(module.register_forward_hook(_Hook(stop, name)))
    except BaseException:
        remove()
        raise
    return remove


class _Running(threading.local):
    name: str | None = None


class _Hook:
    """Calls ``call(name)`` where a block really runs its forward."""

    def __init__(self, call: Callable[[str], None], name: str) -> None:
        self._call = call
        self._name = name

    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        # First: the rest cannot be traced.
        if torch.compiler.is_compiling():
            return
        if _graph_task_id() == -1:
            self._call(self._name)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _Hook, (_ignore, self._name)


def _ignore(name: str) -> None:
    pass


skip_frames((_Hook.__call__,))


# --- search


def _find(module: nn.Module, name: str) -> list[NamedModule]:
    """Every place of a block below ``module``."""
    core = _unwrapped(module)
    if declared := _declared(core):
        places = list(_outermost(core, name, declared))
        repeated = _repeated_classes(place for _, place in places)
        if places := [place for place in places if _class_of(place[1]) in repeated]:
            return places
    found: list[NamedModule] = []
    children = list(_children(core, name))
    repeated = set()
    if isinstance(core, _CONTAINERS):
        repeated = _repeated_classes(child for _, child in children)
    for child_name, child in children:
        is_block = _class_of(child) in repeated and _may_be_block(child)
        inside: list[NamedModule] = []
        if not is_block or _is_divisible(child):
            inside = _find(child, child_name)
        found += [(child_name, child)] if is_block and not inside else inside
    return found


def _outermost(core: nn.Module, name: str, class_names: set[str]) -> Iterator[NamedModule]:
    for child_name, child in _children(core, name):
        inner = _unwrapped(child)
        names = {type(inner).__name__, _class_of(inner).__name__}
        if names & class_names and _is_hookable(child):
            yield child_name, child
        else:
            yield from _outermost(inner, child_name, class_names)


def _children(core: nn.Module, name: str) -> Iterator[NamedModule]:
    for child_name, child in core._modules.items():
        if child is not None:
            yield f"{name}.{child_name}" if name else child_name, child


def _declared(core: nn.Module) -> set[str]:
    """Class names in ``_no_split_modules`` of a module that has any, and of those inside it."""
    names: set[str] = set()
    if getattr(core, "_no_split_modules", None):
        for module in core.modules():
            given = getattr(module, "_no_split_modules", None) or ()
            names.update((given,) if isinstance(given, str) else given)
    return names


def _repeated_classes(modules: Iterable[nn.Module]) -> set[type]:
    counts = Counter(map(_class_of, modules))
    return {module_class for module_class, count in counts.items() if count > 1}


def _may_be_block(module: nn.Module) -> bool:
    core = _unwrapped(module)
    # A parametrized layer has its parametrizations as a submodule.
    has_submodules = any(name != "parametrizations" for name, _ in core.named_children())
    has_parameters = next(core.parameters(), None) is not None
    return has_submodules and has_parameters and _is_hookable(module)


def _is_divisible(module: nn.Module) -> bool:
    """Whether blocks inside are better groups: a list of layers or a whole model among its like."""
    core = _unwrapped(module)
    return isinstance(core, _CONTAINERS) or bool(_declared(core))


def _is_hookable(module: nn.Module) -> bool:
    """Whether it is called, as plain lists of modules are not, and takes hooks, as scripted ones do not."""
    core = _unwrapped(module)
    if isinstance(core, torch.jit.ScriptModule):
        return False
    return type(core).forward is not nn.Module.forward


def _unwrapped(module: nn.Module) -> nn.Module:
    inner: nn.Module | None = module
    while inner is not None:
        module = inner
        places = ("module",) if isinstance(module, _PARALLEL) else _WRAPPED
        inner = next((child for name, child in module.named_children() if name in places), None)
    return module


def _class_of(module: nn.Module) -> type:
    """The class that the user's code gave a module, or what it wraps."""
    found: type = type(_unwrapped(module))
    base: type | None = found
    while base is not None:
        found = base
        names = {prefix + base.__name__: base for base in found.__bases__ for prefix in _PREFIXES}
        base = names.get(found.__name__)
    return found
