"""The host tier: a hard cap with a fallback, no allocations once warm, few slabs, trimmed on demand."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from descriptors import full_disk
from support import assert_at_rest, assert_loaded
from torch_support import assert_same_bits
from training import (
    assert_step_equal,
    gradients,
    make_input,
    make_model,
    offload,
    raised_text,
    step,
)

import ebbtide.torch as ebb
from ebbtide import process

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture(autouse=True)
def nothing_reserved() -> None:
    """Blocks come from slabs that other tests left, whatever the cap: start without any."""
    ebb.trim()
    assert process.host_pool().reserved_bytes == 0


def test_used() -> None:
    model, x = make_model(), make_input()
    tide = offload(model, to="host")
    with tide:
        loss = model(x).square().mean()
    stats = tide.stats()
    assert stats.host_bytes == stats.d2h_bytes == stats.peak_host_bytes > 0
    assert stats.host_reserved_bytes == process.host_pool().reserved_bytes >= stats.host_bytes
    assert (stats.spilled_bytes, stats.disk_bytes) == (0, 0)
    del loss
    assert_at_rest(tide)
    assert_step_equal(tide, model, x)


@pytest.mark.parametrize("cap", [16 * KIB, "20KiB"])
def test_cap(cap: int | str) -> None:
    model, x = make_model(), make_input()
    expected = step(model, x)
    tide = offload(model, to="host", max_host_bytes=cap)
    with pytest.warns(RuntimeWarning) as warned:
        for _ in range(3):
            assert_same_bits(step(model, x, tide), expected)
            assert_at_rest(tide)
    assert len(warned) == 1
    text = str(warned[0].message)
    shown = f"KiB used of {16 if cap == 16 * KIB else 20}.0 KiB allowed"
    assert "[host tier]" in text and shown in text and "raise max_host_bytes" in text
    stats = tide.stats()
    assert stats.kept["host_full"] > 0
    assert 0 < stats.peak_host_bytes <= process.host_pool().reserved_bytes <= 20 * KIB
    assert_loaded(tide)
    # What did not fit was not moved: the live tensors were used.
    assert stats.d2h_bytes < stats.unique_bytes
    assert_step_equal(offload(model, to="host"), model, x)


def test_cap_of_nothing() -> None:
    model, x = make_model(), make_input()
    expected = step(model, x)
    tide = offload(model, to="host", max_host_bytes=0)
    with pytest.warns(RuntimeWarning, match=r"0 B used of 0 B allowed"):
        assert_same_bits(step(model, x, tide), expected)
    stats = tide.stats()
    assert (stats.d2h_bytes, stats.peak_host_bytes) == (0, 0)
    assert stats.kept["host_full"] > 0 and stats.live_hits > 0
    assert process.host_pool().reserved_bytes == 0
    assert_at_rest(tide)


def test_cap_is_of_the_process() -> None:
    model, x = make_model(), make_input()
    first = offload(model, to="host", max_host_bytes=64 * KIB)
    second = offload(model, to="host", max_host_bytes=64 * KIB)
    with first:
        loss = model(x).square().mean()
    expected = step(model, x)
    with pytest.warns(RuntimeWarning, match="no room"):
        assert_same_bits(step(model, make_input(rows=64), second), step(model, make_input(rows=64)))
    assert process.host_pool().reserved_bytes <= 64 * KIB
    model.zero_grad()
    loss.backward()
    assert_same_bits([loss.detach(), *gradients(model)], expected)
    del loss
    assert_at_rest(first)
    assert_at_rest(second)


def test_warning_as_error_loses_nothing() -> None:
    model, x = make_model(), make_input()
    expected = step(model, x)
    tide = offload(model, to="host", max_host_bytes=16 * KIB)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with raised_text(RuntimeWarning) as text:
            step(model, x, tide)
        assert "[host tier]" in text[0]
        assert_at_rest(tide)
        # It has been said once.
        assert_same_bits(step(model, x, tide), expected)
    assert_at_rest(tide)
    assert_loaded(tide)


@pytest.mark.parametrize("seen", ["while leaving", "in backward"])
def test_warning_as_error_outside_forward(seen: str, tmp_path: Path) -> None:
    """Leaving is complete all the same, and backward can be run again."""
    x = make_input().requires_grad_()
    # With one storage the copy begins when the context is left, with more by the last save.
    functions = [torch.exp, torch.sin, *([torch.cos] * 2 if seen == "while leaving" else [])]

    def forward() -> torch.Tensor:
        y = x
        for function in functions:
            y = function(y)
        return y.sum()

    expected = torch.autograd.grad(forward(), x)
    tide = offload(to=tmp_path, in_flight_bytes=MIB)
    completions = tide._session.transfers.copies
    with full_disk(tmp_path), warnings.catch_warnings():
        warnings.simplefilter("error")
        tide.__enter__()
        loss = forward()
        if seen == "while leaving":
            process.executor().drain(completions)
            with raised_text(RuntimeWarning) as text:
                tide.__exit__(None, None, None)
        else:
            tide.__exit__(None, None, None)
            process.executor().drain(completions)
            with raised_text(RuntimeWarning) as text:
                torch.autograd.grad(loss, x, retain_graph=True)
    assert "[disk tier]" in text[0]
    before = tide.stats().saved_tensors
    x.exp()
    assert tide.stats().saved_tensors == before  # left
    assert_same_bits(torch.autograd.grad(loss, x), expected)
    assert tide.stats().kept["disk_full"] > 0
    del loss
    assert_at_rest(tide)


def test_no_slab_after_the_first_step() -> None:
    model, x = make_model(), make_input(rows=256)
    expected = step(model, x)
    tide = offload(model, to="host")
    assert_same_bits(step(model, x, tide), expected)
    slabs = process.host_pool().slab_allocations
    reserved = tide.stats().host_reserved_bytes
    assert reserved > 0
    for rows in (256, 256, 100, 256):
        assert_step_equal(tide, model, make_input(rows=rows))
    assert process.host_pool().slab_allocations == slabs
    assert tide.stats().host_reserved_bytes == reserved


def test_reserved_memory_is_used() -> None:
    x = torch.ones(MIB, requires_grad=True)  # 4 MiB
    tide = offload(to="host")
    with tide:
        y = x
        for _ in range(44):
            y = y.exp().log1p()
    stats = tide.stats()
    assert stats.peak_host_bytes > 128 * MIB
    assert stats.peak_host_bytes / stats.host_reserved_bytes >= 0.8
    y.sum().backward()
    assert_loaded(tide)
    del y
    assert_at_rest(tide)


@pytest.mark.parametrize("count", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_tiny_tensors(count: int) -> None:
    tide = offload(to="host")
    slabs = process.host_pool().slab_allocations
    x = torch.linspace(0, 1, 4, requires_grad=True)
    with tide:
        y = x
        for _ in range(count):
            y = torch.sin(y)
    stats = tide.stats()
    assert stats.d2h_copies > 0.99 * count
    assert process.host_pool().slab_allocations - slabs <= 2
    (found,) = torch.autograd.grad(y.sum(), x)
    del y
    assert_loaded(tide)
    assert_at_rest(tide)
    y = x
    for _ in range(count):
        y = torch.sin(y)
    assert_same_bits([found], torch.autograd.grad(y.sum(), x))


def test_trim() -> None:
    model, x = make_model(), make_input()
    expected = step(model, x)
    tide = offload(model, to="host")
    assert_step_equal(tide, model, x)
    reserved = process.host_pool().reserved_bytes
    assert ebb.trim() == reserved > 0
    assert (process.host_pool().reserved_bytes, tide.stats().host_reserved_bytes) == (0, 0)
    assert ebb.trim() == 0
    # In use: stays.
    model.zero_grad()
    with tide:
        loss = model(x).square().mean()
    assert ebb.trim() == 0
    loss.backward()
    assert_same_bits([loss.detach(), *gradients(model)], expected)
    del loss
    assert_at_rest(tide)
