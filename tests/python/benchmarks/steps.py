"""Small steps of which every time is known by hand: one storage for each operation of forward, backward in reverse."""

from __future__ import annotations

import random

from virtual_clock import trace as events
from virtual_clock.roofline import Host
from virtual_clock.trace import Event, Op, Ticket, Trace, View

FREE_HOST = Host(op_s=0.0, pack_s=0.0, unpack_s=0.0, copy_s=0.0)


def chain(sizes: list[int], groups: bool = False) -> tuple[Trace, list[float]]:
    """Forward operation i makes and saves storage i of `sizes[i]` bytes, backward needs them from the last to the first.

    The model lets go of a storage as soon as it is saved. Every operation takes one second.
    """
    n = len(sizes)
    trace = Trace("chain", names=["op", *(f"block {i}" for i in range(n))], storages=list(sizes))
    trace.views = [View(0, 1, (size,), (1,)) for size in sizes]
    trace.tickets = [Ticket(i, i, 0) for i in range(n)]
    trace.ops = [Op(0, 0, 0, 0, "float32")] * (2 * n)
    for i in range(n):
        if groups:
            trace.events.append(Event(events.BEGIN_GROUP, i + 1))
        trace.events += [
            Event(events.BORN, i),
            Event(events.OP, i),
            Event(events.SAVE, i),
            Event(events.LET_GO, i),
        ]
        if groups:
            trace.events.append(Event(events.END_GROUP, i + 1))
    trace.events.append(Event(events.BACKWARD, 0))
    for i in reversed(range(n)):
        trace.events += [
            Event(events.UNPACK, i),
            Event(events.OP, 2 * n - 1 - i),
            Event(events.UNUSED, i),
            Event(events.DROP, i),
        ]
    trace.check()
    return trace, [1.0] * (2 * n)


def anything(seed: int) -> tuple[Trace, list[float]]:
    """Storages of any size, held by the model for a while, saved several times, needed in nearly reverse order."""
    chance = random.Random(seed)
    n = chance.randint(2, 12)
    trace = Trace("anything", names=["op"], storages=[chance.randint(1, 40) for _ in range(n)])
    held: list[int] = []
    for i in range(n):
        trace.events += [Event(events.BORN, i), Event(events.OP, len(trace.ops))]
        trace.ops.append(Op(0, 0, 0, 0, "float32"))
        held.append(i)
        for storage in held:
            for _ in range(chance.choice((0, 1, 1, 2)) if storage != i else 1):
                trace.events.append(Event(events.SAVE, len(trace.tickets)))
                trace.tickets.append(Ticket(storage, len(trace.views), 0))
                trace.views.append(View(0, 1, (trace.storages[storage],), (1,)))
        while held and (chance.random() < 0.6 or i == n - 1):
            trace.events.append(Event(events.LET_GO, held.pop(0)))
    trace.events.append(Event(events.BACKWARD, 0))
    order = list(reversed(range(len(trace.tickets))))
    for _ in range(chance.randint(0, 3)):
        i, j = chance.choice(order), chance.choice(order)
        order[i], order[j] = order[j], order[i]
    for ticket in order:
        trace.events += [Event(events.UNPACK, ticket), Event(events.OP, len(trace.ops))]
        trace.ops.append(Op(0, 0, 0, 0, "float32"))
        trace.events += [Event(events.UNUSED, ticket), Event(events.DROP, ticket)]
    trace.check()
    return trace, [chance.uniform(0.0, 3.0) for _ in trace.ops]
