"""An independent count of what autograd saves: what has to move, what others hold, what is a weight.

Nothing here asks Ebbtide. Storages are told apart by keeping them alive, and others hold what is
still alive once the count has let go of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class SavedStorage:
    """A storage that saved tensors lie in, at one in-place version."""

    address: int
    nbytes: int
    """Of the whole storage."""
    wanted_bytes: int
    """Union of the extents of the saved tensors."""
    tensors: int
    """Saved tensors, duplicates counted."""
    views: int
    """Different ones among them."""
    held: bool
    """Others held it to the end of forward, or until its last saved tensor was dropped."""
    dropped: bool
    """Its saved tensors did not live to the end of forward: nobody used their graph."""


@dataclass(frozen=True)
class SavedBytes:
    """What one forward saved."""

    storages: tuple[SavedStorage, ...]
    parameters: int
    """Saved tensors that lie in the storage of a weight."""
    parameter_casts: int
    """Saved tensors that lie in the storage of a weight's cast."""
    small: int
    """Saved tensors that are empty, or lie in a storage that is too small."""

    @property
    def tensors(self) -> int:
        kept = self.parameters + self.parameter_casts + self.small
        return kept + sum(storage.tensors for storage in self.storages)

    @property
    def unique_bytes(self) -> int:
        return sum(storage.wanted_bytes for storage in self.storages)

    @property
    def free(self) -> list[SavedStorage]:
        """Storages that nobody else holds: a copy lets them go."""
        return [storage for storage in self.storages if not storage.held]

    @property
    def held(self) -> list[SavedStorage]:
        """Storages that others hold when forward is over."""
        return [storage for storage in self.storages if storage.held and not storage.dropped]

    def at_least(self, min_bytes: int) -> SavedBytes:
        """The same with storages below ``min_bytes`` counted as small."""
        large = tuple(storage for storage in self.storages if storage.nbytes >= min_bytes)
        small = sum(storage.tensors for storage in self.storages if storage.nbytes < min_bytes)
        return SavedBytes(large, self.parameters, self.parameter_casts, self.small + small)


def count_saved(forward: Callable[[], Any], weights: Iterable[torch.Tensor] = ()) -> SavedBytes:
    """Runs ``forward`` once, to be counted alone: it has no backward.

    What it returns is held until the count is over.
    """
    casts = _WeightCasts(weights)
    count = _Count(casts)
    with casts, torch.autograd.graph.saved_tensors_hooks(count.pack, _unpack):
        result = forward()
    saved = count.finish()
    del result
    return saved


def _unpack(saved: Any) -> torch.Tensor:
    raise AssertionError("a forward that was run to be counted has no backward")


class _WeightCasts(TorchDispatchMode):
    """Sees weights being cast, whoever casts them. Keeps the casts, so that no address is reused."""

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.weights = {_address(weight) for weight in weights}
        self.casts: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default and _address(args[0]) in self.weights:
            self.casts[_address(result)] = result.detach()
        return result


class _Record:
    """One storage while it is counted: alive, so that its address names nothing else."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage: torch.UntypedStorage | None = storage
        self.address, self.nbytes = storage.data_ptr(), storage.nbytes()
        self._alive = StorageWeakRef(storage)
        self._extents: list[range] = []
        self._views: set[Any] = set()
        self._dropped = 0
        self._held = False

    def add(self, tensor: torch.Tensor) -> None:
        self._extents.append(extent(tensor))
        view = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        self._views.add((*view, tensor.is_conj(), tensor.is_neg()))

    def drop(self) -> None:
        self._dropped += 1
        if self._dropped == len(self._extents):
            self._let_go()

    def finish(self) -> SavedStorage:
        dropped = self.storage is None
        self._let_go()
        return SavedStorage(
            self.address,
            self.nbytes,
            union_bytes(self._extents),
            len(self._extents),
            len(self._views),
            self._held,
            dropped,
        )

    def _let_go(self) -> None:
        if self.storage is not None:
            self.storage = None
            self._held = not self._alive.expired()


class _Saved:
    """What pack returns: part of the graph, and tells when that dies."""

    def __init__(self, record: _Record) -> None:
        self._record = record

    def __del__(self) -> None:
        self._record.drop()


class _Count:
    def __init__(self, casts: _WeightCasts) -> None:
        self._casts = casts
        self._records: list[_Record] = []
        self._current: dict[tuple[int, int], _Record] = {}
        self._parameters = self._parameter_casts = self._empty = 0

    def pack(self, tensor: torch.Tensor) -> _Saved | None:
        address = _address(tensor)
        if address in self._casts.weights:
            self._parameters += 1
        elif address in self._casts.casts:
            self._parameter_casts += 1
        elif tensor.numel() == 0:
            self._empty += 1
        else:
            record = self._record(tensor)
            record.add(tensor)
            return _Saved(record)
        return None

    def _record(self, tensor: torch.Tensor) -> _Record:
        key = (_address(tensor), tensor._version)
        record = self._current.get(key)
        if record is None or record.storage is None:
            record = self._current[key] = _Record(tensor.untyped_storage())
            self._records.append(record)
        return record

    def finish(self) -> SavedBytes:
        storages = tuple(record.finish() for record in self._records)
        return SavedBytes(storages, self._parameters, self._parameter_casts, self._empty)


def extent(tensor: torch.Tensor) -> range:
    """Byte offsets in the storage from the first to the last that the tensor can touch."""
    if tensor.numel() == 0:
        return range(0)
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.storage_offset() * tensor.element_size()
    return range(begin, begin + (last + 1) * tensor.element_size())


def union_bytes(ranges: Iterable[range]) -> int:
    total = end = 0
    for touched in sorted(ranges, key=lambda touched: touched.start):
        total += max(0, touched.stop - max(touched.start, end))
        end = max(end, touched.stop)
    return total


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
