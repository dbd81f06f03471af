"""How MindSpore's cells are put together, and hooks that tell when a block of one runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mindspore import nn

from ebbtide import blocks
from ebbtide.blocks import BlockCalls, NamedModule
from ebbtide.mindspore import passes
from ebbtide.mindspore.watching import original_class, watch_construct

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
    removes: list[Callable[[], None]] = []

    def remove() -> None:
        while removes:
            removes[-1]()
            removes.pop()
        calls.finish()

    try:
        for name, cell in named:
            # What recomputation saves of a block's inputs, it saves between these and construct.
            start, stop = _hook(calls.start, name), _hook(calls.stop, name)
            removes.append(cell.register_forward_pre_hook(start).remove)
            removes.append(cell.register_forward_hook(stop).remove)
            removes.append(watch_construct(cell, _nothing, _where_raised(calls.stop, name)))
    except BaseException:
        remove()
        raise
    return remove


def _hook(call: Callable[[str], None], name: str) -> Callable[..., None]:
    def hook(cell: nn.Cell, inputs: Any, output: Any = None) -> None:
        if not passes.is_running():
            call(name)

    return hook


def _where_raised(call: Callable[[str], None], name: str) -> Callable[[Any], None]:
    def behind(output: Any) -> None:
        if output is None and not passes.is_running():
            call(name)

    return behind


def _nothing() -> None:
    pass


class _Structure:
    """See :class:`ebbtide.blocks.Structure`."""

    def unwrapped(self, module: nn.Cell) -> nn.Cell:
        return module

    def class_of(self, module: nn.Cell) -> type:
        return original_class(module)

    def children(self, module: nn.Cell) -> Iterator[NamedModule]:
        return ((name, child) for name, child in module._cells.items() if child is not None)

    def is_container(self, module: nn.Cell) -> bool:
        return isinstance(module, _CONTAINERS)

    def has_parameters(self, module: nn.Cell) -> bool:
        return next(iter(module.get_parameters()), None) is not None

    def is_hookable(self, module: nn.Cell) -> bool:
        # Lists and dicts of cells are never called.
        return not isinstance(module, (nn.CellList, nn.CellDict))
