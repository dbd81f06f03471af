"""The least step time that any schedule could reach with so much memory, all of the step known in advance.

A schedule decides which storages are copied out, when, and when they come back. It may

- copy a storage whole from the end of the operation that made it, at most one copy a direction at a time;
- count its memory as free from the end of the copy and of the model's own use until its load begins;
- hold at most ``limit`` bytes of saved storages at any time *of the device*: nothing is lost to an allocator, to the
  host's ignorance of what is done, or to calls that an offloader adds;
- not begin an operation before a host without offloading would issue it, before the one before it is done, or
  before what it reads is there.

The optimum lies between two numbers. ``lower_bound`` is passed by no schedule: the longest path over the starts of
all operations, where besides computing the link separates any two of them. Between the end of operation j, until which
what it uses takes memory, and the start of k,

- what is alive at k, less what existed at j and less the limit, had to leave;
- what existed at j and is used from j to k, less the limit, had to come back.

``best_schedule`` is one that can be run: it copies out what is needed last and keeps the rest, loads in the order of
need as early as memory allows, and tries many amounts. In a step where backward goes backwards that order is the
best for either direction: what is needed last is made first.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from virtual_clock import trace as events
from virtual_clock.roofline import Host, Link
from virtual_clock.trace import Trace

_AMOUNTS = 24


@dataclass(frozen=True)
class Problem:
    trace: Trace
    times: Sequence[float]
    link: Link
    host: Host
    limit: int
    min_bytes: int = 256 << 10  # storages below it stay

    @property
    def turn(self) -> int:
        """The first operation of backward."""
        op = 0
        for kind, _ in self.trace.events:
            if kind == events.BACKWARD:
                break
            op += kind == events.OP
        return op

    def alive_bytes(self) -> np.ndarray:
        """At each operation, without offloading."""
        change = np.zeros(len(self.times) + 1, dtype=np.int64)
        for life, nbytes in zip(self.trace.lives, self.trace.storages, strict=True):
            if life.end >= life.born:
                change[life.born] += nbytes
                change[life.end + 1] -= nbytes
        return np.cumsum(change)[:-1]


def lower_bound(problem: Problem) -> float:
    """Seconds."""
    n = len(problem.times)
    bandwidth = problem.link.bytes_per_s
    born: dict[int, int] = defaultdict(int)  # bytes, by operation
    dead: dict[int, list[int]] = defaultdict(list)  # storages, by the first operation without them
    used: dict[int, list[int]] = defaultdict(list)  # storages, by operation
    lives, storages = problem.trace.lives, problem.trace.storages
    for storage, life in enumerate(lives):
        if life.end < life.born:
            continue
        born[life.born] += storages[storage]
        dead[life.end + 1].append(storage)
        spans = [(life.born, life.let_go), *life.uses]
        for op in sorted({op for begin, end in spans for op in range(begin, end + 1)}):
            used[op].append(storage)
    made = np.zeros(n)  # bytes alive now, by the operation that made them
    apart = np.zeros(n + 1)  # bytes made before j and used from j until now, by j
    last_use = [life.born for life in lives]
    times = np.asarray(problem.times)
    start = np.zeros(n)
    for k in range(n):
        made[k] += born[k]
        for storage in dead[k]:
            made[lives[storage].born] -= storages[storage]
        for storage in used[k]:
            apart[last_use[storage] + 1 : k + 1] += storages[storage]
            last_use[storage] = k
        earliest = problem.host.op_s * (k + 1)
        if k > 0:
            before = np.cumsum(made[:k])
            leaves = before[-1] + made[k] - problem.limit - (before - made[:k])
            comes = apart[:k] - problem.limit
            earliest = max(
                earliest,
                start[k - 1] + times[k - 1],
                float(np.max(start[:k] + times[:k] + leaves / bandwidth)),
                float(np.max(start[:k] + times[:k] + comes / bandwidth)),
            )
        start[k] = earliest
    return float(start[-1] + times[-1])


@dataclass(frozen=True)
class Plan:
    step_s: float
    peak_bytes: int
    moved_bytes: int
    moved_storages: int


def best_schedule(problem: Problem) -> Plan | None:
    """None where no amount tried fits into the limit."""
    movable = [
        storage
        for storage, nbytes in enumerate(problem.trace.storages)
        if nbytes >= problem.min_bytes
    ]
    lives = problem.trace.lives
    by_need = sorted(movable, key=lambda s: (-_first_use(lives[s].uses), lives[s].born))
    sums = np.cumsum([problem.trace.storages[s] for s in by_need])
    excess = int(problem.alive_bytes().max()) - problem.limit
    if excess <= 0:
        return _run(problem, [])
    if not by_need:
        return None
    # From what has to leave at least to everything, closer where it is little.
    most = float(sums[-1])
    shares = np.linspace(0.0, 1.0, _AMOUNTS) ** 2
    counts = {int(np.searchsorted(sums, excess + share * (most - excess))) + 1 for share in shares}
    best: Plan | None = None
    for count in sorted(counts):
        plan = _run(problem, by_need[:count])
        if plan is not None and (best is None or plan.step_s < best.step_s):
            best = plan
    return best


def _first_use(uses: Sequence[tuple[int, int]]) -> float:
    return min((begin for begin, _ in uses), default=math.inf)


class _State(Enum):
    HERE = 0
    LEAVING = 1
    AWAY = 2
    COMING = 3
    DONE = 4  # stays from here on


def _run(problem: Problem, chosen: Sequence[int]) -> Plan | None:
    return _Simulation(problem, chosen).run()


class _Simulation:
    """Everything begins as early as it may. None of it depends on a host."""

    def __init__(self, problem: Problem, chosen: Sequence[int]) -> None:
        self._problem = problem
        self._lives = problem.trace.lives
        self._nbytes = problem.trace.storages
        self._held = problem.alive_bytes()  # at each operation, if no copy begins from now on
        self._state = dict.fromkeys(chosen, _State.HERE)
        self._first = {s: _first_use(self._lives[s].uses) for s in chosen}
        self._needs: dict[int, list[int]] = defaultdict(list)
        for s in chosen:
            if self._first[s] < math.inf:
                self._needs[int(self._first[s])].append(s)
        self._to_leave = sorted(chosen, key=lambda s: self._lives[s].born)
        self._to_come = sorted(
            (s for s in chosen if self._first[s] < math.inf),
            key=lambda s: (self._first[s], -self._lives[s].born),
        )
        self._events: list[tuple[float, int, str, int]] = []
        self._op = 0  # running, or next
        self._running = False
        self._leaving = self._coming = False
        self._turn = problem.turn
        self._wake = -1
        self.peak = 0
        self.moved: list[int] = []

    def run(self) -> Plan | None:
        n = len(self._problem.times)
        now = end = 0.0
        while True:
            while self._begin_leaving(now) or self._begin_coming(now) or self._begin_op(now):
                pass
            if self._op == n:
                break
            if not self._events:
                return None  # the next operation never gets its memory
            now, _, kind, index = heapq.heappop(self._events)
            if kind == "op":
                self._running = False
                self._op += 1
                end = now
            elif kind == "left":
                self._leaving = False
                self._left(index)
            elif kind == "came":
                self._coming = False
                self._state[index] = _State.DONE
        moved = sum(self._nbytes[s] for s in self.moved)
        return Plan(end, self.peak, moved, len(self.moved))

    def _push(self, time: float, kind: str, index: int) -> None:
        heapq.heappush(self._events, (time, len(self._events), kind, index))

    def _begin_op(self, now: float) -> bool:
        op, problem = self._op, self._problem
        if self._running or op == len(problem.times):
            return False
        issued = problem.host.op_s * (op + 1)
        if now < issued:
            if self._wake != op:
                self._wake = op
                self._push(issued, "wake", op)
            return False
        if self._held[op] > problem.limit:
            return False
        if any(self._state[s] in (_State.AWAY, _State.COMING) for s in self._needs[op]):
            return False
        for s in self._needs[op]:
            if self._state[s] is _State.HERE:
                self._state[s] = _State.DONE
        self._running = True
        self.peak = max(self.peak, int(self._held[op]))
        self._push(now + problem.times[op], "op", op)
        return True

    def _begin_leaving(self, now: float) -> bool:
        if self._leaving:
            return False
        while self._to_leave and self._state[self._to_leave[0]] is not _State.HERE:
            self._to_leave.pop(0)
        if not self._to_leave or self._lives[self._to_leave[0]].born >= self._op:
            return False
        storage = self._to_leave.pop(0)
        self._state[storage] = _State.LEAVING
        self._leaving = True
        self._push(now + self._problem.link.seconds(self._nbytes[storage]), "left", storage)
        return True

    def _left(self, storage: int) -> None:
        if self._first[storage] <= self._op:
            self._state[storage] = _State.DONE
            return
        self._state[storage] = _State.AWAY
        self.moved.append(storage)
        life = self._lives[storage]
        self._held[max(self._op, life.let_go + 1) : life.end + 1] -= self._nbytes[storage]

    def _begin_coming(self, now: float) -> bool:
        if self._coming or self._op < self._turn:
            return False
        while self._to_come and self._state[self._to_come[0]] is _State.DONE:
            self._to_come.pop(0)
        storage = next((s for s in self._to_come if self._state[s] is _State.AWAY), None)
        if storage is None:
            return False
        nbytes, end = self._nbytes[storage], self._lives[storage].end
        if int(self._held[self._op : end + 1].max()) + nbytes > self._problem.limit:
            return False
        self._to_come.remove(storage)
        self._held[self._op : end + 1] += nbytes
        self.peak = max(self.peak, int(self._held[self._op]))
        self._state[storage] = _State.COMING
        self._coming = True
        self._push(now + self._problem.link.seconds(nbytes), "came", storage)
        return True
