"""What a forward saves on the device, counted without Ebbtide."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef


def union_bytes(
    forward: Callable[[], torch.Tensor], weights: Iterable[torch.Tensor], device_type: str
) -> int:
    """Bytes that saved tensors cover, per storage once, where nobody else holds the storage.

    Storages are told apart by being held; others hold what lives on when that ends.
    """
    of_weights = {weight.untyped_storage().data_ptr() for weight in weights}
    storages: dict[tuple[int, int], torch.UntypedStorage] = {}
    extents: dict[tuple[int, int], list[range]] = {}

    def pack(tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if tensor.device.type != device_type or storage.data_ptr() in of_weights:
            return
        if tensor.numel() == 0:
            return
        key = (storage.data_ptr(), tensor._version)
        storages.setdefault(key, storage)
        extents.setdefault(key, []).append(_extent(tensor))

    with saved_tensors_hooks(pack, _never):
        result = forward()
    total = 0
    while storages:
        key, storage = storages.popitem()
        alive = StorageWeakRef(storage)
        del storage
        if alive.expired():
            total += _union(extents[key])
    del result
    return total


def _never(saved: None) -> torch.Tensor:
    raise AssertionError("a forward that is counted has no backward")


def _extent(tensor: torch.Tensor) -> range:
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.storage_offset() * tensor.element_size()
    return range(begin, begin + (last + 1) * tensor.element_size())


def _union(ranges: Iterable[range]) -> int:
    total = end = 0
    for touched in sorted(ranges, key=lambda touched: touched.start):
        total += max(0, touched.stop - max(touched.start, end))
        end = max(end, touched.stop)
    return total
