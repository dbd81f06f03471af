"""An independent count of what autograd saves: what has to move, what others hold, what is a weight.

Nothing here asks Ebbtide. Storages are told apart by keeping them alive, and others hold what is
still alive once the count has let go of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


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


def extent(offset: int, sizes: Sequence[int], strides: Sequence[int], itemsize: int) -> range:
    """Byte offsets in the storage from the first to the last that a view can touch. The others in elements."""
    if 0 in sizes:
        return range(0)
    last = sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
    return range(offset * itemsize, (offset + last + 1) * itemsize)


def union_bytes(ranges: Iterable[range]) -> int:
    total = end = 0
    for touched in sorted(ranges, key=lambda touched: touched.start):
        total += max(0, touched.stop - max(touched.start, end))
        end = max(end, touched.stop)
    return total
