"""What the tests share: the exact configuration, comparison by bits, an independent byte count, the at-rest check."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

import ebbtide.torch as ebb

# Nothing is held back: every storage is copied as soon as nobody else holds it, and copies are waited for.
EXACT: dict[str, Any] = {"min_bytes": 0, "keep_last_bytes": 0, "in_flight_bytes": 0}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal shape, dtype and bits; NaNs compare by their bits too."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = (t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1) for t in (a, b))
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def assert_same_bits(found: Iterable[torch.Tensor | None], expected: Iterable[torch.Tensor | None]) -> None:
    found, expected = list(found), list(expected)
    assert len(found) == len(expected)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert (a is None) == (b is None), f"tensor {i}: {a is None=} {b is None=}"
        if a is not None and b is not None:
            assert same_bits(a, b), f"tensor {i} of shape {tuple(a.shape)} differs"


def assert_at_rest(tide: ebb.Offload) -> None:
    """Nothing is held any more; without a garbage collector run."""
    tide.synchronize()
    stats = tide.stats()
    held = (stats.entries, stats.device_bytes, stats.host_bytes, stats.disk_bytes, stats.parked)
    assert held == (0, 0, 0, 0, 0), stats


def assert_loaded(tide: ebb.Offload) -> None:
    """The test moved bytes: without this a test of restores could pass on live hits alone."""
    stats = tide.stats()
    assert stats.d2h_bytes > 0, stats
    assert stats.h2d_bytes > 0, stats


def extent_bytes(tensor: torch.Tensor) -> range:
    """Byte offsets in the storage from the first to the last that the tensor can touch."""
    if tensor.numel() == 0:
        return range(0)
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.storage_offset() * tensor.element_size()
    return range(begin, begin + (last + 1) * tensor.element_size())


class SavedBytes:
    """An independent count of what autograd saves: the union of extents per storage, weights left out.

    Keeps the saved tensors alive while it counts, so that an address names one storage.
    """

    def __init__(self, weights: Iterable[torch.Tensor] = ()) -> None:
        self._weights = {w.untyped_storage().data_ptr() for w in weights}
        self.tensors: list[torch.Tensor] = []

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        alias = tensor.detach()
        self.tensors.append(alias)
        return alias

    def count(self, forward: Callable[[], Any]) -> int:
        """Runs ``forward`` once under hooks and returns the bytes."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved):
            keep = forward()
        by_storage: dict[int, list[tuple[int, int]]] = {}
        for tensor in self.tensors:
            address = tensor.untyped_storage().data_ptr()
            touched = extent_bytes(tensor)
            if address in self._weights or len(touched) == 0:
                continue
            by_storage.setdefault(address, []).append((touched.start, touched.stop))
        del keep
        return sum(_union(ranges) for ranges in by_storage.values())


def _union(ranges: list[tuple[int, int]]) -> int:
    total = end = 0
    for begin, stop in sorted(ranges):
        begin = max(begin, end)
        total += max(0, stop - begin)
        end = max(end, stop)
    return total
