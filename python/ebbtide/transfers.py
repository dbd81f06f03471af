"""Carries out what the engine asks for: probes, copies, allocations, releases; and reports back.

What comes for every moved storage is done by ``CommandRunner``, in C++; here are what is rare, waiting, and what becomes
of calls that were cut short. Any thread may run any command. What threads share is changed by single operations on
lists and dicts, without locks.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

from ebbtide import _core, process
from ebbtide._core import CommandKind, Hop, StorageEntry
from ebbtide.errors import EbbtideError
from ebbtide.failures import Failures
from ebbtide.framework import Framework, Storage
from ebbtide.resolved import Resolved
from ebbtide.tiers import Tiers

_POLL_MS = 100
# Device queues are bounded, and whoever fills one is blocked by the driver: block earlier, without the GIL.
_MAX_QUEUED = 512

_OFFLOAD = int(Hop.OFFLOAD)
_LOAD = int(Hop.LOAD)

# The answer to a probe of a storage that could not be looked at: it stays on the device.
_UNKNOWN = (1, True, False, True, False)


class Transfers(_core.CommandRunner):
    """One engine, its tiers, and the framework objects behind its entries."""

    def __init__(self, framework: Framework, options: Resolved) -> None:
        self._framework = framework
        self._streams = framework.streams
        # By device, the stream that this thread issues work on; 0 for memory whose work is synchronous.
        self.current_stream: Callable[[int], int] = (
            _no_stream if self._streams is None else self._streams.current
        )
        self.tiers = Tiers(framework, options)
        self.engine = self.tiers.make_engine(options)
        self.entries: dict[int, StorageEntry] = {}
        self._stream_copies: _core.StreamCopies | None = None
        if self._streams is not None:
            self._stream_copies = _core.StreamCopies(self._streams, self.tiers.pinned, _MAX_QUEUED)
        super().__init__(self.engine, framework, self.entries, _COMMANDS, self._stream_copies)
        self._executor = process.executor()
        self.tickets = _core.Tickets(self.engine, weakref.ref(self))
        self.copies = _core.Copies()
        self.threads_copy = self._streams is None or self.tiers.file is not None
        self._failures = Failures()
        self.exposed_wait_s = 0.0

    # At the interpreter's end what a module's names stand for may be gone.
    def __del__(
        self,
        finalizing: Callable[[], bool] = sys.is_finalizing,
        keep_forever: Callable[[Any], None] = _core.keep_forever,
    ) -> None:
        if not hasattr(self, "copies"):
            return
        if not finalizing() and process.usable():
            # The engine gives its blocks back with its end: no copy may use them any more.
            self._executor.drain(self.copies)
            if self._stream_copies is not None:
                self._stream_copies.drain()
        else:
            # Threads that are not in this process may have left the engine's and the tier's mutexes locked.
            keep_forever(self.engine)

    # --- copies

    @property
    def ready(self) -> bool:
        """Whether a copy is done and not reported."""
        on_streams = self._stream_copies
        return self.copies.ready or (on_streams is not None and on_streams.ready)

    def settle(self) -> None:
        """Reports every copy that is done; leases leave here."""
        try:
            if self.threads_copy and self.copies.ready:
                while (fields := self.copies.pop()) is not None:
                    self._complete(*fields)
        except BaseException:
            self.cut_short()  # nobody else will report it
            raise
        self.settle_streams()

    def _complete(
        self, copy: int, hop: int, storages: list[int], error: BaseException | None
    ) -> None:
        try:
            self.complete(copy, hop, storages, error)
        finally:
            self._failures.told(copy)

    def note_error(self, copy: int, hop: int, storages: list[int], error: BaseException) -> None:
        self._failures.note(copy, hop, storages, error, self.entries)

    def copy_by_threads(self, command: _core.Command) -> None:
        """A copy of memory whose work is synchronous, or between host memory and a file."""
        copy, hop, ids = command.copy, command.hop, command.storages
        entries: list[StorageEntry] = []
        if hop == _OFFLOAD or hop == _LOAD:
            for storage in ids:
                if (entry := self.entries.get(storage)) is not None:
                    entries.append(entry)
            if len(entries) < len(ids):  # saving it was cut short
                self.run(self.engine.completed(copy, False, [_UNKNOWN] * len(ids)))
                return
        if self._stream_copies is None:
            self.expect(copy)
        try:
            kept = [_on_device(entry, copy, hop) for entry in entries] or None
            self.copies.submit(self._executor, command, self.tiers.file, kept)
        except BaseException as error:
            # Interrupted after it was queued, it is reported as any other.
            if not self._is_running(copy):
                self._complete(copy, hop, ids, error)
            if hop == _OFFLOAD or not isinstance(error, Exception):
                raise
        else:
            if hop == _LOAD:
                for entry in entries:
                    entry.load_started = copy

    # --- waiting

    def drain(self) -> None:
        """Blocks until no copy is running, and reports them all."""
        while True:
            if self._stream_copies is not None:
                self._stream_copies.drain()
            self._executor.drain(self.copies)
            if not self.ready:
                return
            self.settle()  # which may start more

    def wait(self, copy: int) -> None:
        """Blocks until the copy is done and reported; other threads run meanwhile."""
        started = time.perf_counter()
        if self._stream_copies is not None:
            self._stream_copies.wait(copy)
        self._executor.wait(copy, self.copies)
        self.exposed_wait_s += time.perf_counter() - started
        self.settle()

    def wait_for(self, command: _core.Command) -> None:
        """Blocks until the copy is done; or, where a stream is to come after it, until it was started."""
        if command.stream == 0:
            self.wait(command.copy)
        elif not self.await_start(command.copy):
            self._require_answer(command.copy)

    def await_start(self, copy: int) -> bool:
        """Whether the copy was started. Another thread may have been told to, and be just about to do it; where a call was
        cut short, nobody will."""
        assert self._stream_copies is not None
        while not self._stream_copies.started(copy) and self.engine.running(copy):
            if self._is_lost(copy):
                return False
            _yield_to_others()
        return True

    def await_load(self, entry: StorageEntry, load: int) -> bool:
        """The storage that the load fills is full, or will be for what is issued next on the current stream; False where
        the engine gave the load up meanwhile. Raises what made it fail."""
        self._wait_until_started(load)
        if self._stream_copies is None:
            # Another thread may have taken the completion and not reported it yet.
            while self.expects(load):
                self.wait(load)
                if self.expects(load):
                    self._require_answer(load)
        self._raise_load_error(entry, load)
        return load == entry.load_started

    def wait_for_other(self, entry: StorageEntry, load: int, allocating: bool) -> None:
        """Blocks until the load that another thread has begun gets on. Raises what made it fail."""
        while allocating and not self.engine.wait_allocated(entry.storage_id, _POLL_MS):
            self._require_answer(0)
        self._wait_until_started(load)
        self.wait(load)
        if self.engine.running(load):
            _yield_to_others()  # it is about to be started

    def await_loads(self, loads: list[tuple[int, int]], run: int) -> None:
        """See `Runs.await_loads`; ``loads`` are storages and the copies that bring them."""
        devices = set()
        for storage, load in loads:
            if (entry := self.entries.get(storage)) is None:
                continue
            self._wait_until_started(load)
            devices.add(entry.device)
            if self._streams is None:
                self.wait(load)
        if self._streams is not None:
            for device in devices:
                self.run(self.engine.order_after_run(run, self.current_stream(device)))

    def _wait_until_started(self, load: int) -> None:
        while blocker := self.engine.blocker(load):
            self.wait(blocker)
            if self.engine.running(blocker):
                self._require_answer(blocker)
                _yield_to_others()

    def _raise_load_error(self, entry: StorageEntry, load: int) -> None:
        error = entry.take_load_error(load)
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback holds this frame

    # --- calls that were cut short

    def _require_answer(self, copy: int) -> None:
        """Raises where a call was cut short that should have started or reported the copy."""
        if self._is_lost(copy):
            raise EbbtideError(
                "[unpack] an exception from a signal handler (such as Ctrl-C) cut short a load that this tensor needs: "
                "run the forward again"
            )

    def _is_lost(self, copy: int) -> bool:
        """Of a copy that the engine waits for: whether a call was cut short and nobody may ever report it."""
        return self.interrupted and not self._is_running(copy)

    def _is_running(self, copy: int) -> bool:
        on_streams = self._stream_copies
        return self.copies.running(copy) or (on_streams is not None and on_streams.started(copy))

    def recover(self) -> None:
        """After an exception out of a signal handler cut a call short: gives up what nobody will report.

        For a moment when no other thread is in a call of this object.
        """
        self.interrupted = False
        self.settle()
        running = self.copies.all_running()
        if self._stream_copies is not None:
            running += self._stream_copies.all_running()
        self.expect_only(running)
        self.run(self.engine.recover(running))
        self.tickets.run_dropped(self)
        for storage_id in list(self.entries):
            if not self.engine.knows(storage_id):
                self.entries.pop(storage_id, None)

    # --- rare commands

    def _grow(self, command: _core.Command) -> None:
        grown = False
        try:
            grown = self.tiers.grow(command.nbytes)
        finally:
            self.run(self.engine.grown(grown))

    def _load_failed(self, command: _core.Command) -> None:
        if (entry := self.entries.get(command.storage)) is not None:
            error = self._failures.of_load(command, self.tiers.max_host_bytes)
            entry.note_load_error(command.copy, error)

    def _warn_tier_full(self, command: _core.Command) -> None:
        if not process.usable():
            return  # a thread that outlives the interpreter's main one
        entry = self.entries.get(command.storage)
        nbytes = entry.ref.nbytes if entry is not None else 0
        self.tiers.warn_full(nbytes, self.engine.stats(), self._failures.of_offload)


def _no_stream(device: int) -> int:
    return 0


def _yield_to_others() -> None:
    """Lets another thread run that is about to do what this one needs."""
    time.sleep(0)


def _on_device(entry: StorageEntry, copy: int, hop: int) -> Storage:
    """What the copy reads or writes. Raises LookupError where it was let go of."""
    storage = entry.restored_by(copy) if hop == _LOAD else entry.lease
    if storage is None:
        raise LookupError("a storage to copy was let go of")
    return storage


# Who carries out what CommandRunner does not.
_COMMANDS: dict[int, Callable[[Transfers, _core.Command], None]] = {
    int(CommandKind.GROW): Transfers._grow,
    int(CommandKind.LOAD_FAILED): Transfers._load_failed,
    int(CommandKind.TIER_FULL): Transfers._warn_tier_full,
}
