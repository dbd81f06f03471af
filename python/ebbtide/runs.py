"""Runs: groups whose copies the caller starts, such as the schedule of a pipeline or hooks on a chain of layers."""

from __future__ import annotations

from ebbtide import _core, process
from ebbtide.framework import Framework, Storage, Tensor, Weak
from ebbtide.interrupts import noting_interrupts
from ebbtide.transfers import Transfers


def label_of(name: str, labels: dict[str, int]) -> int:
    """The number, from 1, that the group of this name goes by in the engine."""
    return labels.setdefault(name, len(labels) + 1)


class Runs:
    """The runs of one session. A run is a number; saves name it by ``Saving.run``. Any thread may call any method."""

    def __init__(self, framework: Framework, transfers: Transfers, labels: dict[str, int]) -> None:
        self._framework = framework
        self.transfers = transfers
        self._engine = transfers.engine
        self._labels = labels  # the session's
        self._requested: dict[int, list[Weak]] = {}  # by run
        # Where a weak reference does not keep an identity, what is asked for is held until it is saved or not.
        self._holds = framework.keep_last_storages > 0
        self._held: dict[int, list[Storage]] = {}  # by run

    def open(self, name: str) -> tuple[int, int]:
        """A run through the group of this name: its number, and the label that its statistics go by."""
        process.require_usable("group")
        label = label_of(name, self._labels)
        return self._engine.open_run(label), label

    def request(self, run: int, tensor: Tensor) -> None:
        """The tensor's storage leaves with the run, saved in it so far or later, where only what is asked for does."""
        storage = self._framework.storage(tensor)
        # Until the run is closed, the identity is this storage's.
        self._requested.setdefault(run, []).append(self._framework.weak(storage))
        if self._holds:
            self._held.setdefault(run, []).append(storage)
        self._engine.request(run, self._framework.storage_ref(storage).identity)

    @noting_interrupts
    def offload(self, run: int) -> None:
        """Starts copying out what was saved in the run so far. Waits for nothing but `in_flight_bytes`."""
        process.require_usable("launch_offload")
        self._held.pop(run, None)
        self.transfers.settle()
        self.transfers.run(self._engine.offload_run(run))

    @noting_interrupts
    def let_go(self, run: int) -> None:
        """Ends the leases of what is on its way out: in device order, or by waiting where there are no streams."""
        self.offload(run)  # what others held before
        self.transfers.run(self._engine.let_go_run(run))

    @noting_interrupts
    def load(self, run: int) -> None:
        """Starts bringing the run's storages back. What finds no memory is loaded when it is asked for."""
        process.require_usable("launch_load")
        self.transfers.settle()
        self.transfers.run(self._engine.load_run(run))

    @noting_interrupts
    def await_loads(self, run: int) -> None:
        """What this thread issues from now on comes after the run's loads; without streams, blocks until they are done."""
        process.require_usable("wait_load")
        self.transfers.await_loads(self._engine.loads_of(run), run)

    @noting_interrupts
    def release(self, run: int) -> None:
        """Lets go of what was loaded and not asked for; it can be loaded again."""
        if process.usable():
            self.transfers.run(self._engine.release_run(run))

    @noting_interrupts
    def keep(self, run: int) -> None:
        """What has not left stays on the device; the rest can be loaded."""
        self._held.pop(run, None)
        if process.usable():
            self.transfers.run(self._engine.keep_run(run))

    @noting_interrupts
    def close(self, run: int) -> None:
        """Nothing more is saved in the run or asked of it. Its tickets stay good."""
        self._requested.pop(run, None)
        self._held.pop(run, None)
        if process.usable():
            self.transfers.run(self._engine.close_run(run))

    def state(self, run: int) -> _core.RunState:
        """How many of its storages are where."""
        return self._engine.run_state(run)
