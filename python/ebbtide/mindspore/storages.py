"""Storages of MindSpore tensors, with identities that the reuse of an address cannot fake."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import mindspore
from mindspore import Tensor, mint
from mindspore.common.api import _pynative_executor

from ebbtide.mindspore.counters import Mark

ALIGNMENT_BYTES = 512

_numbers = itertools.count(1)


class HeldStorage:
    """A storage that is held: while this object lives, nobody is given its address anew."""

    __slots__ = ("__weakref__", "_leaves", "address", "device", "memory", "nbytes", "number")

    def __init__(self, memory: Any, device: int) -> None:
        self.memory = memory
        self.number = next(_numbers)
        self.address: int = memory.data_ptr()
        self.nbytes: int = memory.nbytes()
        self.device = device
        self._leaves: list[weakref.ref[Mark]] = []

    def moved(self) -> bool:
        """Whether somebody gave the storage other memory since."""
        return bool(self.memory.data_ptr() != self.address or self.memory.nbytes() != self.nbytes)

    def note_leaf(self, mark: Mark) -> None:
        """A tensor of it that no operation of a graph made, such as an input or a buffer, was saved."""
        if not any(leaf() is mark for leaf in self._leaves):
            self._leaves.append(weakref.ref(mark))

    def is_of_living_leaf(self) -> bool:
        return any(leaf() is not None for leaf in self._leaves)


class HostBuffer:
    """Host memory for a restored storage. Tensors over it keep this object alive.

    It comes from MindSpore's pool, which keeps what it was once given: other memory would come on top of that.
    """

    __slots__ = (
        "__array_interface__",
        "__weakref__",
        "_owner",
        "address",
        "device",
        "nbytes",
        "number",
    )

    def __init__(self, nbytes: int, residue: int) -> None:
        self._owner = mint.empty((nbytes,), dtype=mindspore.uint8, device="CPU")
        if (self._owner.data_ptr() - residue) % ALIGNMENT_BYTES != 0:
            more = nbytes + ALIGNMENT_BYTES
            self._owner = mint.empty((more,), dtype=mindspore.uint8, device="CPU")
        # What is queued may still use this memory, and is not waited for by those who fill it.
        _pynative_executor.sync()
        start: int = self._owner.data_ptr()
        self.address: int = start + (residue - start) % ALIGNMENT_BYTES
        self.number = next(_numbers)
        self.nbytes = nbytes
        self.device = 0
        self.__array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }

    def moved(self) -> bool:
        return False

    def note_leaf(self, mark: Mark) -> None:
        pass

    def is_of_living_leaf(self) -> bool:
        return False


Held = HeldStorage | HostBuffer


class Storages:
    """Those that somebody holds, by address: while they are held no other storage has it."""

    def __init__(self) -> None:
        self._by_address: weakref.WeakValueDictionary[int, Held] = weakref.WeakValueDictionary()

    def of(self, tensor: Tensor, device: int) -> Held:
        memory = tensor.untyped_storage()
        address = memory.data_ptr()
        held = self._by_address.get(address)
        if held is None or held.nbytes != memory.nbytes() or held.moved():
            held = self._by_address[address] = HeldStorage(memory, device)
        return held

    def add(self, held: Held) -> Held:
        self._by_address[held.address] = held
        return held
