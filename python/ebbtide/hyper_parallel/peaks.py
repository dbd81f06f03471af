"""Whether the peak of a device's memory was reached in the recomputation of a region.

The allocator's own peak is compared at the beginning and at the end of each recomputation, and never reset. What raised it
in between is the recomputation, or another thread that works on the device at that time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType

from ebbtide.modules import MemoryUse, Modules


@dataclass(frozen=True)
class RecomputationPeak:
    """A device's peak, ``peak_bytes``, of which ``nbytes`` came on top of what was allocated when the region's
    recomputation began."""

    region: str
    device: int
    nbytes: int
    peak_bytes: int


# By framework and device. Any thread may change it without a lock: the last recomputation counts.
_found: dict[tuple[type[Modules], int], tuple[Modules, RecomputationPeak]] = {}


class Recomputation:
    """The context of one recomputation, on one thread: two looks at the allocator."""

    def __init__(self, modules: Modules, region: Callable[[], str]) -> None:
        self._modules = modules
        self._region = region

    def __enter__(self) -> None:
        self._began = self._modules.memory_use()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        modules, began = self._modules, self._began
        ended = None if began is None else modules.memory_use(began.device)
        if began is None or ended is None:
            return
        if ended.peak_bytes > began.peak_bytes:
            nbytes = ended.peak_bytes - began.allocated_bytes
            peak = RecomputationPeak(self._region(), ended.device, nbytes, ended.peak_bytes)
            _found[type(modules), ended.device] = modules, peak
        else:
            _still_there(modules, ended)


def _still_there(modules: Modules, use: MemoryUse) -> RecomputationPeak | None:
    """What was found of the device; forgotten where another peak was reached since, or the user reset it."""
    key = type(modules), use.device
    _, peak = _found.get(key, (None, None))
    if peak is not None and peak.peak_bytes != use.peak_bytes:
        _found.pop(key, None)
        return None
    return peak


def recomputation_peaks() -> Iterator[RecomputationPeak]:
    """Of the devices whose peak was reached in a recomputation that has ended, and nowhere since."""
    for (_, device), (modules, _) in sorted(_found.items(), key=lambda item: item[0][1]):
        use = modules.memory_use(device)
        peak = None if use is None else _still_there(modules, use)
        if peak is not None:
            yield peak
