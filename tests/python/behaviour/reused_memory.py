"""Memory that surely goes to the next tensor once the tensor that had it is gone."""

from __future__ import annotations

import weakref
from typing import Any

import numpy
from support import DEVICE


class ReusedMemory:
    """Makes tensors of up to ``most`` floats, on the memory that was given back last if there is any.

    A framework's CPU allocator may split or join what it got back, and where it cuts next depends on what else runs; the
    test device hands out freed blocks at once.
    """

    def __init__(self, backend: Any, most: int) -> None:
        self.addresses: list[int] = []
        self._backend, self._most = backend, most
        self._free: list[numpy.ndarray] = []

    def tensor(self, *sizes: int, seed: int) -> Any:
        tensor = self._make(sizes, seed)
        self.addresses.append(self._backend.address(tensor))
        return tensor

    def is_reused(self) -> bool:
        return len(set(self.addresses)) < len(self.addresses)

    def _make(self, sizes: tuple[int, ...], seed: int) -> Any:
        if DEVICE != "cpu":
            return self._backend.tensor(*sizes, seed=seed)
        memory = self._free.pop() if self._free else numpy.empty(self._most, numpy.float32)
        count = int(numpy.prod(sizes))
        view = memory[:count].reshape(sizes)
        view[...] = numpy.random.default_rng(seed).standard_normal(sizes)
        weakref.finalize(view, self._free.append, memory)  # the storage holds it
        return self._backend.around(view)
