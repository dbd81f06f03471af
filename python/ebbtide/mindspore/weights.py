"""Which saved tensors are weights: those whose storage a parameter of the cell has."""

from __future__ import annotations

from typing import Any

from mindspore import nn

from ebbtide.errors import UsageError


class CellWeights:
    """Addresses of a cell's parameters, which are alive for as long as the cell. Reads from any thread see a whole walk."""

    def __init__(self, cell: Any) -> None:
        if cell is not None and not isinstance(cell, nn.Cell):
            raise UsageError(
                f"[offload] model is a {type(cell).__name__}: pass a mindspore.nn.Cell, or leave it out"
            )
        self._cell = cell
        self._addresses: frozenset[int] = frozenset()
        self.refresh()

    def refresh(self) -> None:
        if self._cell is None:
            return
        self._addresses = frozenset(
            parameter.data_ptr()
            for _, parameter in self._cell.parameters_and_names()
            if parameter.size > 0 and not parameter.has_init
        )

    def holds(self, storage: Any) -> bool:
        return storage.data_ptr() in self._addresses
