"""What stands for a saved tensor between forward and backward, and what ends with it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from ebbtide._core import TicketHold
from ebbtide.framework import Storage, StorageRef, Tensor, ViewMeta, Weak, Weights, Witness
from ebbtide.peaks import Recomputation

# What pack returns for a tensor that stays on the device: the tensor and its in-place counter at the save. A plain
# tuple, because there is one for every small tensor and weight.
Kept: TypeAlias = tuple[Tensor, int]


@dataclass(slots=True)
class Saving:
    """What is saved through one pair of hooks: whose weights stay, and which storages leave the device, and when."""

    epoch: int
    weights: Weights
    policy: Callable[[Tensor], Any] | None = None
    inputs_only: bool = False  # of checkpointed regions
    label: int = 0  # of the group that runs
    run: int = 0  # of a group whose copies the caller starts
    on_request: bool = False  # of the run, only what was asked for by `Runs.request`


class StorageEntry:
    """The framework's objects behind one entry of the engine."""

    __slots__ = (
        "last_witness",
        "leases",
        "load_errors",
        "load_started",
        "ref",
        "restored",
        "restored_weak",
        "storage_id",
        "streams",
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
        # Streams that it was saved or given out on, and may be read on: the allocator was told of them.
        self.streams: tuple[int, ...] = ()
        self.load_errors: dict[int, BaseException] = {}
        self.load_started = 0  # the last load that was, unless it failed
        # One witness per in-place counter seen, with the counter's value; dead tickets' witnesses stay: a write through
        # any of them changes the content for all.
        self.witnesses: list[tuple[Witness, int]] = []
        self.last_witness: tuple[weakref.ref[Any], Witness] | None = (
            None  # with the owner of its counter
        )

    @property
    def lease(self) -> Storage | None:
        leases = self.leases
        try:
            return leases[-1] if leases else None
        except IndexError:
            return None  # another thread took it


class Ticket:
    """What pack returns for a tensor that may be offloaded.

    ``hold`` owns the engine's ticket; the last one of a storage owns its bytes.
    """

    # ``peak``: where it is an input of a region that was recomputed.
    __slots__ = (
        "_session",
        "entry",
        "hold",
        "id",
        "original",
        "peak",
        "version",
        "view",
        "witness",
    )

    peak: Recomputation

    def __init__(
        self,
        session: object,
        ticket: int,
        hold: TicketHold,
        entry: StorageEntry,
        view: ViewMeta,
        witness: Witness,
        version: int,
        original: weakref.ref[Tensor] | None,
    ) -> None:
        self._session = session  # lives as long as its tickets
        self.original = original  # a tensor whose owner may give it other data
        self.id = ticket
        self.hold = hold
        self.entry = entry
        self.view = view
        self.witness = witness
        self.version = version
