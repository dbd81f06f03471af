"""The session: between a framework's saved-tensor hooks and the engine.

``pack`` turns a tensor into a ticket, ``unpack`` a ticket into a tensor. What is copied, when and in which order is the
engine's decision; ``transfers`` carries it out.

Threads: any. There are no Python locks: a garbage collection inside pack may run a ticket's destructor, which comes
back into the session on the same thread.
"""

from __future__ import annotations

import functools
import weakref

from ebbtide import _core, process
from ebbtide._core import KeepReason, RestoreOutcome
from ebbtide.errors import DeviceError, InplaceModificationError
from ebbtide.framework import Framework, Storage, Tensor, Witness
from ebbtide.interrupts import noting_interrupts
from ebbtide.peaks import Recomputation
from ebbtide.policy import wants_offload
from ebbtide.resolved import Resolved
from ebbtide.runs import Runs, label_of
from ebbtide.saved import Kept, Saving, StorageEntry, Ticket
from ebbtide.sizes import format_bytes
from ebbtide.transfers import Transfers

_LIVE = int(RestoreOutcome.LIVE)
_SHARED = int(RestoreOutcome.SHARED)
_LOAD = int(RestoreOutcome.LOAD)


class Session:
    """One engine and its framework objects. Made by ``offload``; lives until its last ticket is dropped."""

    def __init__(self, framework: Framework, options: Resolved) -> None:
        self._framework = framework
        self._use_saved_copy = options.on_inplace == "saved"
        self._min_bytes = options.min_bytes
        self._memory = framework.memory
        self.transfers = Transfers(framework, options)
        self._engine = self.transfers.engine
        # What is asked for at every tensor: no more than there is to ask.
        transfers = self.transfers
        self._settle = transfers.settle if transfers.threads_copy else transfers.settle_streams
        self.labels: dict[str, int] = {}  # names of groups, from 1
        self.runs = Runs(framework, self.transfers, self.labels)
        self._epochs: set[int] = set()
        self._passes: set[int] = set()

    # --- forward

    @noting_interrupts
    def begin_epoch(self) -> int:
        process.require_usable("offload")
        self._recover_when_alone()
        epoch = self._engine.begin_epoch()
        self._epochs.add(epoch)
        return epoch

    def _recover_when_alone(self) -> None:
        if self.transfers.interrupted and not self._epochs and not self._passes:
            self.transfers.recover()

    @noting_interrupts
    def end_epoch(self, epoch: int) -> None:
        if not process.usable():
            return  # in a forked child: the parent ends it
        self._epochs.discard(epoch)
        try:
            self.transfers.settle()
        finally:
            self.transfers.run(self._engine.end_epoch(epoch))

    @noting_interrupts
    def begin_group(self, epoch: int, name: str) -> int:
        """A group begins; returns the label that what is saved in it goes by."""
        process.require_usable("group")
        label = label_of(name, self.labels)
        self.transfers.run(self._engine.begin_group(epoch, label))
        return label

    @noting_interrupts
    def end_group(self) -> None:
        if not process.usable():
            return
        self.transfers.settle()
        self.transfers.run(self._engine.end_group())

    def pack(self, tensor: Tensor, saving: Saving) -> Kept | Ticket:
        """The saved-tensor hook: takes a tensor, returns what stands for it until backward."""
        try:
            if process.unusable:
                process.require_usable("pack")
            self._settle()
            framework = self._framework
            reason = framework.keep_reason(tensor, saving.weights)
            forced = False
            if reason is None and saving.inputs_only and not framework.is_region_input():
                reason = KeepReason.POLICY
            if reason is None and saving.policy is not None:
                forced = wants_offload(saving.policy(tensor))
                if not forced:
                    reason = KeepReason.POLICY
            if reason is None and not forced:
                # The engine would say so too: spares a small tensor its description.
                if framework.storage_bytes(tensor) < self._min_bytes:
                    reason = KeepReason.SMALL
            if reason is None:
                return self._save(tensor, saving, forced, spoiled=False)
            self._engine.kept(reason, framework.nbytes(tensor))
            return self._keep(tensor, reason)
        except Exception:
            raise
        except BaseException:
            self.transfers.cut_short()
            raise

    def keep(self, tensor: Tensor) -> Kept:
        """Stands in for ``pack`` where nothing is to be offloaded; counts nothing."""
        return self._keep(tensor, KeepReason.UNSUPPORTED)

    def _keep(self, tensor: Tensor, reason: KeepReason) -> Kept:
        kept = self._framework.keep(tensor, reason)
        return kept, self._framework.version(kept)

    def _save(self, tensor: Tensor, saving: Saving, forced: bool, spoiled: bool) -> Kept | Ticket:
        framework, transfers = self._framework, self.transfers
        view = framework.view_meta(tensor)
        version = framework.version(tensor)
        storage = framework.storage(tensor)
        ref = framework.storage_ref(storage)
        stream = transfers.current_stream(ref.device)
        hold, kept_for, ticket_id, storage_id, is_new, lease, commands = transfers.tickets.save(
            ref,
            view,
            version,
            saving.epoch,
            saving.label,
            saving.run,
            saving.on_request,
            stream,
            forced,
            spoiled,
        )
        if hold is None:
            return self._keep(tensor, kept_for)
        try:
            entry = transfers.entries.get(storage_id)
            if entry is None:
                # Another thread may be here for the same storage: the first one's object is everybody's.
                entry = StorageEntry(storage_id, ref, framework.weak(storage))
                entry = transfers.entries.setdefault(storage_id, entry)
            if stream != 0 and stream not in entry.streams:
                # Autograd has a tensor saved before the operation that reads it is issued, and without Ebbtide would keep
                # the memory from others until backward.
                assert framework.streams is not None
                framework.streams.record_stream_of(tensor, stream)
                entry.streams += (stream,)
            if lease:
                entry.leases.append(storage)
            # Probes count references: this one must not be taken for somebody else's.
            del storage
            intact = is_new or transfers.intact(entry)
            witness = self._witness(entry, tensor, version) if intact else None
        except BaseException:
            if commands is not None:
                transfers.run(commands)
            raise
        original = weakref.ref(tensor) if framework.replaceable(tensor) else None
        ticket = Ticket(self, ticket_id, hold, entry, view, witness, version, original)
        if commands is not None:
            transfers.run(commands)
        return ticket if intact else self._save(tensor, saving, forced, spoiled=True)

    def _witness(self, entry: StorageEntry, tensor: Tensor, version: int) -> Witness:
        owner = self._framework.counter_owner(tensor)
        last = entry.last_witness
        if last is not None and last[0]() is owner:
            return last[1]
        witness = self._framework.witness(tensor)
        entry.witnesses.append((witness, version))
        entry.last_witness = (weakref.ref(owner), witness)
        return witness

    # --- backward

    def unpack(self, saved: Kept | Ticket) -> Tensor:
        """The saved-tensor hook: takes what ``pack`` returned, gives the tensor back.

        Raises InplaceModificationError where the tensor was changed in place since, the framework's own rule; SpillError
        and CorruptionError where the disk tier failed; DeviceError where there is no memory for it.
        """
        try:
            if process.unusable:
                process.require_usable("unpack")
            framework = self._framework
            if isinstance(saved, tuple):
                tensor, expected = saved
                found = framework.version(tensor)
                if found != expected:
                    raise self._modified_kept(tensor, expected, found)
                return tensor
            self._settle()
            found = framework.version(saved.witness)
            original = saved.original() if saved.original is not None else None
            if original is not None and found == saved.version:
                if framework.storage_ref(framework.storage(original)) != saved.entry.ref:
                    return original
            if found == saved.version:
                storage = self._find(saved, allow_live=True)
            elif self._use_saved_copy:
                storage = self._find_saved_copy(saved, found)
            else:
                raise self._modified(saved, found)
            if self._memory is not None and framework.recomputes():
                saved.peak = Recomputation(self._memory)
            return framework.make_view(storage, saved.view, saved.witness)
        except Exception:
            if process.usable():
                self._see_pass()  # whoever is not in it would not see its end
            raise
        except BaseException:
            self.transfers.cut_short()
            raise

    def _find_saved_copy(self, ticket: Ticket, found: int) -> Storage:
        try:
            return self._find(ticket, allow_live=False)
        except DeviceError as error:
            raise self._modified(ticket, found) from error

    def _find(self, ticket: Ticket, allow_live: bool) -> Storage:
        """The storage that the ticket's view lies in: the saved one, or one that its bytes were loaded into."""
        framework, transfers, entry = self._framework, self.transfers, ticket.entry
        pass_id = self._see_pass()
        stream = transfers.current_stream(entry.ref.device)
        short_of_memory = False
        while True:
            # Where plain autograd would read the same bytes from the saved storage, that is taken.
            found = transfers.restore(entry, ticket.id, pass_id, allow_live, stream)
            if found is None:
                raise self._not_intact(entry)
            outcome, storage, load, allocating, nbytes, residue, its_stream, commands = found
            if outcome == _LIVE:
                if stream != 0 and stream not in entry.streams:
                    assert framework.streams is not None
                    framework.streams.record_stream(storage, stream)
                    entry.streams += (stream,)
                return storage
            if outcome == _SHARED:
                if storage is None:
                    continue
                return storage
            if outcome == _LOAD:
                assert commands is not None
                try:
                    storage = transfers.allocate(
                        entry.storage_id, load, entry.ref.device, nbytes, residue, its_stream
                    )
                except MemoryError as error:
                    transfers.run(commands)
                    if short_of_memory:
                        raise DeviceError(
                            f"[unpack] no memory for a storage of {format_bytes(nbytes)} on "
                            f"{framework.device_type}; its copy is kept: free memory and run backward again "
                            "(retain_graph=True), or use a smaller batch"
                        ) from error
                    short_of_memory = True
                    continue
                except BaseException:
                    transfers.run(commands)  # others may wait for what they begin
                    raise
                if transfers.load(entry, storage, load, its_stream, commands):
                    return storage
                continue
            transfers.wait_for_other(entry, load, allocating)

    def _modified(self, ticket: Ticket, found: int) -> InplaceModificationError:
        label = self._engine.label_of(ticket.entry.storage_id)
        group = next((name for name, known in self.labels.items() if known == label), None)
        text = self._framework.modified_text(
            ticket.witness,
            ticket.view,
            "saved outside of groups" if group is None else f"saved in group {group!r}",
            ticket.version,
            found,
        )
        remedy = "on_inplace='saved' takes the copy made before the write, where there is one"
        if self._use_saved_copy:
            remedy = "on_inplace='saved' had no copy that was complete before the write"
        return self._modified_error(text, remedy)

    def _modified_kept(self, tensor: Tensor, expected: int, found: int) -> InplaceModificationError:
        text = self._framework.modified_text(
            tensor, None, "which stayed on the device", expected, found
        )
        return self._modified_error(text)

    def _modified_error(self, text: str, *remedies: str) -> InplaceModificationError:
        hints = (*remedies, self._framework.modified_hint)
        remedy = "; ".join(filter(None, ("write to a copy of it, or only after backward", *hints)))
        return InplaceModificationError(f"[unpack] {text}: {remedy}")

    def _not_intact(self, entry: StorageEntry) -> InplaceModificationError:
        """Another tensor's counter moved: plain autograd would read what was written, which nobody has any more."""
        return InplaceModificationError(
            f"[unpack] a storage of {format_bytes(entry.ref.nbytes)} was saved, offloaded, and then written in place "
            "through a tensor that does not share this one's in-place counter (such as .data): "
            "keep it on the device with policy=, or do not write to it before backward"
        )

    def _see_pass(self) -> int:
        """The running backward; one that is seen for the first time is asked to tell of its end."""
        pass_id = self._framework.current_pass()
        if pass_id and pass_id not in self._passes:
            self._recover_when_alone()
            self._passes.add(pass_id)
            self._framework.end_of_pass(_core.AtEnd(functools.partial(self.end_pass, pass_id)))
        return pass_id

    @noting_interrupts
    def end_pass(self, pass_id: int) -> None:
        """The backward is over, also by an exception: nothing is kept for it any more."""
        if not process.usable():
            return
        self._passes.discard(pass_id)
        try:
            self.transfers.settle()
        finally:
            self.transfers.run(self._engine.end_pass(pass_id))

    # --- for the owner

    def synchronize(self) -> None:
        """Blocks until no copy is running and no backward that has returned holds anything."""
        process.require_usable("synchronize")
        self._framework.finish_queued()
        self.transfers.drain()

    def stats(self) -> _core.Stats:
        process.require_usable("stats")
        self.transfers.settle()
        return self._engine.stats()

    def group_stats(self) -> list[_core.GroupStats]:
        """First of what was saved outside of groups, then by the labels' numbers."""
        process.require_usable("group_stats")
        return self._engine.group_stats()

    def reset_stats(self) -> None:
        process.require_usable("reset_stats")
        self.transfers.settle()
        self._engine.reset_stats()
        self.transfers.exposed_wait_s = 0.0
