"""Streams, events, copies and page-locked memory of MindSpore's accelerator, by ``mindspore.runtime``.

Work goes through MindSpore's own streams and copies only: it issues kernels from a queue on the host, which work put on
a raw stream would overtake.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import mindspore
from mindspore import Tensor, mint

from ebbtide.mindspore.storages import HeldStorage
from ebbtide.mindspore.views import Views


class MindSporeStreams:
    """See :class:`ebbtide.framework.Streams`. One object per process, which has one device; thread safe.

    ``runtime`` is ``mindspore.runtime``, or what stands in for its ``Stream``, ``Event``, ``StreamCtx`` and
    ``current_stream``.
    """

    def __init__(self, target: str, runtime: Any = mindspore.runtime) -> None:
        self._target = target
        self._views = Views(target)
        self._runtime = runtime
        self._lock = threading.Lock()
        self._numbers: dict[int, int] = {}  # by MindSpore's number
        self._streams: list[Any] = [None]
        self._copy_streams: dict[bool, int] = {}
        # Memory that a stream works on: MindSpore has no other way to keep it from reuse.
        self._in_use: deque[tuple[Any, Any]] = deque()

    def current(self, device: int) -> int:
        stream = self._runtime.current_stream()
        number = self._numbers.get(stream.id)
        return self._number(stream) if number is None else number

    def _number(self, stream: Any) -> int:
        with self._lock:
            number = self._numbers.get(stream.id)
            if number is None:
                number = self._numbers[stream.id] = len(self._streams)
                self._streams.append(stream)
            return number

    def copy_stream(self, device: int, to_device: bool) -> int:
        number = self._copy_streams.get(to_device)
        if number is None:
            new = self._number(self._runtime.Stream())
            number = self._copy_streams.setdefault(to_device, new)
        return number

    def on(self, stream: int) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._runtime.StreamCtx(self._streams[stream])
        return context

    def record(self, stream: int, event: Any = None) -> Any:
        self._let_go()
        if event is None:
            event = self._runtime.Event()
        event.record(self._streams[stream])
        return event

    def wait(self, stream: int, event: Any) -> None:
        event.wait(self._streams[stream])

    def done(self, event: Any) -> bool:
        return bool(event.query())

    def synchronize(self, event: Any) -> None:
        event.synchronize()

    def bytes_of(self, storage: HeldStorage) -> Tensor:
        return self._views.flat_bytes(storage)

    def issue(
        self,
        stream: int,
        after: Sequence[Any],
        copies: Sequence[tuple[Tensor, Tensor]],
        event: Any = None,
    ) -> Any:
        for before in after:
            self.wait(stream, before)
        with self.on(stream):
            for dst, src in copies:
                self.copy(dst, src)
        return self.record(stream, event)

    def copy(self, dst: Tensor, src: Tensor) -> None:
        """On the current stream."""
        dst.copy_(src, non_blocking=True)

    def staging(self, nbytes: int, device: int) -> Tensor:
        return device_bytes(nbytes, self._target)

    def pinned(self, nbytes: int) -> Tensor | None:
        try:
            return mint.empty((nbytes,), dtype=mindspore.uint8, device="CPU", pin_memory=True)
        except (RuntimeError, ValueError):
            return None

    def address(self, memory: Tensor) -> int:
        return int(memory.data_ptr())

    def part_of(self, memory: Tensor, byte_offset: int, nbytes: int) -> Tensor:
        return memory[byte_offset : byte_offset + nbytes]

    def record_stream(self, storage: HeldStorage, stream: int) -> None:
        self._in_use.append((self.record(stream), storage))

    def record_stream_of(self, tensor: Tensor, stream: int) -> None:
        self._in_use.append((self.record(stream), tensor.untyped_storage()))

    def _let_go(self) -> None:
        while self._in_use:
            try:
                event, storage = self._in_use.popleft()
            except IndexError:
                return  # another thread took it
            if not event.query():
                self._in_use.appendleft((event, storage))
                return

    def unified(self) -> bool:
        return False


def device_bytes(nbytes: int, target: str) -> Tensor:
    """New memory on the device, on the current stream. Raises MemoryError where there is none."""
    try:
        return mint.empty((nbytes,), dtype=mindspore.uint8, device=target)
    except RuntimeError as error:
        if "memory" not in str(error).lower():
            raise
        raise MemoryError(str(error)) from error
