from __future__ import annotations

import pytest
from steps import FREE_HOST, anything, chain
from virtual_clock import trace as events
from virtual_clock.optimum import Problem, best_schedule, lower_bound
from virtual_clock.roofline import Host, Link
from virtual_clock.schedules import CopyAtPack, Schedule
from virtual_clock.trace import Event


def problem(sizes: list[int], link: Link, limit: int) -> Problem:
    trace, times = chain(sizes)
    return Problem(trace, times, link, FREE_HOST, limit, min_bytes=0)


def test_with_memory_for_everything_nothing_moves() -> None:
    found = problem([10, 10, 10], Link(5.0, 0.0), limit=30)
    best = best_schedule(found)
    assert best is not None
    assert (best.step_s, best.moved_bytes, best.peak_bytes) == (6.0, 0, 30)
    assert lower_bound(found) == 6.0


def test_memory_for_two_of_three() -> None:
    """Out 1 to 3, so forward ends at 4; one is free at 5, in 5 to 7, and backward ends at 8."""
    found = problem([10, 10, 10], Link(5.0, 0.0), limit=20)
    best = best_schedule(found)
    assert best is not None
    assert (best.step_s, best.moved_bytes, best.peak_bytes) == (8.0, 10, 20)
    # The load begins when the first operation of backward has let go of its memory, in the bound too.
    assert lower_bound(found) == 8.0


def test_the_link_alone_decides_where_it_is_slow() -> None:
    """Out 30 bytes from 1 on, in 30 bytes after backward's first operation has freed room, and what is at the ends."""
    found = problem([10] * 5, Link(1.0, 0.0), limit=20)
    assert lower_bound(found) == 1 + 30 + 1 + 1 + 30 + 1
    best = best_schedule(found)
    assert best is not None
    assert best.step_s == pytest.approx(lower_bound(found))


def test_a_fast_link_hides_everything() -> None:
    found = problem([10] * 5, Link(10.0, 0.0), limit=20)
    best = best_schedule(found)
    assert best is not None
    assert best.step_s == lower_bound(found) == 10.0


def test_copies_are_not_shorter_than_they_can_be() -> None:
    best = best_schedule(problem([10, 10, 10], Link(5.0, copy_s=1.0), limit=20))
    assert best is not None
    assert best.step_s == 10.0  # out 1 to 4, in 6 to 9


def test_no_schedule_fits() -> None:
    assert best_schedule(problem([10, 10], Link(5.0, 0.0), limit=9)) is None


def test_what_the_model_still_uses_is_not_free() -> None:
    trace, times = chain([10, 10, 10])
    for storage in (0, 1):
        held = Event(events.LET_GO, storage)
        trace.events.remove(held)
        trace.events.insert(trace.events.index(Event(events.BACKWARD, 0)), held)
    assert best_schedule(Problem(trace, times, Link(1e9, 0.0), FREE_HOST, 29, min_bytes=0)) is None
    assert best_schedule(Problem(trace, times, Link(1e9, 0.0), FREE_HOST, 30, min_bytes=0))


def test_no_operation_begins_before_a_host_issues_it() -> None:
    trace, times = chain([10, 10])
    found = Problem(trace, times, Link(5.0, 0.0), Host(op_s=3.0), 20, min_bytes=0)
    best = best_schedule(found)
    assert best is not None
    assert best.step_s == lower_bound(found) == 4 * 3.0 + 1.0


@pytest.mark.parametrize("seed", range(60))
def test_no_schedule_passes_the_bound(seed: int) -> None:
    trace, times = anything(seed)
    link = Link(5.0 + seed % 7 * 10, copy_s=0.1)
    none = Schedule(trace, times, link, FREE_HOST).run()
    for by_storage in (False, True):
        naive = CopyAtPack(trace, times, link, FREE_HOST, by_storage=by_storage, min_bytes=0).run()
        for limit in {naive.device_peak_bytes, none.device_peak_bytes}:
            found = Problem(trace, times, link, FREE_HOST, limit, min_bytes=0)
            bound = lower_bound(found)
            if limit == naive.device_peak_bytes:
                assert bound <= naive.step_s + 1e-9
            best = best_schedule(found)
            if best is not None:
                assert bound <= best.step_s + 1e-9
                assert best.peak_bytes <= limit
    # And within what a tighter limit leaves.
    for share in (0.5, 0.7, 0.9):
        limit = int(none.device_peak_bytes * share)
        found = Problem(trace, times, link, FREE_HOST, limit, min_bytes=0)
        best = best_schedule(found)
        if best is not None:
            assert lower_bound(found) <= best.step_s + 1e-9
            assert best.peak_bytes <= limit
