"""Where the device's peak sits in a recomputation, the report says so; on the CPU it never does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import DEVICE
from torch import nn
from torch_support import end_backward

import ebbtide.hyper_parallel as hp
from ebbtide.torch import recompute

ROWS, WIDTH, SINES, COPIES = 64, 64, 8, 8
NBYTES = 4 * ROWS * WIDTH
LINE = "device peak: in the recomputation of a checkpointed region ("

tells = pytest.mark.skipif(DEVICE == "cpu", reason="the CPU's allocator does not count")


class Deep(nn.Module):
    """Saves a tensor per sine, then needs room for a while that its backward does not need."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(SINES):
            x = x.sin()
        scale = x.detach().repeat(COPIES, 1).amax()
        return (x * scale).sin()


class Small(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin().cos()


@pytest.fixture(autouse=True)
def own_peak(backend: Any) -> Iterator[None]:
    if DEVICE != "cpu":
        end_backward()
        torch.accelerator.reset_peak_memory_stats()
    yield


def make() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, requires_grad=True)


def train(region: Callable[..., Any], x: torch.Tensor, copies: int = 1) -> None:
    """The region twice, and behind it as many copies that nobody offloads, each saved by an exp."""
    y = region(region(x))
    y.repeat(copies, 1).exp().sum().backward()
    end_backward()


def line() -> str:
    """The report's, as one."""
    text = hp.report()
    assert max(map(len, text.splitlines())) <= 100
    text = " ".join(text.split())
    begin = text.find(LINE)
    return "" if begin < 0 else text[begin:]


def raise_the_peak() -> None:
    """Somewhere outside of regions."""
    above = torch.accelerator.max_memory_allocated() - torch.accelerator.memory_allocated()
    torch.empty(above + 64 * NBYTES, dtype=torch.uint8)


# --- appears


@tells
def test_a_region_that_is_large_inside() -> None:
    train(hp.checkpoint_wrapper(Deep(), swap_inputs=True), make())
    # Held for backward but the region's input, which was there; the product is not saved before it is computed.
    expected = (SINES + COPIES) * NBYTES
    found = line()
    assert found.startswith(f"{LINE}Deep on device 0), ")
    number, unit = found.split("), ")[1].split(" ")[:2]
    nbytes = float(number) * {"KiB": 2**10, "MiB": 2**20}[unit]
    assert expected <= nbytes <= expected + NBYTES, found
    assert found.endswith(
        "above what was allocated when that began: more offload does not lower these"
    )


@tells
def test_a_function_goes_by_its_name_and_a_group_by_its_own() -> None:
    inner = Deep()

    def expanded(x: torch.Tensor) -> torch.Tensor:
        return inner(x)

    train(lambda x: hp.checkpoint(expanded, x), make())
    assert "expanded on device 0)" in line()
    torch.accelerator.reset_peak_memory_stats()
    with hp.SwapManager().group_context("stage 0"):
        train(lambda x: hp.checkpoint(expanded, x), make())
    assert line().startswith(f"{LINE}stage 0 on device 0)")


@tells
def test_it_stays_while_no_peak_is_reached_elsewhere() -> None:
    region = hp.checkpoint_wrapper(Deep())
    train(region, make())
    first = line()
    assert first
    train(hp.checkpoint_wrapper(Small()), make())
    assert line() == line() == first


@tells
def test_a_recomputation_that_fails_counts() -> None:
    calls = []

    def failing(x: torch.Tensor) -> torch.Tensor:
        y = Deep()(x)
        calls.append(1)
        if len(calls) > 1:
            torch.empty(COPIES * SINES * NBYTES, dtype=torch.uint8)
            raise ArithmeticError("the second time")
        return y.sin()

    loss = hp.checkpoint(failing, make(), early_stop=False).sum()
    with pytest.raises(ArithmeticError, match="the second time"):
        loss.backward()
    assert "failing on device 0)" in line()


# --- does not appear


def test_small_regions_and_large_outputs() -> None:
    train(hp.checkpoint_wrapper(Small()), make(), copies=32)
    assert not line()


def test_never_on_the_cpu() -> None:
    region = hp.checkpoint_wrapper(Deep())
    with torch.device("cpu"):
        for _ in range(2):
            x = make()
            assert x.is_cpu
            train(region, x)
            assert not line()


def test_the_backward_behind_a_recomputation_is_another_place() -> None:
    def sines(x: torch.Tensor) -> torch.Tensor:
        for _ in range(SINES):
            x = x.sin()
        return x

    train(lambda x: hp.checkpoint(sines, x), make())
    assert not line()


@pytest.mark.parametrize("missing", ["_statistics", "_is_in_use"])
def test_a_torch_that_does_not_tell(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setattr(recompute, missing, None)
    train(hp.checkpoint_wrapper(Deep()), make())
    assert not line()


# --- disappears


@tells
def test_a_later_forward_raises_the_peak() -> None:
    train(hp.checkpoint_wrapper(Deep()), make())
    assert line()
    raise_the_peak()
    assert not line()


@tells
def test_a_peak_elsewhere_is_seen_when_a_recomputation_begins() -> None:
    region = hp.checkpoint_wrapper(Deep())
    train(region, make())
    raise_the_peak()
    train(region, make())
    assert not line()


@tells
def test_the_users_reset() -> None:
    region = hp.checkpoint_wrapper(Deep())
    train(region, make())
    assert line()
    torch.accelerator.reset_peak_memory_stats()
    assert not line()
    train(region, make())
    assert line()


@tells
def test_an_equal_peak_elsewhere_after_a_reset() -> None:
    train(hp.checkpoint_wrapper(Deep()), make())
    assert line()
    peak = torch.accelerator.max_memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    train(hp.checkpoint_wrapper(Small()), make())
    above = peak - torch.accelerator.memory_allocated()
    torch.empty(above, dtype=torch.uint8)
    assert torch.accelerator.max_memory_allocated() == peak
    assert not line()


# --- what it costs


@tells
def test_the_users_peak_is_left_alone() -> None:
    raise_the_peak()
    before = torch.accelerator.max_memory_allocated()
    train(hp.checkpoint_wrapper(Small()), make())
    assert not line()
    assert torch.accelerator.max_memory_allocated() == before


@tells
def test_two_looks_a_recomputation_and_none_in_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, statistics = [], recompute._statistics

    def counted(device: int) -> Any:
        looks.append(device)
        return statistics(device)

    monkeypatch.setattr(recompute, "_statistics", counted)
    region = hp.checkpoint_wrapper(Deep())
    y = region(region(make()))
    assert looks == []
    y.sum().backward()
    end_backward()
    assert looks == [0] * 4


# --- several devices


@tells
def test_each_device_has_its_own_peak() -> None:
    torch.accelerator.reset_peak_memory_stats(1)
    region = hp.checkpoint_wrapper(Deep())
    with torch.device(f"{DEVICE}:1"):
        train(region, make())
    assert f"{LINE}Deep on device 1)" in line() and "on device 0)" not in line()
    train(region, make())
    assert "on device 0)" in line() and "on device 1)" in line()
    torch.accelerator.reset_peak_memory_stats(1)
    assert "on device 0)" in line() and "on device 1)" not in line()
