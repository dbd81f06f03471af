"""Whether the peak of a device's memory was reached where a checkpointed region is recomputed, or in its backward.

The allocator's own peak is compared at the beginning and at the end, and never reset. What raised it in between is the
region, or another thread that works on the device at that time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ebbtide.framework import DeviceMemory, MemoryUse
from ebbtide.report import render_paragraph
from ebbtide.sizes import format_bytes


@dataclass(frozen=True)
class RecomputationPeak:
    """A device's peak, ``peak_bytes``, of which ``nbytes`` came on top of what was allocated when the region's
    recomputation began. ``region`` is empty where its name is not known."""

    region: str
    device: int
    nbytes: int
    peak_bytes: int


# By framework and device. Any thread may change it without a lock: the last recomputation counts.
_found: dict[tuple[DeviceMemory, int], RecomputationPeak] = {}


class Recomputation:
    """From the beginning of one region's recomputation, when this is made, to the end of the region's backward.

    Owned by what lives as long as the region has something saved, and in a backward that keeps no graph is dropped with
    the last of it: its end is the region's. Dropped after that backward, the end was not seen, and nothing is said.
    """

    __slots__ = ("_began", "_memory", "_pass", "_region")

    def __init__(self, memory: DeviceMemory, region: str = "") -> None:
        self._memory = memory
        self._region = region
        self._pass = memory.current_pass()
        began = self._began = memory.use() if self._pass else None
        if began is not None:
            _still_there(memory, began)

    def look(self) -> None:
        """Everything up to now belongs to the region."""
        began = self._began
        ended = None if began is None else self._memory.use(began.device)
        if began is None or ended is None:
            return
        # What is still there was found in between: in a region inside this one.
        if _still_there(self._memory, ended) is None and ended.peak_bytes > began.peak_bytes:
            nbytes = ended.peak_bytes - began.allocated_bytes
            peak = RecomputationPeak(self._region, ended.device, nbytes, ended.peak_bytes)
            _found[self._memory, ended.device] = peak

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if getattr(self, "_began", None) is None or finalizing():
            return
        if self._memory.current_pass() == self._pass:
            self.look()


def _still_there(memory: DeviceMemory, use: MemoryUse) -> RecomputationPeak | None:
    """What was found of the device; forgotten where another peak was reached since, or the user reset it."""
    key = memory, use.device
    peak = _found.get(key)
    if peak is not None and peak.peak_bytes != use.peak_bytes:
        _found.pop(key, None)
        return None
    return peak


def recomputation_peaks() -> Iterator[RecomputationPeak]:
    """Of the devices whose peak was reached where a region was recomputed, and nowhere since."""
    for memory, device in sorted(_found, key=lambda key: key[1]):
        use = memory.use(device)
        peak = None if use is None else _still_there(memory, use)
        if peak is not None:
            yield peak


def render_peaks() -> str:
    """For below a report: a paragraph of each."""
    return "".join(
        render_paragraph(
            "device peak: in the recomputation of a checkpointed region "
            f"({peak.region}{' on ' if peak.region else ''}device {peak.device}) or its backward, "
            f"{format_bytes(peak.nbytes)} above what was allocated when that began: more offload does not lower these"
        )
        for peak in recomputation_peaks()
    )
