"""Counts that ask no offloader: what may move at most, and whether what came back shares storages."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from saved_bytes import union_bytes
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch_saved_bytes import count_saved, extent_of

from peers.cases import Scenario


@dataclass(frozen=True)
class Bound:
    """Of one forward and its backwards. Storages of weights, and those that others hold, are not in it."""

    d2h_bytes: int = 0
    """Union of the ranges that saved tensors cover, per storage."""
    h2d_bytes: int = 0
    """The same of what each backward asks for."""
    freeable_bytes: int = 0
    """Whole storages that only the graph holds when forward is over."""
    shared_storages: int = 0
    """Of which a backward reads more than one saved tensor; weights count here."""


def bound(make: Callable[[], Scenario]) -> Bound:
    """Two runs: one to see who else holds the storages, one to see what backward reads."""
    scenario = make()
    torch.manual_seed(0)
    saved = count_saved(lambda: scenario.forward(contextlib.nullcontext), scenario.weights)
    del scenario

    scenario = make()
    reads = _Reads({_address(weight) for weight in scenario.weights})
    torch.manual_seed(0)
    with watch_aliases() as watch:
        forward = scenario.forward(lambda: saved_tensors_hooks(reads.pack, reads.unpack))
        scenario.gradients(forward)
    if len(reads.records) != len(saved.storages):
        raise AssertionError(f"{len(reads.records)} and {len(saved.storages)} storages: not equal")
    h2d = sum(
        union_bytes(ranges)
        for record, storage in zip(reads.records, saved.storages, strict=True)
        if not storage.held
        for ranges in record.read.values()
    )
    freeable = sum(storage.nbytes for storage in saved.free if not storage.dropped)
    d2h = sum(storage.wanted_bytes for storage in saved.free)
    return Bound(d2h, h2d, freeable, watch.finish().shared)


class _Record:
    def __init__(self) -> None:
        self.tickets = 0
        self.read: dict[int, list[range]] = defaultdict(list)


class _Ticket:
    """Holds its tensor, as a graph without hooks would."""

    def __init__(self, record: _Record, tensor: torch.Tensor) -> None:
        self.record = record
        self.tensor = tensor.detach()
        record.tickets += 1

    def __del__(self) -> None:
        self.record.tickets -= 1


class _Reads:
    """Tells storages apart as `count_saved` does, so that its records are in the same order."""

    def __init__(self, weights: set[int]) -> None:
        self.records: list[_Record] = []
        self._weights = weights
        self._current: dict[tuple[int, int], _Record] = {}

    def pack(self, tensor: torch.Tensor) -> _Ticket | torch.Tensor:
        address = _address(tensor)
        if address in self._weights or tensor.numel() == 0:
            return tensor.detach()
        key = (address, tensor._version)
        record = self._current.get(key)
        if record is None or record.tickets == 0:
            record = self._current[key] = _Record()
            self.records.append(record)
        return _Ticket(record, tensor)

    def unpack(self, packed: _Ticket | torch.Tensor) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        packed.record.read[torch._C._current_graph_task_id()].append(extent_of(packed.tensor))
        return packed.tensor


@dataclass
class Aliases:
    """Storages of which a backward read more than one saved tensor."""

    shared: int = 0
    kept: int = 0
    """Of these, those whose restored tensors all lay in one storage."""


class _Watched:
    def __init__(self, group: int, packed: Any) -> None:
        self.group = group
        self.packed = packed


class _Watch:
    """Looks at what hooks are given and give back, and hands both on unchanged."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, int], int] = {}
        self._weak: list[
            StorageWeakRef
        ] = []  # while one is held, its number names no other storage
        self._restored: dict[tuple[int, int], list[torch.Tensor]] = defaultdict(list)

    def wrap(self, pack: Any, unpack: Any) -> tuple[Any, Any]:
        if getattr(pack, "__module__", None) == "torch.utils.checkpoint":
            return pack, unpack  # gives back what it computed anew

        def watched_pack(tensor: torch.Tensor) -> _Watched:
            group = self._group(tensor)
            return _Watched(group, pack(tensor))

        def watched_unpack(watched: _Watched) -> torch.Tensor:
            tensor = unpack(watched.packed)
            if watched.group >= 0:
                key = (watched.group, torch._C._current_graph_task_id())
                # Held to the end, so that storages that are not the same have different numbers.
                self._restored[key].append(tensor.detach())
            return tensor

        return watched_pack, watched_unpack

    def _group(self, tensor: torch.Tensor) -> int:
        if tensor.numel() == 0:
            return -1
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor._version)
        if key not in self._groups:
            self._groups[key] = len(self._groups)
            self._weak.append(StorageWeakRef(storage))
        return self._groups[key]

    def finish(self) -> Aliases:
        aliases = Aliases()
        for tensors in self._restored.values():
            if len(tensors) > 1:
                aliases.shared += 1
                aliases.kept += len({t.untyped_storage()._cdata for t in tensors}) == 1
        self._restored.clear()
        return aliases


@contextlib.contextmanager
def watch_aliases() -> Iterator[_Watch]:
    """Every pair of hooks that is entered meanwhile is watched."""
    watch = _Watch()
    autograd = torch._C._autograd
    push = autograd._push_saved_tensors_default_hooks
    autograd._push_saved_tensors_default_hooks = lambda *hooks: push(*watch.wrap(*hooks))
    try:
        yield watch
    finally:
        autograd._push_saved_tensors_default_hooks = push


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
