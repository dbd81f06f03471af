"""The session: between a framework's saved-tensor hooks and the engine.

``pack`` turns a tensor into a ticket, ``unpack`` a ticket into a tensor: both come for every tensor, and are in the base
class. What is copied, when and in which order is the engine's decision; ``transfers`` carries it out.

Threads: any. There are no Python locks: a garbage collection inside pack may run a ticket's destructor, which comes
back into the session on the same thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

from ebbtide import _core, process
from ebbtide._core import StorageEntry, Ticket
from ebbtide.errors import DeviceError, InplaceModificationError
from ebbtide.framework import Framework, Storage, Tensor
from ebbtide.interrupts import noting_interrupts
from ebbtide.peaks import Recomputation
from ebbtide.policy import wants_offload
from ebbtide.resolved import Resolved
from ebbtide.runs import Runs, label_of
from ebbtide.sizes import format_bytes
from ebbtide.transfers import Transfers

# What pack returns: for a tensor that stays on the device, itself and its in-place counter at the save.
Kept: TypeAlias = tuple[Tensor, int]
Packed: TypeAlias = Kept | Ticket


class Session(_core.SavedTensors):
    """One engine and its framework objects. Made by ``offload``; lives until its last ticket is dropped.

    ``unpack`` raises InplaceModificationError where the tensor was changed in place since it was saved, the framework's
    own rule; SpillError and CorruptionError where the disk tier failed; DeviceError where there is no memory for it.
    """

    def __init__(self, framework: Framework, options: Resolved) -> None:
        self._framework = framework
        self._use_saved_copy = options.on_inplace == "saved"
        self.transfers = Transfers(framework, options)
        self._engine = self.transfers.engine
        self.labels: dict[str, int] = {}  # names of groups, from 1
        self.runs = Runs(framework, self.transfers, self.labels)
        super().__init__(self.transfers, framework, options.min_bytes, self._use_saved_copy)

    # --- forward

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
        try:
            self.transfers.settle()
        finally:
            self.transfers.run(self._engine.end_group())

    def require_usable(self, place: str) -> None:
        process.require_usable(place)

    def wants_offload(self, policy: Callable[[Tensor], Any], tensor: Tensor) -> bool:
        return wants_offload(policy(tensor))

    # --- backward

    def find_saved_copy(self, ticket: Ticket, found: int) -> Storage:
        """For a tensor that was changed in place: the copy that was made before."""
        try:
            return self.find(ticket, allow_live=False)
        except DeviceError as error:
            raise self.modified(ticket, found) from error

    def begin_recomputation(self) -> Recomputation:
        """A checkpointed region's input was unpacked; returns what tells how much memory that takes, owned by the ticket."""
        assert self._framework.memory is not None
        return Recomputation(self._framework.memory)

    def no_memory(self, nbytes: int, cause: BaseException) -> DeviceError:
        error = DeviceError(
            f"[unpack] no memory for a storage of {format_bytes(nbytes)} on {self._framework.device_type}; its copy is "
            "kept: free memory and run backward again (retain_graph=True), or use a smaller batch"
        )
        error.__cause__ = cause
        return error

    def modified(self, ticket: Ticket, found: int) -> InplaceModificationError:
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

    def modified_kept(self, tensor: Tensor, expected: int, found: int) -> InplaceModificationError:
        text = self._framework.modified_text(
            tensor, None, "which stayed on the device", expected, found
        )
        return self._modified_error(text)

    def _modified_error(self, text: str, *remedies: str) -> InplaceModificationError:
        hints = (*remedies, self._framework.modified_hint)
        remedy = "; ".join(filter(None, ("write to a copy of it, or only after backward", *hints)))
        return InplaceModificationError(f"[unpack] {text}: {remedy}")

    def not_intact(self, entry: StorageEntry) -> InplaceModificationError:
        """Another tensor's counter moved: plain autograd would read what was written, which nobody has any more."""
        return InplaceModificationError(
            f"[unpack] a storage of {format_bytes(entry.ref.nbytes)} was saved, offloaded, and then written in place "
            "through a tensor that does not share this one's in-place counter (such as .data): "
            "keep it on the device with policy=, or do not write to it before backward"
        )

    def tell_of_end(self, pass_id: int) -> None:
        """Has the running backward's end told, also where it ends by an exception."""
        self._framework.end_of_pass(_core.AtEnd(functools.partial(self.end_pass, pass_id)))

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
