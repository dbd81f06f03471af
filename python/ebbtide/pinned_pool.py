"""Page-locked host memory for copies from and to a device. It belongs to the process: every ``offload`` object shares it."""

from __future__ import annotations

from ebbtide import _core
from ebbtide.framework import Bytes, Streams

# Slices of a slab that are kept: blocks come again with every step.
_MAX_SLICES = 8192


class PinnedPool:
    """Page-locked host memory of one device type, in slabs that the engine carves up."""

    def __init__(self, streams: Streams) -> None:
        self.space = _core.HostPool.of_added_slabs()
        self._streams = streams
        self._slabs: dict[int, Bytes] = {}
        self.slices: dict[
            int, dict[tuple[int, int], Bytes]
        ] = {}  # made so far, by slab, offset and bytes

    def grow(self, nbytes: int, limit: int) -> bool:
        """Adds a slab; False where the system has no page-locked memory for it."""
        self._drop(max(0, limit - nbytes))
        slab = self._streams.pinned(nbytes)
        if slab is None:
            return False
        address = self._streams.address(slab)
        self.slices[address] = {}
        self._slabs[address] = slab
        self.space.add_slab(address, nbytes)
        return True

    def trim(self) -> int:
        """Drops slabs that nothing lies in; returns their bytes."""
        return self._drop(0)

    def _drop(self, limit: int) -> int:
        before = self.space.reserved_bytes
        if before <= limit:
            return 0
        for address in self.space.take_empty_slabs(limit):
            del self.slices[address], self._slabs[address]
        return int(before - self.space.reserved_bytes)

    def slice(self, base: int, offset: int, nbytes: int) -> Bytes:
        """A part of the slab at this address."""
        slices = self.slices[base]
        found = slices.get((offset, nbytes))
        if found is None:
            if len(slices) >= _MAX_SLICES:
                slices.clear()
            found = self._streams.part_of(self._slabs[base], offset, nbytes)
            slices[offset, nbytes] = found
        return found
