"""Each edge that stream order needs, taken out: found every time, by wrong values or by the search for races."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

SIZE = 3000  # bytes that are no whole number of pages
REPEATS = 20


def pinned() -> torch.Tensor:
    return torch.full((SIZE,), 7.0).pin_memory()


def main_stream() -> torch.Stream:
    return torch.accelerator.current_stream(0)


def produced(value: float = 1.0) -> torch.Tensor:
    return torch.full((SIZE,), value, device="tide") * 2


# Each scenario is given whether the edge is there, and says whether the values came out right.


def producer_before_d2h(edge: bool) -> bool:
    side, host, x = torch.Stream(device="tide"), pinned(), produced()
    if edge:
        side.wait_stream(main_stream())
    with side:
        host.copy_(x, non_blocking=True)
    side.synchronize()
    return bool((host == 2).all())


def d2h_before_reuse(edge: bool) -> bool:
    side, host, x = torch.Stream(device="tide"), pinned(), produced()
    side.wait_stream(main_stream())
    with side:
        host.copy_(x, non_blocking=True)
    if edge:
        x.record_stream(side)
    del x
    produced(5)
    side.synchronize()
    return bool((host == 2).all())


def d2h_before_write(edge: bool) -> bool:
    side, host, x = torch.Stream(device="tide"), pinned(), produced()
    side.wait_stream(main_stream())
    with side:
        host.copy_(x, non_blocking=True)
    if edge:
        main_stream().wait_stream(side)
    x.zero_()
    side.synchronize()
    return bool((host == 2).all())


def d2h_before_host_read(edge: bool) -> bool:
    host, x = pinned(), produced()
    host.copy_(x, non_blocking=True)
    if edge:
        main_stream().synchronize()
    right = bool((host == 2).all())
    main_stream().synchronize()
    return right


def h2d_before_consumer(edge: bool) -> bool:
    side, host = torch.Stream(device="tide"), pinned()
    x = torch.empty(SIZE, device="tide")
    side.wait_stream(main_stream())
    with side:
        x.copy_(host, non_blocking=True)
    if edge:
        main_stream().wait_event(side.record_event())
    right = bool(((x + 1) == 8).all())
    main_stream().wait_stream(side)
    return right


def allocation_before_h2d(edge: bool) -> bool:
    side, host, old = torch.Stream(device="tide"), pinned(), produced()
    old.add_(1)
    del old
    x = torch.empty(SIZE, device="tide")
    if edge:
        side.wait_stream(main_stream())
    with side:
        x.copy_(host, non_blocking=True)
    main_stream().wait_stream(side)
    return bool((x == 7).all())


def h2d_before_letting_go(edge: bool) -> bool:
    side, host = torch.Stream(device="tide"), pinned()
    x = torch.empty(SIZE, device="tide")
    side.wait_stream(main_stream())
    with side:
        x.copy_(host, non_blocking=True)
    if edge:
        x.record_stream(side)
    del x
    other = produced(5)
    side.synchronize()
    return bool((other == 10).all())


def d2h_before_h2d(edge: bool) -> bool:
    out, back = torch.Stream(device="tide"), torch.Stream(device="tide")
    host, x = pinned(), produced()
    out.wait_stream(main_stream())
    with out:
        host.copy_(x, non_blocking=True)
    y = torch.empty_like(x)
    back.wait_stream(main_stream())
    if edge:
        back.wait_stream(out)
    with back:
        y.copy_(host, non_blocking=True)
    main_stream().wait_stream(back)
    right = bool((y == 2).all())
    torch.accelerator.synchronize()
    return right


def d2h_before_batch_norm(edge: bool) -> bool:
    """The running mean is written although the operator's schema does not say so."""
    side, host = torch.Stream(device="tide"), torch.zeros(3).pin_memory()
    mean, variance, x = (
        torch.zeros(3, device="tide"),
        torch.ones(3, device="tide"),
        produced().view(-1, 3),
    )
    side.wait_stream(main_stream())
    with side:
        host.copy_(mean, non_blocking=True)
    if edge:
        main_stream().wait_stream(side)
    torch.nn.functional.batch_norm(x, mean, variance, training=True)
    side.synchronize()
    return bool((host == 0).all())


def used_on_another_stream(edge: bool) -> bool:
    side, x = torch.Stream(device="tide"), produced()
    if edge:
        side.wait_stream(main_stream())
    with side:
        y = x + 1
    side.synchronize()
    return bool((y.cpu() == 3).all())


BY_VALUE = [
    d2h_before_reuse,
    d2h_before_write,
    d2h_before_host_read,
    h2d_before_consumer,
    d2h_before_h2d,
    d2h_before_batch_norm,
]
BY_RACES = [
    producer_before_d2h,
    d2h_before_reuse,
    d2h_before_write,
    h2d_before_consumer,
    allocation_before_h2d,
    h2d_before_letting_go,
    d2h_before_h2d,
    d2h_before_batch_norm,
    used_on_another_stream,
]
ALL = sorted({*BY_VALUE, *BY_RACES}, key=lambda scenario: scenario.__name__)


@pytest.mark.parametrize("scenario", ALL)
@pytest.mark.parametrize("mode", ["lazy", "worker"])
def test_with_its_edge_all_is_right(
    scenario: Callable[[bool], bool], mode: str, control: ModuleType
) -> None:
    control.options(mode=mode)
    for _ in range(REPEATS):
        assert scenario(True)
    assert control.races() == []


@pytest.mark.parametrize("scenario", BY_VALUE)
def test_a_missing_edge_gives_wrong_values(
    scenario: Callable[[bool], bool], control: ModuleType
) -> None:
    control.set_checking(False)
    try:
        assert [scenario(False) for _ in range(REPEATS)] == [False] * REPEATS
    finally:
        control.set_checking(True)


@pytest.mark.parametrize("scenario", BY_RACES)
@pytest.mark.parametrize("mode", ["lazy", "worker"])
def test_a_missing_edge_is_a_race(
    scenario: Callable[[bool], bool], mode: str, control: ModuleType
) -> None:
    control.options(mode=mode)
    for _ in range(REPEATS):
        control.clear_races()
        scenario(False)
        assert control.races()
        torch.accelerator.synchronize()


def test_a_number_read_by_the_host_is_a_wait(control: ModuleType) -> None:
    side, x = torch.Stream(device="tide"), produced()
    assert x.sum().item() == 2 * SIZE
    with side:
        y = x + 1
    side.synchronize()
    assert (y.cpu() == 3).all()
    assert control.races() == []


def test_host_accesses_of_pinned_memory_are_checked(control: ModuleType) -> None:
    host, x = pinned(), produced()
    host.copy_(x, non_blocking=True)
    control.host_reads(host)
    assert ["copy D2H" in race.first for race in control.races()] == [True]
    control.clear_races()
    main_stream().synchronize()
    control.host_reads(host)
    assert control.races() == []


def test_a_pinned_block_outlives_the_copies_queued_with_it(control: ModuleType) -> None:
    x = torch.empty(SIZE, device="tide")
    for _ in range(REPEATS):
        host = pinned()
        x.copy_(host, non_blocking=True)
        del host
        other = torch.zeros(SIZE).pin_memory()
        assert (x == 7).all()
        del other
    assert control.races() == []
