"""How MindSpore's cells are put together, and hooks that tell when a block of one runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mindspore import nn

from ebbtide import blocks
from ebbtide.blocks import BlockCalls, NamedModule
from ebbtide.mindspore import passes

_CONTAINERS = (nn.CellList, nn.SequentialCell, nn.CellDict)


def repeated_blocks(cell: nn.Cell) -> list[NamedModule]:
    return blocks.repeated_blocks(cell, _Structure())


def watch(
    named: Iterable[NamedModule], begin: Callable[[str], None], end: Callable[[str], None]
) -> Callable[[], None]:
    """Calls ``begin(name)`` before and ``end(name)`` after each construct of a block, until the result is called; in pairs,
    see :class:`ebbtide.blocks.BlockCalls`.

    Nothing is called while a backward runs: blocks that it recomputes were told of in their forward.
    """
    calls = BlockCalls(begin, end)
    handles: list[Any] = []

    def remove() -> None:
        while handles:
            handles[-1].remove()
            handles.pop()
        calls.finish()

    try:
        for name, cell in named:
            handles.append(cell.register_forward_pre_hook(_hook(calls.start, name)))
            handles.append(cell.register_forward_hook(_hook(calls.stop, name)))
    except BaseException:
        remove()
        raise
    return remove


def _hook(call: Callable[[str], None], name: str) -> Callable[..., None]:
    def hook(cell: nn.Cell, inputs: Any, output: Any = None) -> None:
        if not passes.is_running():
            call(name)

    return hook


class _Structure:
    """See :class:`ebbtide.blocks.Structure`."""

    def unwrapped(self, module: nn.Cell) -> nn.Cell:
        return module

    def class_of(self, module: nn.Cell) -> type:
        found: type = type(module)
        return found

    def children(self, module: nn.Cell) -> Iterator[NamedModule]:
        return ((name, child) for name, child in module._cells.items() if child is not None)

    def is_container(self, module: nn.Cell) -> bool:
        return isinstance(module, _CONTAINERS)

    def has_parameters(self, module: nn.Cell) -> bool:
        return next(iter(module.get_parameters()), None) is not None

    def is_hookable(self, module: nn.Cell) -> bool:
        # Lists and dicts of cells are never called.
        return not isinstance(module, (nn.CellList, nn.CellDict))
