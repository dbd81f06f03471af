"""The independent count of `saved_bytes` for MindSpore, whose storages are told apart by holding all of them.

MindSpore cannot say who else holds a storage: what the caller knows to be held is named. Ebbtide sees that only where
the tensor itself was saved, and not a view of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import mindspore_memory as memory
from mindspore import Tensor, ops, saved_tensors_hooks
from saved_bytes import SavedBytes, SavedStorage, extent, union_bytes


class _Record:
    def __init__(self, storage: Any) -> None:
        self.storage = storage
        self.extents: list[range] = []
        self.views: set[Any] = set()
        self.shapes: set[Any] = set()


class _Count:
    def __init__(self, weights: Iterable[Tensor]) -> None:
        self._weights = {memory.storage_address(weight) for weight in weights}
        self._current: dict[tuple[int, int], _Record] = {}
        self._records: list[_Record] = []
        self._parameters = 0

    def pack(self, tensor: Tensor) -> Tensor:
        address = memory.storage_address(tensor)
        if address in self._weights:
            self._parameters += 1
        else:
            record = self._record(tensor)
            itemsize = memory.numpy_dtype(tensor).itemsize
            view = (tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()))
            record.extents.append(extent(*view, itemsize))
            record.views.add((*view, tensor.dtype))
            record.shapes.add(tuple(tensor.shape))
        return ops.stop_gradient(tensor)

    def _record(self, tensor: Tensor) -> _Record:
        key = (memory.storage_address(tensor), tensor._version)
        if key not in self._current:
            self._current[key] = _Record(tensor.untyped_storage())
            self._records.append(self._current[key])
        return self._current[key]

    def finish(self, held: Iterable[Tensor]) -> SavedBytes:
        shapes = {memory.storage_address(tensor): tuple(tensor.shape) for tensor in held}
        storages = tuple(
            SavedStorage(
                record.storage.data_ptr(),
                record.storage.nbytes(),
                union_bytes(record.extents),
                len(record.extents),
                len(record.views),
                held=shapes.get(record.storage.data_ptr()) in record.shapes,
                dropped=False,
            )
            for record in self._records
        )
        return SavedBytes(storages, self._parameters, parameter_casts=0, small=0)


def count_saved(
    run: Callable[[], Any],
    weights: Iterable[Tensor],
    held: Iterable[Tensor] = (),
) -> SavedBytes:
    """Runs ``run``, a forward with or without its backward, to be counted. ``held``: by the caller."""
    count = _Count(weights)
    with saved_tensors_hooks(count.pack, lambda tensor: tensor):
        run()
    return count.finish(held)
