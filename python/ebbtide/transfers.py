"""Carries out what the engine asks for: probes, copies, allocations, releases; and reports back.

Any thread may run any command. What threads share is changed by single operations on lists and dicts, without locks.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any, Literal

from ebbtide import _core, process
from ebbtide._core import CommandKind, Hop
from ebbtide.config import Resolved
from ebbtide.errors import DeviceError, EbbtideError, HostMemoryError
from ebbtide.framework import Framework, Storage
from ebbtide.saved import StorageEntry
from ebbtide.sizes import format_bytes
from ebbtide.stream_copies import Completion, StreamCopies, yield_to_others

_POLL_MS = 100
_NO_LIMIT = (1 << 64) - 1
_OFFLOAD = int(Hop.OFFLOAD)
_LOAD = int(Hop.LOAD)
_SPILL = int(Hop.SPILL)
_RELEASE_RESTORED = int(CommandKind.RELEASE_RESTORED)

# A probe of a storage that another thread is just saving: look again later. More holders than there can be leases.
_HELD = (1 << 32, True, True, True, False)
# The storage could not be looked at: it stays on the device.
_UNKNOWN = (1, True, False, True, False)


class Transfers:
    """One engine, its tiers, and the framework objects behind its entries."""

    def __init__(self, framework: Framework, options: Resolved) -> None:
        self._framework = framework
        self._streams = framework.streams
        # By device, the stream that this thread issues work on; 0 for memory whose work is synchronous.
        self.current_stream: Callable[[int], int] = (
            _no_stream if self._streams is None else self._streams.current
        )
        self.on_disk = options.tier == "disk"
        self._file: _core.SpillFile | None = None
        if options.directory is not None and self.on_disk:
            self._file = process.spill_file(options.directory, options.allow_tmpfs)
        max_disk_bytes = _NO_LIMIT if options.max_disk_bytes is None else options.max_disk_bytes
        self._max_host_bytes = options.max_host_bytes
        self._max_disk_bytes = max_disk_bytes
        self.space: _core.BlockSpace
        backing: _core.BlockSpace | None = None
        self._stream_copies: StreamCopies | None = None
        if self._streams is not None:
            # A device reaches files through host memory only.
            self._pinned = process.pinned_pool(framework.device_type, self._streams)
            self._stream_copies = StreamCopies(self._streams, self._pinned)
            self.space, backing = self._pinned.space, self._file
        else:
            self.space = self._file if self._file is not None else process.host_pool()
        first_is_disk = self.space is self._file
        self.first_tier: Literal["host", "disk"] = "disk" if first_is_disk else "host"
        self.engine = _core.Engine(
            self.space,
            backing,
            min_bytes=options.min_bytes,
            keep_last_bytes=options.keep_last_bytes,
            keep_last_groups=options.keep_last_groups,
            prefetch_bytes=options.prefetch_bytes,
            prefetch_groups=options.prefetch_groups,
            in_flight_bytes=options.in_flight_bytes,
            max_tier_bytes=max_disk_bytes if first_is_disk else options.max_host_bytes,
            max_backing_bytes=max_disk_bytes,
            pack_below_bytes=options.pack_below_bytes,
        )
        self.entries: dict[int, StorageEntry] = {}
        self._executor = process.executor()
        self.tickets = _core.Tickets(self.engine, _calling(weakref.ref(self)))
        self.copies = _core.Copies()
        self._threads_copy = self._streams is None or self._file is not None
        # Copies that the engine was not told about yet, of memory whose work is synchronous.
        self._unreported: set[int] = set()
        self._fetch_errors: dict[int, BaseException] = {}
        self.interrupted = False
        self._copy_error = ""
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

    def drain(self) -> None:
        """Blocks until no copy is running, and reports them all."""
        while True:
            if self._stream_copies is not None:
                self._stream_copies.drain()
            self._executor.drain(self.copies)
            if not self.ready:
                return
            self.settle()  # which may start more

    def run(self, commands: list[_core.Command]) -> None:
        """Runs every command, also after one has failed; then raises the first failure."""
        if not commands:
            return
        failure: BaseException | None = None
        for command in commands:
            try:
                _COMMANDS[command.kind](self, command)
            except BaseException as error:
                failure = failure or error
                if not isinstance(error, Exception):
                    self.cut_short()
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # its traceback holds this frame

    def run_dropped(self) -> None:
        """Runs what the ends of tickets left to do."""
        if process.unusable or sys.is_finalizing():
            return
        try:
            while (command := self.tickets.pop_dropped()) is not None:
                self.run([command])
        except Exception:
            raise
        except BaseException:
            self.cut_short()
            raise

    def cut_short(self) -> None:
        """An exception out of a signal handler ends a call early. What it was about to tell the allocator of is over before
        anything else is let go of."""
        self.interrupted = True
        if self._stream_copies is not None:
            self._stream_copies.drain()

    # --- copies

    @property
    def ready(self) -> bool:
        """Whether a copy is done and not reported."""
        on_streams = self._stream_copies
        return self.copies.ready or (on_streams is not None and on_streams.ready)

    def settle(self) -> None:
        """Reports every copy that is done; leases leave here."""
        if self._threads_copy and self.copies.ready:
            while (fields := self.copies.pop()) is not None:
                self._complete(Completion(*fields))
        if self._stream_copies is None:
            return
        while (completion := self._stream_copies.pop()) is not None:
            self._complete(completion)

    def wait(self, copy: int) -> None:
        """Blocks until the copy is done and reported; other threads run meanwhile."""
        started = time.perf_counter()
        if self._stream_copies is not None:
            self._stream_copies.wait(copy)
        self._executor.wait(copy, self.copies)
        self.exposed_wait_s += time.perf_counter() - started
        self.settle()

    def intact(self, entry: StorageEntry) -> bool:
        version = self._framework.version
        for witness, saved in entry.witnesses:
            if version(witness) != saved:
                return False
        return True

    def allocate(
        self, entry: StorageEntry, load: int, nbytes: int, residue: int, stream: int
    ) -> Storage:
        """Memory for a load that the engine has begun; tells the engine where there is none."""
        try:
            with self._on(stream):
                return self._framework.allocate(nbytes, residue, entry.ref.device)
        except BaseException:
            self.run(self.engine.allocation_failed(entry.storage_id, load))
            raise

    def _on(self, stream: int) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._streams is None else self._streams.on(stream)

    def load(self, entry: StorageEntry, storage: Storage, verdict: _core.RestoreVerdict) -> bool:
        """Fills the storage, or orders the current stream after that; False where the engine gave the load up meanwhile.
        Raises what made it fail."""
        load = verdict.load
        try:
            self._adopt(entry, load, storage, verdict.stream)
        finally:
            # Others may wait for what they begin.
            self.run(verdict.commands)
        self._wait_until_started(entry, load)
        if self._stream_copies is None:
            # Another thread may have taken the completion and not reported it yet.
            while load in self._unreported:
                self.wait(load)
                if load in self._unreported:
                    self._require_answer(load)
        self._raise_load_error(entry, load)
        return load == entry.load_started

    def wait_for_other(self, entry: StorageEntry, verdict: _core.RestoreVerdict) -> None:
        """Blocks until the load that another thread has begun gets on. Raises what made it fail."""
        while verdict.allocating and not self.engine.wait_allocated(entry.storage_id, _POLL_MS):
            self._require_answer(0)
        self._wait_until_started(entry, verdict.load)
        self.wait(verdict.load)
        if self.engine.running(verdict.load):
            yield_to_others()  # it is about to be started

    def await_loads(self, loads: list[tuple[int, int]], run: int) -> None:
        """See `Runs.await_loads`; ``loads`` are storages and the copies that bring them."""
        devices = set()
        for storage, load in loads:
            if (entry := self.entries.get(storage)) is None:
                continue
            self._wait_until_started(entry, load)
            devices.add(entry.ref.device)
            if self._streams is None:
                self.wait(load)
        if self._streams is not None:
            for device in devices:
                self.run(self.engine.order_after_run(run, self.current_stream(device)))

    def _wait_until_started(self, entry: StorageEntry, load: int) -> None:
        while blocker := self.engine.blocker(load):
            self.wait(blocker)
            if self.engine.running(blocker):
                self._require_answer(blocker)
                yield_to_others()

    def _raise_load_error(self, entry: StorageEntry, load: int) -> None:
        error = entry.load_errors.pop(load, None)
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback holds this frame

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
        self._unreported = set(running)
        self.run(self.engine.recover(running))
        self.run_dropped()
        for storage_id in list(self.entries):
            if not self.engine.knows(storage_id):
                self.entries.pop(storage_id, None)

    def _adopt(self, entry: StorageEntry, load: int, storage: Storage, stream: int) -> None:
        """Hands new memory to the engine, which starts the load when it can."""
        entry.restored[load] = storage
        weak = self._framework.weak(storage)
        ref = self._framework.storage_ref(storage)
        commands = self.engine.allocated(entry.storage_id, load, *ref, stream)
        refused = len(commands) == 1 and commands[0].kind == _RELEASE_RESTORED
        if not refused:
            entry.restored_weak = weak
        self.run(commands)

    # --- commands

    def _probe(self, command: _core.Command) -> None:
        entry = self.entries.get(command.storage)
        answer = _UNKNOWN
        try:
            answer = self._inspect(entry) if entry is not None else _HELD
        finally:
            self.run(self.engine.probed(command.storage, *answer))

    def _inspect(self, entry: StorageEntry) -> tuple[int, bool, bool, bool, bool]:
        """Answers a probe: other holders, whether they can be told, whether the memory is the same, whether no in-place
        counter moved, whether all did."""
        framework, leases = self._framework, entry.leases
        # The list of leases is to be a lease's only holder here: it goes by no name.
        try:
            same = framework.unmoved(leases[-1], entry.ref)
            version, witnesses, moved = framework.version, entry.witnesses, 0
            for witness, saved in witnesses:
                if version(witness) != saved:
                    moved += 1
            holders = framework.holders(leases)
        except IndexError:
            return _HELD  # released
        spoiled = moved > 0 and moved == len(witnesses)
        return holders or 0, holders is not None, same, moved == 0, spoiled

    def _gather(self, command: _core.Command) -> None:
        self.run(self.engine.gather())

    def _record(self, command: _core.Command) -> None:
        assert self._stream_copies is not None
        self._stream_copies.record(command.event, command.stream)
        if (entry := self.entries.get(command.storage)) is not None:
            entry.events.append(command.event)

    def _copy(self, command: _core.Command) -> None:
        copy, hop = command.copy, command.hop
        between_device_and_host = hop == _OFFLOAD or hop == _LOAD
        entries: list[StorageEntry] = []
        if between_device_and_host:
            ids = command.storages
            for storage in ids:
                if (entry := self.entries.get(storage)) is not None:
                    entries.append(entry)
            if len(entries) < len(ids):  # saving it was cut short
                self.run(self.engine.completed(copy, False, [_UNKNOWN] * len(ids)))
                return
        if self._stream_copies is None:
            self._unreported.add(copy)
        try:
            if between_device_and_host and self._stream_copies is not None:
                self._stream_copies.submit(
                    command, self._on_device(copy, hop, entries), entries[0].ref.device
                )
            else:
                kept = self._on_device(copy, hop, entries) if between_device_and_host else None
                self.copies.submit(self._executor, command, self._file, kept)
        except BaseException as error:
            # Interrupted after it was queued, it is reported as any other.
            if not self._is_running(copy):
                self._complete(Completion(copy, hop, command.storages, error))
            if hop == _OFFLOAD or not isinstance(error, Exception):
                raise
        else:
            if hop == _LOAD:
                for entry in entries:
                    entry.load_started = copy

    def _on_device(self, copy: int, hop: int, entries: list[StorageEntry]) -> dict[int, Storage]:
        """The storages that the copy reads or writes, by address."""
        storages = {}
        for entry in entries:
            storage = entry.restored[copy] if hop == _LOAD else entry.lease
            storages[self._framework.address(storage)] = storage
        return storages

    def _complete(self, done: Completion) -> None:
        number, hop, storages, error, _ = done
        answers = []
        try:
            if error is not None:
                self._note_error(done)
            if hop == _OFFLOAD:
                for storage in storages:
                    entry = self.entries.get(storage)
                    answers.append(_UNKNOWN if entry is None else self._inspect(entry))
        finally:
            commands = self.engine.completed(number, error is None, answers)
            # Whoever waits for the copy sees it done from here on.
            self._unreported.discard(number)
            try:
                if commands:
                    self.run(commands)
            finally:
                if self._fetch_errors:
                    self._fetch_errors.pop(number, None)

    def _note_error(self, done: Completion) -> None:
        assert done.error is not None
        if done.hop in (_OFFLOAD, _SPILL):
            self._copy_error = str(done.error)
        elif done.hop == _LOAD:
            for storage in done.storages:
                if (entry := self.entries.get(storage)) is not None:
                    entry.load_errors[done.copy] = _to_raise_later(done.error)
                    if entry.load_started == done.copy:
                        entry.load_started = 0
        else:
            self._fetch_errors[done.copy] = done.error

    def _load_failed(self, command: _core.Command) -> None:
        if (entry := self.entries.get(command.storage)) is None:
            return
        cause = self._fetch_errors.get(command.cause)
        error: BaseException
        if cause is not None:
            error = _to_raise_later(cause)
        elif command.cause != 0:
            error = DeviceError(
                f"[unpack] the copy that took a saved storage off the device failed: {self._copy_error}: "
                "run the forward again"
            )
        else:
            error = HostMemoryError(
                f"[unpack] {format_bytes(command.nbytes)} of host memory are needed to read a saved storage back from disk, "
                f"and max_host_bytes={format_bytes(self._max_host_bytes)} is taken: raise max_host_bytes, and run "
                "backward again (retain_graph=True); the copy on disk is kept"
            )
        entry.load_errors[command.copy] = error

    def _wait_for(self, command: _core.Command) -> None:
        if command.stream == 0:
            self.wait(command.copy)
            return
        assert self._stream_copies is not None
        if not self._await_start(command.copy):
            self._require_answer(command.copy)
        self._stream_copies.order(command.copy, command.stream)

    def _await_start(self, copy: int) -> bool:
        """Whether the copy was started. Another thread may have been told to, and be just about to do it; where a call was
        cut short, nobody will."""
        assert self._stream_copies is not None
        while not self._stream_copies.started(copy) and self.engine.running(copy):
            if self._is_lost(copy):
                return False
            yield_to_others()
        return True

    def _allocate_ahead(self, command: _core.Command) -> None:
        """What nobody has asked for yet: a failure only cancels it."""
        entry = self.entries.get(command.storage)
        if entry is None:
            self.run(self.engine.allocation_failed(command.storage, command.copy))
            return
        try:
            storage = self.allocate(
                entry, command.copy, command.nbytes, command.residue, command.stream
            )
        except MemoryError:
            return
        self._adopt(entry, command.copy, storage, command.stream)

    def _record_stream(self, command: _core.Command) -> None:
        entry = self.entries.get(command.storage)
        if entry is None:
            return
        assert self._streams is not None
        if command.stream != 0 and command.copy == 0:
            storage, stream = entry.lease or self._framework.lock(entry.weak), command.stream
        elif command.stream != 0:
            storage, stream = entry.restored.get(command.copy), command.stream
            if storage is None and entry.restored_weak is not None:
                storage = self._framework.lock(entry.restored_weak)
        else:
            assert self._stream_copies is not None
            storage = entry.lease
            self._await_start(command.copy)
            stream = self._stream_copies.stream_of(command.copy) or 0
        if storage is not None and stream != 0:
            self._streams.record_stream(storage, stream)

    def _release_lease(self, command: _core.Command) -> None:
        if (entry := self.entries.get(command.storage)) is None:
            return
        try:
            # Autograd has a tensor saved before the operation that reads it is issued, and without Ebbtide would keep
            # the memory from others until backward.
            if entry.streams and (lease := entry.lease) is not None:
                self._keep_for(lease, entry.streams)
                del lease
        finally:
            del entry.leases[-1:]

    def _keep_for(self, storage: Storage, streams: set[int]) -> None:
        assert self._streams is not None
        for stream in list(streams):
            self._streams.record_stream(storage, stream)

    def _release_restored(self, command: _core.Command) -> None:
        if (entry := self.entries.get(command.storage)) is not None:
            entry.restored.pop(command.copy, None)

    def _grow(self, command: _core.Command) -> None:
        grown = False
        try:
            grown = self._pinned.grow(command.nbytes, self._max_host_bytes)
        finally:
            self.run(self.engine.grown(grown))

    def _forget(self, command: _core.Command) -> None:
        # Absent where saving failed before it was made.
        if (entry := self.entries.pop(command.storage, None)) is None:
            return
        entry.leases.clear()
        entry.restored.clear()
        if self._stream_copies is not None:
            self._stream_copies.forget(entry.events)

    def _warn_tier_full(self, command: _core.Command) -> None:
        if not process.usable():
            return  # a thread that outlives the interpreter's main one
        entry = self.entries.get(command.storage)
        nbytes = entry.ref.nbytes if entry is not None else 0
        tier: str = self.first_tier
        if self._copy_error:
            cause, remedy = self._copy_error, "once that is mended it is tried again"
        else:
            stats = self.engine.stats()
            option = f"max_{tier}_bytes"
            limits = {"host": self._max_host_bytes, "disk": self._max_disk_bytes}
            cause = f"{format_bytes(stats.tier_bytes)} used of {format_bytes(limits[tier])} allowed"
            if self.on_disk and tier == "host":
                # What goes to disk comes through host memory.
                option, tier = "max_host_bytes or max_disk_bytes", "host and disk"
                used, limit = format_bytes(stats.backing_bytes), format_bytes(limits["disk"])
                cause += f" in host memory, {used} of {limit} on disk"
            remedy = f"raise {option}, or choose another tier with to="
        warnings.warn(
            f"[{tier} tier] no room for {format_bytes(nbytes)}: {cause}. What does not fit "
            f"stays on the device (kept['host_full'] counts it): {remedy}",
            RuntimeWarning,
            stacklevel=_level_of_the_caller(),
        )


def _no_stream(device: int) -> int:
    return 0


def _to_raise_later(error: BaseException) -> BaseException:
    """A copy without frames: those hold tickets, and with them the entry that it is kept in."""
    try:
        anew: BaseException = copy.copy(error)
    except Exception:
        anew = DeviceError(str(error))
    if isinstance(error, OSError) and isinstance(anew, OSError):
        anew.errno = error.errno  # no part of what is copied
    return anew.with_traceback(None)


def _calling(transfers: weakref.ref[Transfers]) -> Callable[[], None]:
    """``run_dropped`` without keeping the object alive."""

    def run_dropped() -> None:
        alive = transfers()
        if alive is not None:
            alive.run_dropped()

    return run_dropped


def _level_of_the_caller() -> int:
    """How many frames lie between the function that calls this and the user's code."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("ebbtide."):
        level, frame = level + 1, frame.f_back
    return level


_COMMANDS: dict[int, Callable[[Transfers, _core.Command], None]] = {
    int(CommandKind.PROBE): Transfers._probe,
    int(CommandKind.GATHER): Transfers._gather,
    int(CommandKind.RECORD): Transfers._record,
    int(CommandKind.COPY): Transfers._copy,
    int(CommandKind.WAIT): Transfers._wait_for,
    int(CommandKind.ALLOC): Transfers._allocate_ahead,
    int(CommandKind.RECORD_STREAM): Transfers._record_stream,
    int(CommandKind.RELEASE_LEASE): Transfers._release_lease,
    int(CommandKind.RELEASE_RESTORED): Transfers._release_restored,
    int(CommandKind.GROW): Transfers._grow,
    int(CommandKind.LOAD_FAILED): Transfers._load_failed,
    int(CommandKind.FORGET): Transfers._forget,
    int(CommandKind.TIER_FULL): Transfers._warn_tier_full,
}
