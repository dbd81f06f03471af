"""The cap on host memory, and blocks of it for users of their own."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from ebbtide.errors import UsageError
from ebbtide.framework import Bytes
from ebbtide.hyper_parallel.runtime import SwapSession, modules_for, session_for
from ebbtide.offload import totals
from ebbtide.sizes import format_bytes, parse_bytes

_ALIGN_LIMIT_BYTES = 2 << 30


class PinnedMemoryPool:
    """Host memory of at most ``max_host_bytes``, for what is offloaded through functions that take a ``cpu_pool``.

    What finds no room stays on the device. A copied module shares its pool; a pickled pool is a new one of this size.
    Any thread may call.

    ``align_limit`` is accepted for HyperParallel's sake and has no effect: blocks are as large as what is asked for.
    """

    def __init__(
        self, max_host_bytes: int | str, align_limit: int | str = _ALIGN_LIMIT_BYTES
    ) -> None:
        self.max_host_bytes = parse_bytes(max_host_bytes, "PinnedMemoryPool.max_host_bytes")
        self.align_limit = parse_bytes(align_limit, "PinnedMemoryPool.align_limit")
        if self.max_host_bytes == 0:
            raise UsageError(
                "[PinnedMemoryPool] max_host_bytes=0: give the bytes that may be used, such as '8GiB'"
            )
        self.sessions: dict[tuple[Any, ...], SwapSession] = {}
        self._lock = threading.Lock()
        self._used: dict[int, Bytes] = {}  # by id
        self._pending: deque[tuple[Any, Bytes]] = deque()  # with the event that ends their use
        self._free: list[Bytes] = []
        self._held_bytes = 0  # used, pending and free

    def acquire(self, size: int | str) -> Bytes:
        """A flat tensor of ``size`` bytes on the host, page-locked where there is an accelerator.

        It counts against ``max_host_bytes`` together with what is offloaded by then. Where there is no room it blocks
        until a block is done that was released with an event.

        Raises RuntimeError where there is no such block, UsageError for a size that is none.
        """
        nbytes = parse_bytes(size, "PinnedMemoryPool.acquire")
        with self._lock:
            self._settle()
            while (block := self._take(nbytes)) is None:
                if not self._pending:
                    raise RuntimeError(
                        f"[PinnedMemoryPool.acquire] {format_bytes(nbytes)} asked, {format_bytes(self._held_bytes)} "
                        f"acquired and {format_bytes(self._offloaded_bytes())} offloaded of "
                        f"{format_bytes(self.max_host_bytes)}: release blocks, or raise max_host_bytes"
                    )
                event, pending = self._pending.popleft()
                event.synchronize()
                self._free.append(pending)
            self._used[id(block)] = block
            return block

    def release(self, tensor: Bytes, event: Any = None) -> None:
        """Gives a block back: at once, or when ``event`` is done (the framework's, with ``query`` and ``synchronize``).

        Raises UsageError for what is not acquired from this pool, or released already.
        """
        with self._lock:
            found = self._used.pop(id(tensor), None)
            if found is None:
                raise UsageError(
                    "[PinnedMemoryPool.release] this tensor is not acquired from this pool, or was released: pass the very "
                    "tensor that acquire returned"
                )
            if event is None:
                self._free.append(found)
            else:
                self._pending.append((event, found))

    def _settle(self) -> None:
        while self._pending and self._pending[0][0].query():
            self._free.append(self._pending.popleft()[1])

    def _take(self, nbytes: int) -> Bytes | None:
        for index, block in enumerate(self._free):
            if block.nbytes == nbytes:
                return self._free.pop(index)
        while self._held_bytes + self._offloaded_bytes() + nbytes > self.max_host_bytes:
            if not self._free:
                return None
            self._held_bytes -= self._free.pop(0).nbytes
        modules = modules_for()
        streams = session_for(modules, cpu_pool=self).framework.streams
        block = streams.pinned(nbytes) if streams is not None else None
        if block is None:
            block = modules.host_memory(nbytes)
        self._held_bytes += nbytes
        return block

    def _offloaded_bytes(self) -> int:
        return sum(totals(swap.session).host_bytes for swap in self.sessions.values())

    def __deepcopy__(self, memo: object) -> PinnedMemoryPool:
        return self

    def __reduce__(self) -> tuple[type[PinnedMemoryPool], tuple[int, int]]:
        return PinnedMemoryPool, (self.max_host_bytes, self.align_limit)
