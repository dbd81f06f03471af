"""Two operations of forward, two of backward, a second each; every storage crosses in two seconds."""

from __future__ import annotations

from steps import FREE_HOST, chain
from virtual_clock import trace as events
from virtual_clock.roofline import Link
from virtual_clock.schedules import CopyAtPack, SaveOnCpu, Schedule
from virtual_clock.trace import Event, Ticket

LINK = Link(10.0, copy_s=1.0)


def test_no_offload() -> None:
    trace, times = chain([10, 10])
    result = Schedule(trace, times, LINK, FREE_HOST).run()
    assert result.step_s == 4.0
    assert (result.peak_bytes, result.device_peak_bytes) == (20, 20)
    assert (result.d2h_bytes, result.h2d_bytes, result.exposed_s) == (0, 0, 0.0)


def test_save_on_cpu() -> None:
    trace, times = chain([10, 10])
    result = SaveOnCpu(trace, times, LINK, FREE_HOST).run()
    assert result.step_s == 4 * 1.0 + 4 * 2.0
    assert result.exposed_s == 8.0
    assert result.peak_bytes == 10


def test_copy_at_pack() -> None:
    trace, times = chain([10, 10])
    result = CopyAtPack(trace, times, LINK, FREE_HOST, min_bytes=0).run()
    # Out: 1 to 3, 3 to 5. The first load waits for its copy out, 5 to 7; the second is issued at once, but may use its
    # memory only after the operation before, 8 to 10.
    assert result.step_s == 11.0
    assert result.exposed_s == 3.0 + 2.0 + 2.0
    assert (result.d2h_busy_s, result.h2d_busy_s) == (4.0, 4.0)
    # Seen done by a host that never waits: nothing was free before backward.
    assert result.peak_bytes == 40 - 10


def test_small_storages_stay() -> None:
    trace, times = chain([10, 10])
    result = CopyAtPack(trace, times, LINK, FREE_HOST, min_bytes=11).run()
    assert (result.step_s, result.peak_bytes, result.d2h_bytes) == (4.0, 20, 0)


def test_by_storage_moves_duplicates_once() -> None:
    trace, times = chain([10, 10])
    trace.tickets.append(Ticket(0, 0, 0))
    save = trace.events.index(Event(events.SAVE, 0))
    trace.events.insert(save, Event(events.SAVE, 2))
    for kind in (events.UNPACK, events.UNUSED, events.DROP):
        place = trace.events.index(Event(kind, 0))
        trace.events.insert(place, Event(kind, 2))
    trace.check()
    by_tensor = CopyAtPack(trace, times, LINK, FREE_HOST, min_bytes=0).run()
    by_storage = CopyAtPack(trace, times, LINK, FREE_HOST, min_bytes=0, by_storage=True).run()
    assert (by_tensor.d2h_copies, by_tensor.h2d_copies) == (3, 3)
    assert (by_storage.d2h_copies, by_storage.h2d_copies) == (2, 2)
