"""Stands in for mindspore.runtime, which has no streams on the CPU: copies are queued and run as late as order allows."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from typing import Any

import mindspore
from mindspore import Tensor, mint

from ebbtide.mindspore.streams import MindSporeStreams


class Stream:
    """Work put on the stream of the kernels runs at once: MindSpore's CPU kernels wait for nobody."""

    _ids = itertools.count()

    def __init__(self) -> None:
        self.id = next(Stream._ids)
        self.queue: list[Callable[[], None]] = []
        self.ran = 0

    def put(self, work: Callable[[], None]) -> None:
        self.queue.append(work)
        if self is DEFAULT:
            self.run(len(self.queue))

    def run(self, count: int) -> None:
        while self.ran < count:
            work = self.queue[self.ran]
            self.ran += 1
            work()


class Event:
    def record(self, stream: Stream) -> None:
        self.stream, self.count = stream, len(stream.queue)

    def wait(self, stream: Stream) -> None:
        recorded, count = self.stream, self.count  # of now: it may be recorded anew
        stream.put(lambda: recorded.run(count))

    def query(self) -> bool:
        return self.stream.ran >= self.count

    def synchronize(self) -> None:
        self.stream.run(self.count)


class StreamCtx:
    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        _current.append(self._stream)

    def __exit__(self, *error: object) -> None:
        _current.pop()


DEFAULT = Stream()
_current = [DEFAULT]


def current_stream() -> Stream:
    return _current[-1]


class StandInStreams(MindSporeStreams):
    """What MindSpore does on Ascend only is done here: copies in the background, page-locked memory."""

    def __init__(self, runtime: Any) -> None:
        super().__init__("CPU", runtime)
        self.copied_bytes = 0
        self._staging: list[Tensor] = []

    def copy(self, dst: Tensor, src: Tensor) -> None:
        assert dst.nbytes == src.nbytes and dst.is_contiguous() and src.is_contiguous()
        to, begin, nbytes = dst.data_ptr(), src.data_ptr(), src.nbytes
        self.copied_bytes += nbytes
        current_stream().put(lambda: ctypes.memmove(to, begin, nbytes) and None)

    def staging(self, nbytes: int, device: int) -> Tensor:
        # The CPU's allocator knows no streams, and would give it to others before the copies have run.
        self._staging.append(super().staging(nbytes, device))
        return self._staging[-1]

    def pinned(self, nbytes: int) -> Tensor | None:
        return mint.empty((nbytes,), dtype=mindspore.uint8)
