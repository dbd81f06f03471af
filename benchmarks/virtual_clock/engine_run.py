"""Ebbtide on the virtual clock: its engine decides everything; this session runs commands and answers probes.

Nothing is read or written: the host memory that the engine hands out consists of addresses alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ebbtide import _core
from ebbtide._core import CommandKind, Hop, KeepReason, RestoreOutcome, Tier
from virtual_clock.clock import Block
from virtual_clock.roofline import Host, Link
from virtual_clock.schedules import Schedule
from virtual_clock.trace import Trace

_DEVICE = 0
_COMPUTE = 1  # the stream of compute, as the engine knows it
_PASS = 1
_ADDRESSES = 1 << 40  # between two allocations
_NO_LIMIT = (1 << 64) - 1


@dataclass(frozen=True)
class Options:
    """What a user with a model gets by default."""

    groups: bool = True
    min_bytes: int = 256 << 10
    keep_last_bytes: int = 128 << 20  # where there are no groups
    keep_last_groups: int | None = 1
    prefetch_bytes: int = 256 << 20  # where there are no groups
    prefetch_groups: int | None = 1
    in_flight_bytes: int = 1 << 30
    pack_below_bytes: int = 0


@dataclass
class _Item:
    """The session's side of an entry."""

    source: Block
    leases: list[Block] = field(default_factory=list)
    arriving: Block | None = None
    restored: dict[int, Block] = field(default_factory=dict)  # by the copy that fills it
    latest: Block | None = None  # not held


@dataclass
class _Running:
    end: float
    storages: list[int]
    offload: bool


class EngineSchedule(Schedule):
    def __init__(
        self,
        trace: Trace,
        times: Sequence[float],
        link: Link,
        host: Host | None = None,
        options: Options | None = None,
    ) -> None:
        super().__init__(trace, times, link, host)
        options = options or Options()
        self._with_groups = options.groups
        self._min_bytes = options.min_bytes
        self._pool = _core.HostPool.of_added_slabs()
        self.engine = _core.Engine(
            self._pool,
            None,
            min_bytes=options.min_bytes,
            keep_last_bytes=options.keep_last_bytes,
            keep_last_groups=options.keep_last_groups,
            prefetch_bytes=options.prefetch_bytes,
            prefetch_groups=options.prefetch_groups,
            in_flight_bytes=options.in_flight_bytes,
            max_tier_bytes=_NO_LIMIT,
            max_backing_bytes=_NO_LIMIT,
            pack_below_bytes=options.pack_below_bytes,
        )
        self._epoch = 0
        self._groups: list[int] = []
        self._items: dict[int, _Item] = {}
        self._saved: dict[int, tuple[int, int]] = {}  # ticket, storage
        self._unpacked: dict[int, Block] = {}
        self._events: dict[int, float] = {}
        self._copies: dict[int, float] = {}  # when they end
        self._running: dict[int, _Running] = {}
        self._identities = len(trace.storages)
        self._host_addresses = _ADDRESSES
        self._commands = {
            int(CommandKind.PROBE): self._probe,
            int(CommandKind.GATHER): lambda _: self._run(self.engine.gather()),
            int(CommandKind.RECORD): self._record,
            int(CommandKind.COPY): self._copy,
            int(CommandKind.WAIT): self._wait,
            int(CommandKind.ALLOC): self._allocate,
            int(CommandKind.RECORD_STREAM): self._record_stream,
            int(CommandKind.RELEASE_LEASE): self._release_lease,
            int(CommandKind.RELEASE_RESTORED): self._release_restored,
            int(CommandKind.GROW): self._grow,
            int(CommandKind.FORGET): self._forget,
        }

    # --- the step

    def start(self) -> None:
        self._epoch = self.engine.begin_epoch()

    def begin_group(self, label: int) -> None:
        if not self._with_groups:
            return
        self._groups.append(label + 1)
        self._run(self.engine.begin_group(self._epoch, label + 1))

    def end_group(self, label: int) -> None:
        if not self._with_groups:
            return
        self._groups.pop()
        self._run(self.engine.end_group())

    def backward(self, _: int) -> None:
        self._poll()
        self._run(self.engine.end_epoch(self._epoch))

    def finish(self) -> None:
        self._poll()
        self._run(self.engine.end_pass(_PASS))
        while self._running:
            self.machine.block_host(min(running.end for running in self._running.values()))
            self._poll()
        stats = self.engine.stats()
        if stats.entries or stats.device_bytes or stats.tier_bytes:
            raise AssertionError(
                f"left at the end: {stats.entries} entries, {stats.device_bytes} bytes on the device, "
                f"{stats.tier_bytes} in host memory"
            )

    def save(self, ticket: int) -> None:
        machine, trace = self.machine, self.trace
        machine.now += machine.host.pack_s
        self._poll()
        storage, view_index, version = trace.tickets[ticket]
        block = self.blocks[storage]
        if block.nbytes < self._min_bytes:
            self.engine.kept(KeepReason.SMALL, self.nbytes_of(ticket))
            super().save(ticket)
            return
        view = trace.views[view_index]
        verdict = self.engine.save(
            (_DEVICE, storage + 1, (storage + 1) * _ADDRESSES, block.nbytes),
            (view.storage_offset, view.itemsize, 0, view.sizes, view.strides),
            version=version,
            epoch=self._epoch,
            label=self._groups[-1] if self._groups else 0,
            stream=_COMPUTE,
        )
        if verdict.kept:
            super().save(ticket)
            return
        item = self._items.setdefault(verdict.storage, _Item(block))
        if verdict.lease:
            item.leases.append(block)
            block.holders += 1
        self._saved[ticket] = (verdict.ticket, verdict.storage)
        self._run(verdict.commands)

    def unpack(self, ticket: int) -> None:
        machine = self.machine
        machine.now += machine.host.unpack_s
        self._poll()
        if ticket not in self._saved:
            super().unpack(ticket)
            return
        number, storage = self._saved[ticket]
        item = self._items[storage]
        while True:
            live = item.source.holders > 0
            shared = not live and item.latest is not None and item.latest.holders > 0
            verdict = self.engine.restore(number, _PASS, live, shared, _COMPUTE)
            if verdict.outcome != int(RestoreOutcome.PENDING):
                break
            machine.block_host(self._copies[verdict.load])
            self._poll()
        if verdict.outcome == int(RestoreOutcome.LIVE):
            block = item.source
        elif verdict.outcome == int(RestoreOutcome.SHARED):
            assert item.latest is not None
            block = item.latest
        else:
            block = self.new_block(verdict.nbytes)
            block.holders = 0
        block.holders += 1
        self._unpacked[ticket] = block
        if verdict.outcome == int(RestoreOutcome.LOAD):
            self._adopt(storage, verdict.load, block)
        self._run(verdict.commands)

    def unused(self, ticket: int) -> None:
        if ticket in self._unpacked:
            self.release(self._unpacked.pop(ticket))
        else:
            super().unused(ticket)

    def drop(self, ticket: int) -> None:
        saved = self._saved.pop(ticket, None)
        if saved is None:
            super().drop(ticket)
        else:
            self._run(self.engine.drop(saved[0]))

    # --- the engine's commands

    def _run(self, commands: _core.Commands | None) -> None:
        for command in commands or ():
            self._commands[command.kind](command)

    def _poll(self) -> None:
        """Tells the engine of the copies that are done by now."""
        now = self.machine.now
        done = sorted((r.end, copy) for copy, r in self._running.items() if r.end <= now)
        for _, copy in done:
            running = self._running.pop(copy)
            answers = [self._answer(storage) for storage in running.storages if running.offload]
            self._run(self.engine.completed(copy, True, answers))

    def _answer(self, storage: int) -> tuple[int, bool, bool, bool, bool]:
        """Other holders; that they can be told, and that nobody wrote to it."""
        item = self._items.get(storage)
        if item is None or not item.leases:
            return 1 << 32, True, True, True, False
        return item.source.holders - len(item.leases), True, True, True, False

    def _probe(self, command: _core.Command) -> None:
        self._run(self.engine.probed(command.storage, *self._answer(command.storage)))

    def _record(self, command: _core.Command) -> None:
        self._events[command.event] = self.machine.event()

    def _copy(self, command: _core.Command) -> None:
        machine = self.machine
        after = [self._events[event] for event in command.after]
        after += [self._copies[copy] for copy in command.after_copies]
        offload = command.hop == int(Hop.OFFLOAD)
        start, end = float("inf"), 0.0
        for (source, *_), (target, *_), nbytes in command.spans(True):
            if int(Tier.HOST) in (source, target):
                issue = machine.copy_out if offload else machine.copy_in
                copy = issue(nbytes, after)
                start, end = min(start, copy.start), max(end, copy.end)
        self._copies[command.copy] = end
        self._running[command.copy] = _Running(end, command.storages, offload)
        if offload:
            return
        for storage in command.storages:
            item = self._items[storage]
            assert item.arriving is not None
            item.arriving.start = start
            item.restored[command.copy] = item.latest = item.arriving
            item.arriving = None

    def _wait(self, command: _core.Command) -> None:
        if command.stream:
            self.machine.wait_on_compute(self._copies[command.copy])
        else:
            self.machine.block_host(self._copies[command.copy])
            self._poll()

    def _allocate(self, command: _core.Command) -> None:
        self._adopt(command.storage, command.copy, self.new_block(command.nbytes), held=True)

    def _adopt(self, storage: int, load: int, block: Block, held: bool = False) -> None:
        """Memory for a load; the engine's hold on it is the one of `held` memory, or one more."""
        block.holders += not held
        self._items[storage].arriving = block
        self._identities += 1
        identity = self._identities
        self._run(
            self.engine.allocated(
                storage, load, _DEVICE, identity, identity * _ADDRESSES, block.nbytes, _COMPUTE
            )
        )

    def _record_stream(self, command: _core.Command) -> None:
        if command.stream:
            return  # the stream of all memory here
        # The allocator waits for all that is queued on the stream, later copies too.
        block = self._items[command.storage].source
        block.busy_until = self.machine.d2h_end

    def _release_lease(self, command: _core.Command) -> None:
        item = self._items.get(command.storage)
        if item is not None and item.leases:
            self.release(item.leases.pop())

    def _release_restored(self, command: _core.Command) -> None:
        item = self._items.get(command.storage)
        if item is not None and command.copy in item.restored:
            self.release(item.restored.pop(command.copy))

    def _grow(self, command: _core.Command) -> None:
        self._pool.add_slab(self._host_addresses, command.nbytes)
        self._host_addresses += command.nbytes + _ADDRESSES
        self._run(self.engine.grown(True))

    def _forget(self, command: _core.Command) -> None:
        item = self._items.pop(command.storage, None)
        if item is None:
            return
        for block in [*item.leases, *item.restored.values()]:
            self.release(block)
