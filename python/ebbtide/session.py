"""The session: between a framework's saved-tensor hooks and the engine.

It holds the framework's objects (leases, restored storages, witnesses), runs the engine's commands and reports back.
What is copied, when and in which order is the engine's decision.

Threads: any. There are no Python locks: a garbage collection inside pack may run a ticket's destructor, which comes
back into the session on the same thread.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

from ebbtide import _core, process
from ebbtide._core import CommandKind, KeepReason, RestoreOutcome, SaveOutcome
from ebbtide.config import Resolved
from ebbtide.errors import DeviceError, InplaceModificationError
from ebbtide.framework import (
    Framework,
    Storage,
    StorageRef,
    Tensor,
    ViewMeta,
    Weak,
    Weights,
    Witness,
)
from ebbtide.policy import wants_offload
from ebbtide.sizes import format_bytes

_KEPT = int(SaveOutcome.KEPT)
_NEW = int(SaveOutcome.NEW)
_LIVE = int(RestoreOutcome.LIVE)
_SHARED = int(RestoreOutcome.SHARED)
_LOAD = int(RestoreOutcome.LOAD)

_NO_LIMIT = (1 << 64) - 1

# A probe of a storage that another thread is just saving: look again later.
_HELD = (1, True, True, False)
# The storage could not be looked at: it stays on the device.
_UNKNOWN = (1, False, True, False)


class Kept:
    """What pack returns for a tensor that stays on the device."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor, version: int) -> None:
        self.tensor = tensor
        self.version = version


class StorageEntry:
    """The framework's objects behind one entry of the engine."""

    __slots__ = (
        "arriving",
        "last_witness",
        "leases",
        "load_errors",
        "ref",
        "restored",
        "restored_weak",
        "storage_id",
        "weak",
        "witnesses",
    )

    def __init__(self, storage_id: int, ref: StorageRef, weak: Weak) -> None:
        self.storage_id = storage_id
        self.ref = ref
        self.weak = weak
        # Any thread may run the engine's commands, and late: a release takes away what it is about, not what came after.
        # So there is one item per lease, and a restored storage goes by the copy that fills it.
        self.leases: list[Storage] = []
        self.restored: dict[int, Storage] = {}
        self.restored_weak: Weak | None = None
        self.arriving: Storage | None = None  # memory for a copy that has not begun
        self.load_errors: dict[int, BaseException] = {}
        # One witness per in-place counter seen, with the counter's value; dead tickets' witnesses stay: a write through
        # any of them changes the content for all.
        self.witnesses: list[tuple[Witness, int]] = []
        self.last_witness: tuple[weakref.ref[Any], Witness] | None = None  # with the owner of its counter

    @property
    def lease(self) -> Storage | None:
        last = self.leases[-1:]
        return last[0] if last else None


class Ticket:
    """What pack returns for a tensor that may be offloaded. Owns the host bytes together with its siblings."""

    __slots__ = ("_session", "entry", "id", "version", "view", "witness")

    def __init__(
        self, session: Session, ticket: int, entry: StorageEntry, view: ViewMeta, witness: Witness, version: int
    ) -> None:
        self._session = session
        self.id = ticket
        self.entry = entry
        self.view = view
        self.witness = witness
        self.version = version

    def __del__(self) -> None:
        if process.usable():
            self._session.drop(self.id)


class PassEnd:
    """Ends a pass when called, or when the backward that holds it dies of an exception."""

    __slots__ = ("_pass_id", "_session")

    def __init__(self, session: Session, pass_id: int) -> None:
        self._session: Session | None = session
        self._pass_id = pass_id

    def __call__(self) -> None:
        session, self._session = self._session, None
        if session is not None and process.usable():
            session.end_pass(self._pass_id)

    def __del__(self) -> None:
        self()


class Session:
    """One engine and its framework objects. Made by ``offload``; lives until its last ticket is dropped."""

    def __init__(self, framework: Framework, options: Resolved, policy: Callable[[Tensor], Any] | None) -> None:
        self._framework = framework
        self._policy = policy
        self._layer_inputs_only = options.only == "layer_inputs"
        self._use_saved_copy = options.on_inplace == "saved"
        self._tier = options.tier
        self._min_bytes = options.min_bytes
        self._file: _core.SpillFile | None = None
        if options.directory is not None and options.tier == "disk":
            self._file = process.spill_file(options.directory, options.allow_tmpfs)
        self.space: _core.BlockSpace = self._file if self._file is not None else process.host_pool()
        limit = options.max_disk_bytes if self._file is not None else options.max_host_bytes
        self._max_tier_bytes = _NO_LIMIT if limit is None else limit
        self._engine = _core.Engine(
            self.space,
            min_bytes=options.min_bytes,
            keep_last_bytes=options.keep_last_bytes,
            prefetch_bytes=options.prefetch_bytes,
            in_flight_bytes=options.in_flight_bytes,
            max_tier_bytes=self._max_tier_bytes,
        )
        self._executor = process.executor()
        self._completions = _core.CompletionQueue()
        self._entries: dict[int, StorageEntry] = {}
        self._copies: dict[int, tuple[StorageEntry, bool]] = {}
        self._passes: set[int] = set()
        self._copy_error = ""
        self.exposed_wait_s = 0.0

    def __del__(self) -> None:
        if not hasattr(self, "_completions"):
            return
        if process.usable():
            # Copies read and write memory that this session keeps alive.
            self._executor.drain(self._completions)
        else:
            # Threads that are not in this process may have left the engine's and the tier's mutexes locked.
            _core.keep_forever(self._engine)

    # --- forward

    def begin_epoch(self) -> int:
        process.require_usable("offload")
        return self._engine.begin_epoch()

    def end_epoch(self, epoch: int) -> None:
        if not process.usable():
            return  # in a forked child: the parent ends it
        try:
            self._settle()
        finally:
            self._run(self._engine.end_epoch(epoch))

    def pack(self, tensor: Tensor, epoch: int, weights: Weights) -> Kept | Ticket:
        """The saved-tensor hook: takes a tensor, returns what stands for it until backward."""
        process.require_usable("pack")
        if self._completions.ready:
            self._settle()
        framework = self._framework
        reason = framework.keep_reason(tensor, weights)
        forced = False
        if reason is None and self._layer_inputs_only and not framework.is_region_input():
            reason = KeepReason.POLICY
        if reason is None and self._policy is not None:
            forced = wants_offload(self._policy(tensor))
            if not forced:
                reason = KeepReason.POLICY
        if reason is None and not forced:
            # The engine would say so too; most tensors of a small model end here, so spare them the description.
            if framework.storage_bytes(framework.storage(tensor)) < self._min_bytes:
                reason = KeepReason.SMALL
        if reason is not None:
            self._engine.kept(reason, framework.nbytes(tensor))
            return self._keep(tensor, reason)
        return self._save(tensor, epoch, forced, spoiled=False)

    def keep(self, tensor: Tensor) -> Kept:
        """Stands in for ``pack`` where nothing is to be offloaded; counts nothing."""
        return self._keep(tensor, KeepReason.UNSUPPORTED)

    def _keep(self, tensor: Tensor, reason: KeepReason) -> Kept:
        kept = self._framework.keep(tensor, reason)
        return Kept(kept, self._framework.version(kept))

    def _save(self, tensor: Tensor, epoch: int, forced: bool, spoiled: bool) -> Kept | Ticket:
        framework = self._framework
        engine = self._engine
        view = framework.view_meta(tensor)
        version = framework.version(tensor)
        storage = framework.storage(tensor)
        ref = framework.storage_ref(storage)
        verdict = engine.save(
            ref.device,
            ref.identity,
            ref.address,
            ref.nbytes,
            view.storage_offset,
            view.itemsize,
            view.kind,
            view.sizes,
            view.strides,
            version,
            epoch,
            framework.current_stream(ref.device),
            forced,
            spoiled,
        )
        outcome = verdict.outcome
        if outcome == _KEPT:
            return self._keep(tensor, verdict.reason)
        try:
            entry = self._entries.get(verdict.storage)
            if entry is None:
                # Another thread may be here for the same storage: the first one's object is everybody's.
                entry = StorageEntry(verdict.storage, ref, framework.weak(storage))
                entry = self._entries.setdefault(verdict.storage, entry)
            if verdict.lease:
                entry.leases.append(storage)
            # Probes count references: this one must not be taken for somebody else's.
            del storage
            intact = outcome == _NEW or self._intact(entry)
            witness = self._witness(entry, tensor, version) if intact else None
        except BaseException:
            self._run(verdict.commands)
            self._run(engine.drop(verdict.ticket))
            raise
        ticket = Ticket(self, verdict.ticket, entry, view, witness, version)
        self._run(verdict.commands)
        return ticket if intact else self._save(tensor, epoch, forced, spoiled=True)

    def _witness(self, entry: StorageEntry, tensor: Tensor, version: int) -> Witness:
        owner = self._framework.counter_owner(tensor)
        last = entry.last_witness
        if last is not None and last[0]() is owner:
            return last[1]
        witness = self._framework.witness(tensor)
        entry.witnesses.append((witness, version))
        entry.last_witness = (weakref.ref(owner), witness)
        return witness

    def drop(self, ticket: int) -> None:
        """A ticket died: let go of what only it needed."""
        self._run(self._engine.drop(ticket))

    # --- backward

    def unpack(self, saved: Kept | Ticket) -> Tensor:
        """The saved-tensor hook: takes what ``pack`` returned, gives the tensor back.

        Raises InplaceModificationError where the tensor was changed in place since, the framework's own rule; SpillError
        and CorruptionError where the disk tier failed; DeviceError where there is no memory for it.
        """
        process.require_usable("unpack")
        framework = self._framework
        if isinstance(saved, Kept):
            found = framework.version(saved.tensor)
            if found != saved.version:
                text = framework.modified_text(saved.tensor, saved.version, found)
                raise InplaceModificationError(text)
            return saved.tensor
        if self._completions.ready:
            self._settle()
        found = framework.version(saved.witness)
        if found == saved.version:
            storage = self._find(saved, allow_live=True)
        elif self._use_saved_copy:
            storage = self._find_saved_copy(saved, found)
        else:
            raise InplaceModificationError(framework.modified_text(self._like(saved), saved.version, found))
        return framework.make_view(storage, saved.view, saved.witness)

    def _find_saved_copy(self, ticket: Ticket, found: int) -> Storage:
        try:
            return self._find(ticket, allow_live=False)
        except DeviceError as error:
            text = self._framework.modified_text(self._like(ticket), ticket.version, found)
            raise InplaceModificationError(f"{text} [on_inplace='saved': no copy was complete before]") from error

    def _like(self, ticket: Ticket) -> Tensor:
        """A tensor of the ticket's type for error texts; its memory is not there."""
        return ticket.witness

    def _find(self, ticket: Ticket, allow_live: bool) -> Storage:
        """The storage that the ticket's view lies in: the saved one, or one that its bytes were loaded into."""
        framework, engine, entry = self._framework, self._engine, ticket.entry
        pass_id = self._join_pass()
        short_of_memory = False
        while True:
            live = self._live(entry) if allow_live else None
            weak = entry.restored_weak
            shared = framework.lock(weak) if live is None and weak is not None else None
            if live is None and allow_live:
                self._require_intact(entry)
            verdict = engine.restore(ticket.id, pass_id, live is not None, shared is not None)
            if verdict.outcome == _LIVE:
                self._run(verdict.commands)
                return live
            if verdict.outcome == _SHARED:
                self._run(verdict.commands)
                if entry.restored_weak is not weak:
                    continue  # another thread loaded it anew meanwhile
                return shared
            if verdict.outcome == _LOAD:
                try:
                    storage = self._allocate(entry, verdict)
                except MemoryError as error:
                    self._run(verdict.commands)
                    if short_of_memory:
                        raise DeviceError(
                            f"[unpack] no memory for a storage of {format_bytes(verdict.nbytes)} on "
                            f"{framework.device_type}; its copy is kept: free memory and run backward again "
                            "(retain_graph=True), or use a smaller batch"
                        ) from error
                    short_of_memory = True
                    continue
                self._load(entry, storage, verdict)
                return storage
            engine.wait_allocated(entry.storage_id)
            self._wait(verdict.load)

    def _live(self, entry: StorageEntry) -> Storage | None:
        """The saved storage, where plain autograd would read the same bytes from it."""
        storage = entry.lease
        if storage is not None:
            return storage
        storage = self._framework.lock(entry.weak)
        if storage is None or self._framework.storage_ref(storage) != entry.ref:
            return None
        return storage

    def _require_intact(self, entry: StorageEntry) -> None:
        """Another tensor's counter moved: plain autograd would read what was written, which nobody has any more."""
        if not self._intact(entry):
            raise InplaceModificationError(
                f"[unpack] a storage of {format_bytes(entry.ref.nbytes)} was saved, offloaded, and then written in place "
                "through a tensor that does not share this one's in-place counter (such as .data): "
                "keep it on the device with policy=, or do not write to it before backward"
            )

    def _allocate(self, entry: StorageEntry, request: _core.RestoreVerdict | _core.Command) -> Storage:
        """Memory for a load that the engine has begun; tells the engine where there is none."""
        try:
            return self._framework.allocate(request.nbytes, request.residue, entry.ref.device)
        except BaseException:
            self._run(self._engine.allocation_failed(entry.storage_id))
            raise

    def _adopt(self, entry: StorageEntry, storage: Storage) -> int:
        """Starts the load into new memory; returns the copy."""
        framework = self._framework
        ref = framework.storage_ref(storage)
        entry.arriving = storage
        commands = self._engine.allocated(entry.storage_id, *ref, framework.current_stream(ref.device))
        self._run(commands)
        return max((command.copy for command in commands), default=0)

    def _load(self, entry: StorageEntry, storage: Storage, verdict: _core.RestoreVerdict) -> None:
        load = self._adopt(entry, storage)
        self._run(verdict.commands)
        # Another thread may have taken the completion and not reported it yet.
        while load in self._copies:
            self._wait(load)
        error = entry.load_errors.pop(load, None)
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback holds this frame

    def _join_pass(self) -> int:
        """The running backward's number; asks to be told of its end when it is new."""
        pass_id = self._framework.current_pass()
        if pass_id and pass_id not in self._passes:
            self._passes.add(pass_id)
            self._framework.end_of_pass(PassEnd(self, pass_id))
        return pass_id

    def end_pass(self, pass_id: int) -> None:
        """The backward is over: nothing is kept for it any more."""
        self._passes.discard(pass_id)
        try:
            self._settle()
        finally:
            self._run(self._engine.end_pass(pass_id))

    # --- commands

    def _run(self, commands: list[_core.Command]) -> None:
        """Runs every command, also after one has failed; then raises the first failure."""
        failure: BaseException | None = None
        for command in commands:
            try:
                _COMMANDS[command.kind](self, command)
            except BaseException as error:
                failure = failure or error
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # its traceback holds this frame

    def _probe(self, command: _core.Command) -> None:
        entry = self._entries.get(command.storage)
        answer = _UNKNOWN
        try:
            answer = self._inspect(entry) if entry is not None else _HELD
        finally:
            self._run(self._engine.probed(command.storage, *answer))

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

    def _intact(self, entry: StorageEntry) -> bool:
        version = self._framework.version
        return all(version(witness) == saved for witness, saved in entry.witnesses)

    def _copy(self, command: _core.Command) -> None:
        entry = self._entries[command.storage]
        if command.to_device:
            storage, entry.arriving = entry.arriving, None
            entry.restored = {command.copy: storage}
            entry.restored_weak = self._framework.weak(storage)
        self._copies[command.copy] = (entry, command.to_device)
        try:
            self._executor.submit(command, self._file, self._completions)
        except BaseException as error:
            self._complete(command.copy, error)
            if not command.to_device:
                raise

    def _wait_for(self, command: _core.Command) -> None:
        self._wait(command.copy)

    def _wait(self, copy: int) -> None:
        """Blocks until the copy is done and reported; other threads run meanwhile."""
        started = time.perf_counter()
        self._executor.wait(copy, self._completions)
        self.exposed_wait_s += time.perf_counter() - started
        self._settle()

    def _settle(self) -> None:
        """Reports every copy that is done; leases leave here."""
        while (completion := self._completions.pop()) is not None:
            self._complete(*completion)

    def _complete(self, copy: int, error: BaseException | None) -> None:
        entry, to_device = self._copies[copy]
        answer = _UNKNOWN
        try:
            if to_device and error is not None:
                entry.load_errors[copy] = error
            elif error is not None:
                self._copy_error = str(error)
            if not to_device:
                answer = self._inspect(entry)
        finally:
            commands = self._engine.completed(copy, error is None, *answer)
            # Whoever waits for the copy sees it done from here on.
            del self._copies[copy]
            self._run(commands)

    def _allocate_ahead(self, command: _core.Command) -> None:
        """A prefetch: a failure only cancels it."""
        entry = self._entries[command.storage]
        try:
            storage = self._allocate(entry, command)
        except MemoryError:
            return
        self._adopt(entry, storage)

    def _release_lease(self, command: _core.Command) -> None:
        if (entry := self._entries.get(command.storage)) is not None:
            del entry.leases[-1:]

    def _release_restored(self, command: _core.Command) -> None:
        if (entry := self._entries.get(command.storage)) is not None:
            entry.restored.pop(command.copy, None)

    def _forget(self, command: _core.Command) -> None:
        # Absent where saving failed before it was made.
        if (entry := self._entries.pop(command.storage, None)) is not None:
            entry.leases.clear()
            entry.restored.clear()
            entry.arriving = None

    def _warn_tier_full(self, command: _core.Command) -> None:
        if not process.usable():
            return  # a thread that outlives the interpreter's main one
        entry = self._entries.get(command.storage)
        nbytes = entry.ref.nbytes if entry is not None else 0
        option = "max_disk_bytes" if self._file is not None else "max_host_bytes"
        cause = (
            self._copy_error
            if self._copy_error
            else f"{format_bytes(self.space.reserved_bytes)} reserved of {format_bytes(self._max_tier_bytes)} allowed"
        )
        warnings.warn(
            f"[{self._tier} tier] no room for {format_bytes(nbytes)}: {cause}. What does not fit stays on the device "
            f"(kept['host_full'] counts it): raise {option}, or choose another tier with to=",
            RuntimeWarning,
            stacklevel=2,
        )

    # --- for the owner

    def synchronize(self) -> None:
        """Blocks until no copy is running."""
        process.require_usable("synchronize")
        self._executor.drain(self._completions)
        self._settle()

    def stats(self) -> _core.Stats:
        process.require_usable("stats")
        self._settle()
        return self._engine.stats()

    def reset_stats(self) -> None:
        process.require_usable("reset_stats")
        self._settle()
        self._engine.reset_stats()
        self.exposed_wait_s = 0.0


_COMMANDS: dict[int, Callable[[Session, _core.Command], None]] = {
    int(CommandKind.PROBE): Session._probe,
    int(CommandKind.COPY): Session._copy,
    int(CommandKind.WAIT): Session._wait_for,
    int(CommandKind.ALLOC): Session._allocate_ahead,
    int(CommandKind.RELEASE_LEASE): Session._release_lease,
    int(CommandKind.RELEASE_RESTORED): Session._release_restored,
    int(CommandKind.FORGET): Session._forget,
    int(CommandKind.TIER_FULL): Session._warn_tier_full,
}
