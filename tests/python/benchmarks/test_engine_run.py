from __future__ import annotations

import pytest
from steps import FREE_HOST, anything, chain
from virtual_clock.engine_run import EngineSchedule, Options
from virtual_clock.optimum import Problem, lower_bound
from virtual_clock.roofline import Link

ALL = Options(min_bytes=0, in_flight_bytes=0)


def test_a_fast_link_costs_nothing_and_the_last_group_stays() -> None:
    trace, times = chain([10] * 6, groups=True)
    schedule = EngineSchedule(trace, times, Link(1e9, 0.0), FREE_HOST, ALL)
    result = schedule.run()
    assert result.step_s == pytest.approx(12.0, abs=1e-6)
    assert (result.d2h_bytes, result.h2d_bytes) == (50, 50)
    stats = schedule.engine.stats()
    assert (stats.d2h_bytes, stats.h2d_bytes, stats.kept["last"]) == (50, 50, 1)
    # In use, and the one before: on the device never more.
    assert result.device_peak_bytes == 20


def test_a_link_slower_than_compute_is_never_idle() -> None:
    """Two seconds a storage: the last of five goes out at 11, and the link comes back for ten more."""
    trace, times = chain([10] * 6, groups=True)
    result = EngineSchedule(trace, times, Link(5.0, 0.0), FREE_HOST, ALL).run()
    assert result.d2h_busy_s == pytest.approx(10.0)
    assert result.h2d_busy_s <= 10.0
    assert result.step_s <= 1 + 10 + 10 + 1 + 1


def test_a_load_waits_for_the_copy_out_and_compute_for_the_load() -> None:
    """Out 1 to 3, asked for ahead at 2, in 3 to 5, used 5 to 6."""
    trace, times = chain([10, 10], groups=True)
    result = EngineSchedule(trace, times, Link(5.0, 0.0), FREE_HOST, ALL).run()
    assert (result.step_s, result.exposed_s) == (6.0, 2.0)


def test_small_storages_are_kept() -> None:
    trace, times = chain([10] * 3, groups=True)
    schedule = EngineSchedule(trace, times, Link(5.0, 0.0), FREE_HOST, Options(min_bytes=11))
    result = schedule.run()
    assert (result.step_s, result.d2h_bytes, result.peak_bytes) == (6.0, 0, 30)
    assert schedule.engine.stats().kept["small"] == 3


def test_without_groups_bytes_decide() -> None:
    trace, times = chain([10] * 6, groups=True)
    options = Options(
        groups=False, min_bytes=0, keep_last_bytes=20, prefetch_bytes=10, in_flight_bytes=0
    )
    result = EngineSchedule(trace, times, Link(1e9, 0.0), FREE_HOST, options).run()
    assert (result.d2h_bytes, result.h2d_bytes) == (40, 40)


@pytest.mark.parametrize("seed", range(40))
def test_the_engine_does_not_pass_the_bound(seed: int) -> None:
    """And leaves nothing behind, which the schedule itself checks."""
    trace, times = anything(seed)
    link = Link(5.0 + seed % 7 * 10, copy_s=0.1)
    options = Options(
        min_bytes=0,
        keep_last_bytes=seed % 3 * 20,
        prefetch_bytes=seed % 5 * 20,
        in_flight_bytes=seed % 2 * 1000,
    )
    result = EngineSchedule(trace, times, link, FREE_HOST, options).run()
    found = Problem(trace, times, link, FREE_HOST, result.device_peak_bytes, min_bytes=0)
    assert lower_bound(found) <= result.step_s + 1e-9
    assert result.device_peak_bytes <= result.peak_bytes
