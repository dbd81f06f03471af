"""Runs a trace on the virtual machine, by the rules that offloading is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from virtual_clock import trace as events
from virtual_clock.clock import Block, Copy, Machine
from virtual_clock.roofline import Host, Link
from virtual_clock.trace import Trace


@dataclass(frozen=True)
class Result:
    """Of one step; seconds and bytes."""

    step_s: float
    peak_bytes: int  # of saved storages, as an allocator counts
    device_peak_bytes: int  # as the device uses them
    busy_s: float = 0.0  # of compute
    exposed_s: float = 0.0
    host_late_s: float = 0.0
    d2h_bytes: int = 0
    d2h_copies: int = 0
    d2h_busy_s: float = 0.0
    h2d_bytes: int = 0
    h2d_copies: int = 0
    h2d_busy_s: float = 0.0


class Schedule:
    """No offloading: autograd holds what it saved. Others change what saves and unpacks do."""

    def __init__(
        self, trace: Trace, times: Sequence[float], link: Link, host: Host | None = None
    ) -> None:
        self.trace = trace
        self.times = times
        self.machine = Machine(link, host or Host())
        self.blocks: dict[int, Block] = {}  # as the model made them; by storage
        self._new: list[Block] = []

    def run(self) -> Result:
        steps = {
            events.OP: self.op,
            events.BORN: self.born,
            events.LET_GO: self.let_go,
            events.SAVE: self.save,
            events.UNPACK: self.unpack,
            events.UNUSED: self.unused,
            events.DROP: self.drop,
            events.BEGIN_GROUP: self.begin_group,
            events.END_GROUP: self.end_group,
            events.BACKWARD: self.backward,
        }
        self.start()
        for kind, index in self.trace.events:
            steps[kind](index)
        self.finish()
        machine = self.machine
        machine.memory.settle(float("inf"))
        if machine.memory.nbytes:
            raise AssertionError(f"{machine.memory.nbytes} bytes were never let go of")
        return Result(
            step_s=machine.compute_end,
            peak_bytes=machine.memory.peak,
            device_peak_bytes=machine.memory.device_peak(),
            busy_s=machine.busy_s,
            exposed_s=machine.exposed_s,
            host_late_s=machine.host_late_s,
            d2h_bytes=machine.d2h.nbytes,
            d2h_copies=machine.d2h.copies,
            d2h_busy_s=machine.d2h.busy_s,
            h2d_bytes=machine.h2d.nbytes,
            h2d_copies=machine.h2d.copies,
            h2d_busy_s=machine.h2d.busy_s,
        )

    # --- what the model does

    def op(self, index: int) -> None:
        start = self.machine.op(self.times[index])
        for block in self._new:
            block.start = start
        self._new.clear()

    def born(self, storage: int) -> None:
        block = self.machine.memory.allocate(self.trace.storages[storage], self.machine.now)
        self.blocks[storage] = block
        self._new.append(block)

    def let_go(self, storage: int) -> None:
        self.release(self.blocks[storage])

    # --- what autograd does

    def save(self, ticket: int) -> None:
        self.block_of(ticket).holders += 1

    def unpack(self, ticket: int) -> None:
        self.block_of(ticket).holders += 1

    def unused(self, ticket: int) -> None:
        self.release(self.block_of(ticket))

    def drop(self, ticket: int) -> None:
        self.release(self.block_of(ticket))

    # --- what schedules may want to know

    def start(self) -> None: ...
    def finish(self) -> None: ...
    def begin_group(self, label: int) -> None: ...
    def end_group(self, label: int) -> None: ...
    def backward(self, _: int) -> None: ...

    # --- helpers

    def storage_of(self, ticket: int) -> int:
        return self.trace.tickets[ticket].storage

    def block_of(self, ticket: int) -> Block:
        return self.blocks[self.storage_of(ticket)]

    def nbytes_of(self, ticket: int) -> int:
        """Of the saved view, an expanded dimension counted once."""
        view = self.trace.views[self.trace.tickets[ticket].view]
        elements = 1
        for size, stride in zip(view.sizes, view.strides, strict=True):
            elements *= size if stride else min(size, 1)
        return elements * view.itemsize

    def release(self, block: Block) -> None:
        machine = self.machine
        machine.memory.drop(block, machine.now, machine.event())

    def new_block(self, nbytes: int) -> Block:
        return self.machine.memory.allocate(nbytes, self.machine.now)


class SaveOnCpu(Schedule):
    """``torch.autograd.graph.save_on_cpu(pin_memory=True)``, its host memory for nothing: every saved tensor on its own.

    It copies on the compute stream; the host waits for the copies out.
    """

    def __init__(
        self, trace: Trace, times: Sequence[float], link: Link, host: Host | None = None
    ) -> None:
        super().__init__(trace, times, link, host)
        self._unpacked: dict[int, Block] = {}

    def save(self, ticket: int) -> None:
        machine = self.machine
        machine.now += machine.host.pack_s
        copy = machine.copy_on_compute(self.nbytes_of(ticket), machine.d2h)
        machine.block_host(copy.end)

    def unpack(self, ticket: int) -> None:
        machine = self.machine
        machine.now += machine.host.unpack_s
        block = self._unpacked[ticket] = self.new_block(self.nbytes_of(ticket))
        block.start = machine.copy_on_compute(block.nbytes, machine.h2d).start

    def unused(self, ticket: int) -> None:
        self.release(self._unpacked.pop(ticket))

    def drop(self, ticket: int) -> None: ...


class CopyAtPack(Schedule):
    """The usual hooks with a side stream: copied when saved, loaded when asked for.

    Memory goes when the host, at a later save or unpack, sees that the copy is done. Every saved tensor on its own, from
    ``min_bytes`` of storage on; with ``by_storage``, every storage once, loaded until its last ticket is dropped.
    """

    def __init__(
        self,
        trace: Trace,
        times: Sequence[float],
        link: Link,
        host: Host | None = None,
        *,
        by_storage: bool = False,
        min_bytes: int = 256 << 10,
    ) -> None:
        super().__init__(trace, times, link, host)
        self._by_storage = by_storage
        self._min_bytes = min_bytes
        self._running: list[tuple[float, Block]] = []
        self._copies: dict[int, Copy] = {}
        self._loaded: dict[int, Block] = {}
        self._tickets: dict[int, int] = {}  # not dropped, by storage

    def _key(self, ticket: int) -> int:
        return self.storage_of(ticket) if self._by_storage else ticket

    def _stays(self, ticket: int) -> bool:
        return self.trace.storages[self.storage_of(ticket)] < self._min_bytes

    def save(self, ticket: int) -> None:
        machine = self.machine
        machine.now += machine.host.pack_s
        self._poll()
        if self._stays(ticket):
            super().save(ticket)
            return
        key = self._key(ticket)
        self._tickets[key] = self._tickets.get(key, 0) + 1
        if key in self._copies:
            return
        block = self.block_of(ticket)
        nbytes = block.nbytes if self._by_storage else self.nbytes_of(ticket)
        copy = machine.copy_out(nbytes, [machine.event()])
        block.holders += 1
        block.busy_until = max(block.busy_until, copy.end)
        self._copies[key] = copy
        self._running.append((copy.end, block))

    def unpack(self, ticket: int) -> None:
        machine = self.machine
        machine.now += machine.host.unpack_s
        self._poll()
        if self._stays(ticket):
            super().unpack(ticket)
            return
        key = self._key(ticket)
        block = self._loaded.get(key)
        if block is None:
            whole = self.trace.storages[self.storage_of(ticket)]
            block = self.new_block(whole if self._by_storage else self.nbytes_of(ticket))
            copy = machine.copy_in(block.nbytes, [machine.event(), self._copies[key].end])
            block.start = copy.start
            machine.wait_on_compute(copy.end)
            self._loaded[key] = block
        block.holders += 1

    def unused(self, ticket: int) -> None:
        if self._stays(ticket):
            super().unused(ticket)
        else:
            self.release(self._loaded[self._key(ticket)])

    def drop(self, ticket: int) -> None:
        if self._stays(ticket):
            super().drop(ticket)
            return
        key = self._key(ticket)
        self._tickets[key] -= 1
        if self._tickets[key] == 0 and key in self._loaded:
            self.release(self._loaded[key])

    def _poll(self) -> None:
        while self._running and self._running[0][0] <= self.machine.now:
            self.release(self._running.pop(0)[1])

    def finish(self) -> None:
        self.machine.block_host(self._running[-1][0] if self._running else 0.0)
        self._poll()
