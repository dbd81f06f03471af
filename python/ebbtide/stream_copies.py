"""Copies between a device and page-locked host memory, on the framework's own streams.

Streams and slabs belong to the process and are shared by every ``offload`` object; the copies under way are an object's
own. Any thread may call; what threads share is changed by single operations on dicts and deques.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from ebbtide import _core
from ebbtide._core import Hop, Tier
from ebbtide.errors import DeviceError
from ebbtide.framework import Bytes, Event, Storage, Streams

# Slices of a slab that are kept: blocks come again with every step.
_MAX_SLICES = 8192

# Device queues are bounded, and whoever fills one is blocked by the driver: block earlier, without the GIL.
_MAX_QUEUED = 512

_DEVICE = int(Tier.DEVICE)
_STAGING = int(Tier.STAGING)
_LOAD = int(Hop.LOAD)


class PinnedPool:
    """Page-locked host memory of one device type, in slabs that the engine carves up."""

    def __init__(self, streams: Streams) -> None:
        self.space = _core.HostPool.of_added_slabs()
        self._streams = streams
        self._slabs: dict[int, Bytes] = {}
        self._slices: dict[int, dict[tuple[int, int], Bytes]] = {}  # by slab, offset and bytes

    def grow(self, nbytes: int, limit: int) -> bool:
        """Adds a slab; False where the system has no page-locked memory for it."""
        self._drop(max(0, limit - nbytes))
        slab = self._streams.pinned(nbytes)
        if slab is None:
            return False
        address = self._streams.address(slab)
        self._slices[address] = {}
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
            del self._slices[address], self._slabs[address]
        return int(before - self.space.reserved_bytes)

    def slice(self, base: int, offset: int, nbytes: int) -> Bytes:
        """A part of the slab at this address."""
        slices = self._slices[base]
        found = slices.get((offset, nbytes))
        if found is None:
            if len(slices) >= _MAX_SLICES:
                slices.clear()
            found = slices[offset, nbytes] = self._slabs[base][offset : offset + nbytes]
        return found


class Completion(NamedTuple):
    copy: int
    hop: int
    storages: list[int]
    error: BaseException | None
    event: Event = None  # done with the copy


class StreamCopies:
    """The copies of one engine that are on their way."""

    def __init__(self, streams: Streams, pool: PinnedPool) -> None:
        self._streams = streams
        self._pool = pool
        self._events: dict[int, Event] = {}  # recorded for copies to come after, by engine's event
        self._unrecorded: dict[int, int] = {}  # that could not be recorded: their streams
        self._started: dict[int, tuple[Event, int]] = {}  # by copy: what it ends with, its stream
        # In order; without an error, which is found out at the end.
        self._queues: dict[int, deque[Completion]] = {}  # by stream
        self._all_queues: list[deque[Completion]] = []  # only ever grows: loops need no copy of it

    def record(self, event: int, stream: int) -> None:
        try:
            self._events[event] = self._streams.record(stream)
        except BaseException:
            self._unrecorded[event] = stream
            raise

    def forget(self, events: list[int]) -> None:
        """These will not be waited for (again)."""
        for event in events:
            if self._unrecorded:
                self._unrecorded.pop(event, None)
            if (recorded := self._events.pop(event, None)) is not None:
                self._streams.recycle(recorded)

    def submit(self, command: _core.Command, storages: Mapping[int, Storage], device: int) -> None:
        """Queues a copy. ``storages`` are the device's, by address. Their memory may be given to others only in device
        order, after the copy."""
        streams = self._streams
        copy, hop, after = command.copy, command.hop, command.after
        stream = streams.copy_stream(device, hop == _LOAD)
        queue = self._queues.get(stream)
        if queue is None:
            queue = self._add_queue(stream)
        if len(queue) >= _MAX_QUEUED:
            self.wait(queue[-_MAX_QUEUED].copy)
        with streams.on(stream):
            for event in after:
                if event in self._unrecorded:
                    self.record(
                        event, self._unrecorded.pop(event)
                    )  # later on its stream: after more than is needed
                streams.wait(stream, self._events[event])
            for before in command.after_copies:
                self.order(before, stream)
            try:
                self._issue(command, storages, device)
                done = streams.record(stream)
                self._started[copy] = done, stream
                queue.append(Completion(copy, hop, command.storages, None, done))
            except BaseException:
                if not any(queued.copy == copy for queued in list(queue)):
                    self._started.pop(copy, None)
                # Part of it may be on its way, into memory that is given back now.
                streams.synchronize(streams.record(stream))
                raise
        self.forget(after)

    def _add_queue(self, stream: int) -> deque[Completion]:
        new: deque[Completion] = deque()
        queue = self._queues.setdefault(stream, new)
        if queue is new:  # of two threads, one
            self._all_queues.append(new)
        return queue

    def _issue(self, command: _core.Command, storages: Mapping[int, Storage], device: int) -> None:
        streams = self._streams
        staging: Bytes | None = None
        if nbytes := command.staging_bytes:
            with contextlib.suppress(MemoryError):  # then piece by piece
                staging = streams.staging(nbytes, device)
        whole: dict[int, Bytes] = {}
        for src, dst, nbytes in command.spans(staging is not None):
            streams.copy(
                self._memory(dst, nbytes, storages, whole, staging),
                self._memory(src, nbytes, storages, whole, staging),
            )

    def _memory(
        self,
        place: tuple[int, int, int],
        nbytes: int,
        storages: Mapping[int, Storage],
        whole: dict[int, Bytes],
        staging: Bytes | None,
    ) -> Bytes:
        tier, base, offset = place
        if tier == _DEVICE:
            flat = whole.get(base)
            if flat is None:
                flat = whole[base] = self._streams.bytes_of(storages[base])
            if offset == 0 and flat.nbytes == nbytes:
                return flat  # as most are: a slice costs as much as the copy call
            return flat[offset : offset + nbytes]
        if tier == _STAGING:
            assert staging is not None
            return staging[offset : offset + nbytes]
        return self._pool.slice(base, offset, nbytes)

    def started(self, copy: int) -> bool:
        """Whether the copy is on its way: queued, and not taken by ``pop``."""
        return copy in self._started

    def order(self, copy: int, stream: int) -> None:
        """What is issued on the stream from now on comes after the copy, which was started or is done."""
        if (started := self._started.get(copy)) is None:
            return
        try:
            self._streams.wait(stream, started[0])
        except BaseException:
            # Memory may be let go of next, as if the stream came after the copy.
            self.wait(copy)
            raise

    def stream_of(self, copy: int) -> int | None:
        started = self._started.get(copy)
        return None if started is None else started[1]

    def wait(self, copy: int) -> None:
        """Blocks until the copy is done; ``pop`` still gives it out."""
        if (started := self._started.get(copy)) is None:
            return
        event, stream = started
        # With all that stands before it: two threads may have queued in another order than they recorded in.
        for queued in list(self._queues[stream]):
            self._wait_for(queued.event)
            if queued.copy == copy:
                return
        self._wait_for(event)

    def _wait_for(self, event: Event) -> None:
        # What fails here `pop` says.
        with contextlib.suppress(Exception):
            self._streams.synchronize(event)

    def drain(self) -> None:
        """Blocks until every copy is done."""
        for copy in list(self._started):
            self.wait(copy)

    @property
    def ready(self) -> bool:
        """Whether ``pop`` has something to give out. Asks one event of each stream."""
        return any(queue and self._is_first_done(queue) for queue in self._all_queues)

    def _is_first_done(self, queue: deque[Completion]) -> bool:
        try:
            return self._streams.done(queue[0].event)
        except IndexError:
            return False  # another thread took it
        except Exception:
            return True  # it will not get on

    def pop(self) -> Completion | None:
        for queue in self._all_queues:
            if not queue or not self._is_first_done(queue):
                continue
            try:
                queued = queue.popleft()  # another thread may have taken the one just looked at
            except IndexError:
                continue
            try:
                self._streams.synchronize(queued.event)
            except Exception as failure:
                self._started.pop(queued.copy, None)
                return queued._replace(error=DeviceError(f"[copy] {failure}"))
            self._started.pop(queued.copy, None)
            self._streams.recycle(queued.event)
            return queued
        return None

    def all_running(self) -> list[int]:
        return list(self._started)


def yield_to_others() -> None:
    """Lets another thread run that is about to do what this one needs."""
    time.sleep(0)
