"""Carries out what the engine asks for: probes, copies, allocations, releases; and reports back.

Any thread may run any command. What threads share is changed by single operations on lists and dicts, without locks.
"""

from __future__ import annotations

import sys
import time
import warnings
import weakref
from collections.abc import Callable

from ebbtide import _core, process
from ebbtide._core import CommandKind
from ebbtide.config import Resolved
from ebbtide.errors import EbbtideError
from ebbtide.framework import Framework, Storage
from ebbtide.saved import StorageEntry
from ebbtide.sizes import format_bytes

_POLL_MS = 100
_NO_LIMIT = (1 << 64) - 1

# A probe of a storage that another thread is just saving: look again later. More holders than there can be leases.
_HELD = (1 << 32, True, True, False)
# The storage could not be looked at: it stays on the device.
_UNKNOWN = (1, False, True, False)


class Transfers:
    """One engine, its tier, and the framework objects behind its entries."""

    def __init__(self, framework: Framework, options: Resolved) -> None:
        self._framework = framework
        self._tier = options.tier
        self._file: _core.SpillFile | None = None
        if options.directory is not None and options.tier == "disk":
            self._file = process.spill_file(options.directory, options.allow_tmpfs)
        self.space: _core.BlockSpace = self._file if self._file is not None else process.host_pool()
        limit = options.max_disk_bytes if self._file is not None else options.max_host_bytes
        self._max_tier_bytes = _NO_LIMIT if limit is None else limit
        self.engine = _core.Engine(
            self.space,
            min_bytes=options.min_bytes,
            keep_last_bytes=options.keep_last_bytes,
            prefetch_bytes=options.prefetch_bytes,
            in_flight_bytes=options.in_flight_bytes,
            max_tier_bytes=self._max_tier_bytes,
        )
        self.entries: dict[int, StorageEntry] = {}
        self._executor = process.executor()
        self.tickets = _core.Tickets(self.engine, _calling(weakref.ref(self)))
        self.copies = _core.Copies()
        self._unreported: set[int] = set()  # copies that the engine was not told about yet
        self.interrupted = False
        self._copy_error = ""
        self.exposed_wait_s = 0.0

    def __del__(self) -> None:
        if not hasattr(self, "copies"):
            return
        if process.usable():
            # The engine gives its blocks back with its end: no copy may use them any more.
            self._executor.drain(self.copies)
        else:
            # Threads that are not in this process may have left the engine's and the tier's mutexes locked.
            _core.keep_forever(self.engine)

    def drain(self) -> None:
        """Blocks until no copy is running, and reports them all."""
        self._executor.drain(self.copies)
        self.settle()

    def run(self, commands: list[_core.Command]) -> None:
        """Runs every command, also after one has failed; then raises the first failure."""
        failure: BaseException | None = None
        for command in commands:
            try:
                _COMMANDS[command.kind](self, command)
            except BaseException as error:
                self.interrupted |= not isinstance(error, Exception)
                failure = failure or error
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # its traceback holds this frame

    def run_dropped(self) -> None:
        """Runs what the ends of tickets left to do."""
        if not process.usable():
            return
        try:
            while (command := self.tickets.pop_dropped()) is not None:
                self.run([command])
        except BaseException as error:
            self.interrupted |= not isinstance(error, Exception)
            raise

    def settle(self) -> None:
        """Reports every copy that is done; leases leave here."""
        while (completion := self.copies.pop()) is not None:
            self._complete(*completion)

    def wait(self, copy: int) -> None:
        """Blocks until the copy is done and reported; other threads run meanwhile."""
        started = time.perf_counter()
        self._executor.wait(copy, self.copies)
        self.exposed_wait_s += time.perf_counter() - started
        self.settle()

    def intact(self, entry: StorageEntry) -> bool:
        version = self._framework.version
        return all(version(witness) == saved for witness, saved in entry.witnesses)

    def allocate(
        self, entry: StorageEntry, request: _core.RestoreVerdict | _core.Command
    ) -> Storage:
        """Memory for a load that the engine has begun; tells the engine where there is none."""
        try:
            return self._framework.allocate(request.nbytes, request.residue, entry.ref.device)
        except BaseException:
            self.run(self.engine.allocation_failed(entry.storage_id))
            raise

    def load(self, entry: StorageEntry, storage: Storage, verdict: _core.RestoreVerdict) -> bool:
        """Fills the storage; False where the engine gave the load up meanwhile. Raises what made it fail."""
        load = self._adopt(entry, storage)
        self.run(verdict.commands)
        if load == 0:
            return False
        # Another thread may have taken the completion and not reported it yet.
        while load in self._unreported:
            self.wait(load)
            self._require_answer(load)
        error = entry.load_errors.pop(load, None)
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback holds this frame
        return True

    def wait_for_other(self, entry: StorageEntry, load: int) -> None:
        """Blocks until the load that another thread has begun gets on."""
        while not self.engine.wait_allocated(entry.storage_id, _POLL_MS):
            self._require_answer(0)
        self.wait(load)

    def _require_answer(self, copy: int) -> None:
        """Raises where a call was cut short that should have reported the copy."""
        if (
            self.interrupted
            and not self.copies.running(copy)
            and (copy == 0 or copy in self._unreported)
        ):
            raise EbbtideError(
                "[unpack] an exception from a signal handler (such as Ctrl-C) cut short a load that this tensor needs: "
                "run the forward again"
            )

    def recover(self) -> None:
        """After an exception out of a signal handler cut a call short: gives up what nobody will report.

        For a moment when no other thread is in a call of this object.
        """
        self.interrupted = False
        self.settle()
        running = self.copies.all_running()
        self._unreported = set(running)
        self.run(self.engine.recover(running))
        self.run_dropped()
        for storage_id in list(self.entries):
            if not self.engine.knows(storage_id):
                self.entries.pop(storage_id, None)

    def _adopt(self, entry: StorageEntry, storage: Storage) -> int:
        """Starts the load into new memory; returns the copy."""
        framework = self._framework
        ref = framework.storage_ref(storage)
        entry.arriving = storage
        commands = self.engine.allocated(
            entry.storage_id, *ref, framework.current_stream(ref.device)
        )
        self.run(commands)
        return max((command.copy for command in commands), default=0)

    def _probe(self, command: _core.Command) -> None:
        entry = self.entries.get(command.storage)
        answer = _UNKNOWN
        try:
            answer = self._inspect(entry) if entry is not None else _HELD
        finally:
            self.run(self.engine.probed(command.storage, *answer))

    def _inspect(self, entry: StorageEntry) -> tuple[int, bool, bool, bool]:
        """Answers a probe: other holders, whether the memory is the same, whether no counter moved, whether all did."""
        lease = entry.lease
        if lease is None:
            return _HELD
        same = self._framework.storage_ref(lease) == entry.ref
        del lease  # the list of leases is its only holder here
        version = self._framework.version
        moved = [version(witness) != saved for witness, saved in entry.witnesses]
        spoiled = bool(moved) and all(moved)
        try:
            return self._framework.holders(entry.leases), same, not any(moved), spoiled
        except IndexError:
            return _HELD  # released meanwhile

    def _copy(self, command: _core.Command) -> None:
        entry = self.entries.get(command.storage)
        if entry is None:  # saving it was cut short
            self.run(self.engine.completed(command.copy, False, *_UNKNOWN))
            return
        if command.to_device:
            storage, entry.arriving = entry.arriving, None
            entry.restored = {command.copy: storage}
            entry.restored_weak = self._framework.weak(storage)
        else:
            storage = entry.lease
        self._unreported.add(command.copy)
        try:
            self.copies.submit(self._executor, command, self._file, storage)
        except BaseException as error:
            # Interrupted after it was queued, it is reported as any other.
            if not self.copies.running(command.copy):
                self._complete(command.copy, command.storage, command.to_device, error)
            if not command.to_device or not isinstance(error, Exception):
                raise

    def _complete(
        self, copy: int, storage_id: int, to_device: bool, error: BaseException | None
    ) -> None:
        entry = self.entries.get(storage_id)
        answer = _UNKNOWN
        try:
            if error is not None and not to_device:
                self._copy_error = str(error)
            elif error is not None and entry is not None:
                entry.load_errors[copy] = error
            if entry is not None and not to_device:
                answer = self._inspect(entry)
        finally:
            commands = self.engine.completed(copy, error is None, *answer)
            # Whoever waits for the copy sees it done from here on.
            self._unreported.discard(copy)
            self.run(commands)

    def _wait_for(self, command: _core.Command) -> None:
        self.wait(command.copy)

    def _allocate_ahead(self, command: _core.Command) -> None:
        """A prefetch: a failure only cancels it."""
        entry = self.entries.get(command.storage)
        if entry is None:
            self.run(self.engine.allocation_failed(command.storage))
            return
        try:
            storage = self.allocate(entry, command)
        except MemoryError:
            return
        self._adopt(entry, storage)

    def _release_lease(self, command: _core.Command) -> None:
        if (entry := self.entries.get(command.storage)) is not None:
            del entry.leases[-1:]

    def _release_restored(self, command: _core.Command) -> None:
        if (entry := self.entries.get(command.storage)) is not None:
            entry.restored.pop(command.copy, None)

    def _forget(self, command: _core.Command) -> None:
        # Absent where saving failed before it was made.
        if (entry := self.entries.pop(command.storage, None)) is not None:
            entry.leases.clear()
            entry.restored.clear()
            entry.arriving = None

    def _warn_tier_full(self, command: _core.Command) -> None:
        if not process.usable():
            return  # a thread that outlives the interpreter's main one
        entry = self.entries.get(command.storage)
        nbytes = entry.ref.nbytes if entry is not None else 0
        if self._copy_error:
            cause, remedy = self._copy_error, "choose another tier with to="
        else:
            limit = format_bytes(self._max_tier_bytes)
            cause = f"{format_bytes(self.space.reserved_bytes)} reserved of {limit} allowed"
            option = "max_disk_bytes" if self._file is not None else "max_host_bytes"
            remedy = f"raise {option}, or choose another tier with to="
        warnings.warn(
            f"[{self._tier} tier] no room for {format_bytes(nbytes)}: {cause}. What does not fit "
            f"stays on the device (kept['host_full'] counts it): {remedy}",
            RuntimeWarning,
            stacklevel=_level_of_the_caller(),
        )


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
    int(CommandKind.COPY): Transfers._copy,
    int(CommandKind.WAIT): Transfers._wait_for,
    int(CommandKind.ALLOC): Transfers._allocate_ahead,
    int(CommandKind.RELEASE_LEASE): Transfers._release_lease,
    int(CommandKind.RELEASE_RESTORED): Transfers._release_restored,
    int(CommandKind.FORGET): Transfers._forget,
    int(CommandKind.TIER_FULL): Transfers._warn_tier_full,
}
