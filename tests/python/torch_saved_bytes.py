"""The independent count of `saved_bytes` for PyTorch: use counts tell what others hold, dispatch what is cast."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch._dynamo  # layer_norm's first call would import it, and frames of the import hold what that call holds
from saved_bytes import SavedBytes, SavedStorage, extent, union_bytes
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


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
        self._extents.append(extent_of(tensor))
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


def extent_of(tensor: torch.Tensor) -> range:
    """Byte offsets in the storage from the first to the last that the tensor can touch."""
    return extent(tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.element_size())


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
