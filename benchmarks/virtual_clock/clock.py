"""The virtual machine: a host that issues, three streams that run in order, and memory.

Whatever is issued begins when the host has issued it, when what was issued on its stream before is done, and when what it
waits for is done. All of that is known at the time of issue, so time needs no queue of events.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from virtual_clock.roofline import Host, Link


class Copy(NamedTuple):
    start: float
    end: float


@dataclass
class Usage:
    """Of one direction of the link."""

    copies: int = 0
    nbytes: int = 0
    busy_s: float = 0.0


@dataclass(eq=False)
class Block:
    """Device memory. Freed when its last holder lets go, as the framework's storages are."""

    nbytes: int
    start: float  # when the device begins to use it
    holders: int = 1
    busy_until: float = 0.0  # by another stream than compute


class Memory:
    """Counts held bytes twice: as the host allocates and frees, and as the device uses them.

    The host is ahead of the device, and memory that compute alone used is given out again in stream order, so the
    first count is what an allocator needs.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.peak = 0
        self._pending: list[tuple[float, int]] = []
        self._changes: list[tuple[float, int]] = []

    def allocate(self, nbytes: int, now: float) -> Block:
        self.settle(now)
        self.nbytes += nbytes
        self.peak = max(self.peak, self.nbytes)
        return Block(nbytes, now)

    def drop(self, block: Block, now: float, compute_end: float) -> None:
        """One holder less."""
        block.holders -= 1
        if block.holders > 0:
            return
        if block.holders < 0:
            raise AssertionError("a block was let go of too often")
        heapq.heappush(self._pending, (block.busy_until, block.nbytes))
        self.settle(now)
        end = max(compute_end, block.busy_until)
        # Before what begins at the same time.
        self._changes += [(block.start, block.nbytes), (end, -block.nbytes)]

    def settle(self, now: float) -> None:
        while self._pending and self._pending[0][0] <= now:
            self.nbytes -= heapq.heappop(self._pending)[1]

    def device_peak(self) -> int:
        peak = held = 0
        for _, change in sorted(self._changes):
            held += change
            peak = max(peak, held)
        return peak


@dataclass
class Machine:
    link: Link
    host: Host = field(default_factory=Host)

    def __post_init__(self) -> None:
        self.now = 0.0  # of the host
        self.compute_end = 0.0
        self.busy_s = 0.0
        self.exposed_s = 0.0  # compute had nothing to do but wait for a copy
        self.host_late_s = 0.0  # compute waited for the host
        self.d2h = Usage()
        self.h2d = Usage()
        self.memory = Memory()
        self.d2h_end = 0.0
        self.h2d_end = 0.0
        self._wait = 0.0
        self._queued: deque[float] = deque()

    def op(self, seconds: float) -> float:
        """Issues an operation; returns when it begins."""
        self.now += self.host.op_s
        if len(self._queued) >= self.host.queued_ops:
            self.now = max(self.now, self._queued.popleft())
        ready = max(self.now, self.compute_end)
        start = max(ready, self._wait)
        self.host_late_s += ready - self.compute_end
        self.exposed_s += start - ready
        self.busy_s += seconds
        self.compute_end = start + seconds
        self._queued.append(start)
        return start

    def wait_on_compute(self, end: float) -> None:
        """What is issued on compute from now on comes after `end`. Does not block."""
        self._wait = max(self._wait, end)

    def block_host(self, end: float) -> None:
        self.now = max(self.now, end)

    def event(self) -> float:
        """When all that was issued on compute is done, and the waits issued on it are over."""
        return max(self.compute_end, self._wait)

    def copy_out(self, nbytes: int, after: Iterable[float] = ()) -> Copy:
        copy = self._copy(self.d2h, self.d2h_end, nbytes, after)
        self.d2h_end = copy.end
        return copy

    def copy_in(self, nbytes: int, after: Iterable[float] = ()) -> Copy:
        copy = self._copy(self.h2d, self.h2d_end, nbytes, after)
        self.h2d_end = copy.end
        return copy

    def copy_on_compute(self, nbytes: int, usage: Usage) -> Copy:
        """Compute stands still meanwhile."""
        copy = self._copy(usage, self.event(), nbytes, ())
        ready = max(self.now, self.compute_end)
        self.exposed_s += copy.end - ready
        self.compute_end = copy.end
        return copy

    def _copy(self, usage: Usage, end: float, nbytes: int, after: Iterable[float]) -> Copy:
        self.now += self.host.copy_s
        start = max(self.now, end, *after)
        seconds = self.link.seconds(nbytes)
        usage.copies += 1
        usage.nbytes += nbytes
        usage.busy_s += seconds
        return Copy(start, start + seconds)
