"""Totals of the layer: what was counted stays counted when a pool, and its session with it, is gone."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch
from harness import Hyper
from torch_layers import blocks, train
from training import make_input

import ebbtide.hyper_parallel as hp
from ebbtide.hyper_parallel.counted import live_sessions
from ebbtide.report import Stats

NOW = ("parked", "entries", "device_bytes", "host_bytes", "host_reserved_bytes", "disk_bytes")


def counted(stats: Stats) -> dict[str, Any]:
    return {name: value for name, value in asdict(stats).items() if name not in NOW}


def step(hyper: Hyper, depth: int = 2) -> None:
    """With a pool, which is gone afterwards, as is its session."""
    pool = hp.PinnedMemoryPool("1GiB")
    layers = [hp.swap_wrapper(b, group_swap=hyper.group_swap, cpu_pool=pool) for b in blocks(depth)]
    train(torch.nn.Sequential(*layers), make_input())
    hyper.assert_at_rest()


def test_a_pool_that_is_dropped_leaves_what_it_counted(hyper: Hyper) -> None:
    model = torch.nn.Sequential(*(hp.swap_wrapper(b, **hyper.options) for b in blocks(2)))
    train(model, make_input())
    hyper.assert_at_rest()
    before, table, sessions = hp.stats(), hp.report(), len(live_sessions())
    assert before.d2h_bytes > 0 and "Block" in table
    del model
    hyper.options.clear()
    assert len(live_sessions()) == sessions - 1
    after = hp.stats()
    assert counted(after) == counted(before)
    assert (after.entries, after.device_bytes, after.host_bytes, after.parked) == (0, 0, 0, 0)
    held_now = ("held now:", "peak")
    lines = [line for line in table.splitlines() if not line.strip().startswith(held_now)]
    found = hp.report().splitlines()
    assert [line for line in found if not line.strip().startswith(held_now)] == lines
    hp.reset_stats()
    assert (hp.stats().d2h_bytes, hp.stats().peak_host_bytes) == (0, 0)
    assert "Block" not in hp.report()


def test_counts_add_up_and_peaks_do_not(hyper: Hyper) -> None:
    step(hyper)
    first = hp.stats()
    assert first.peak_host_bytes > 0
    for n in range(2, 5):
        step(hyper)
        found = hp.stats()
        assert found.d2h_bytes == n * first.d2h_bytes
        assert found.kept == {reason: n * count for reason, count in first.kept.items()}
        assert found.peak_host_bytes == first.peak_host_bytes
    step(hyper, depth=4)
    assert hp.stats().peak_host_bytes > first.peak_host_bytes


def test_peaks_of_what_was_there_together_are_summed(hyper: Hyper) -> None:
    step(hyper)
    one = hp.stats().peak_host_bytes
    hp.reset_stats()
    pools = [hp.PinnedMemoryPool("1GiB") for _ in range(2)]
    for pool in pools:
        train(hp.swap_wrapper(blocks(2), group_swap=hyper.group_swap, cpu_pool=pool), make_input())
    del pool
    together = hp.stats().peak_host_bytes
    assert together >= 2 * one > 0
    while pools:
        pools.pop()
        assert hp.stats().peak_host_bytes == together


@pytest.mark.parametrize("reset_while_alive", [False, True])
def test_a_session_that_dies_with_its_last_ticket(hyper: Hyper, reset_while_alive: bool) -> None:
    layer = hp.swap_wrapper(blocks(1), **hyper.options)
    loss = layer(make_input()).square().mean()
    del layer
    hyper.options.clear()
    if reset_while_alive:
        hp.reset_stats()
    loss.backward()
    hp.synchronize()
    before = hp.stats()
    assert (before.d2h_bytes == 0) == reset_while_alive
    assert before.h2d_bytes > 0
    del loss
    hyper.assert_at_rest()
    assert hp.stats().h2d_bytes == before.h2d_bytes
    assert hp.stats().d2h_bytes == before.d2h_bytes
