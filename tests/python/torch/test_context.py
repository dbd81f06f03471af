"""Entering and leaving: again, nested, from odd places, a hundred times, with garbage collections inside."""

from __future__ import annotations

import gc
import inspect
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support import DEVICE, assert_at_rest, assert_loaded, disk_first
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
from ebbtide import CheckpointPolicy, UsageError, process
from ebbtide.torch.framework import TorchFramework


@pytest.mark.parametrize("to", ["disk", "host"])
def test_enter_again(to: str) -> None:
    model = make_model()
    tide = offload(model, to=to)
    for seed in range(5):
        assert_step_equal(tide, model, make_input(rows=8 + seed, seed=seed))


def test_several_entries_for_one_graph() -> None:
    model, x = make_model(), make_input()
    expected = step(model, x)
    tide = offload(model)
    model.zero_grad()
    with tide:
        hidden = model[0](x)
    hidden = model[1](hidden)  # saved by plain autograd
    with tide:
        loss = model[2](hidden).square().mean()
    loss.backward()
    assert_same_bits([loss.detach(), *gradients(model)], expected)
    assert_loaded(tide)
    del hidden, loss
    assert_at_rest(tide)


def test_nested_in_itself() -> None:
    model, x = make_model(), make_input()
    expected = step(model, x)
    tide = offload(model)
    model.zero_grad()
    with tide, tide:
        hidden = model[0](x)
        with tide:
            hidden = model[1](hidden)
        loss = model[2](hidden).square().mean()
    loss.backward()
    assert_same_bits([loss.detach(), *gradients(model)], expected)
    assert_loaded(tide)
    del hidden, loss
    assert_at_rest(tide)


def test_nested_in_another_the_inner_one_counts() -> None:
    model, x = make_model(), make_input()
    expected = step(model, x)
    outer, inner = offload(model, to="host"), offload(model, to="disk")
    model.zero_grad()
    with outer:
        hidden = model[0](x)
        before = outer.stats().saved_tensors
        with inner:
            hidden = model[1](hidden)
        assert outer.stats().saved_tensors == before > 0
        loss = model[2](hidden).square().mean()
    loss.backward()
    assert_same_bits([loss.detach(), *gradients(model)], expected)
    for tide in (outer, inner):
        assert_loaded(tide)
    assert outer.stats().spilled_bytes == 0
    assert DEVICE != "cpu" or inner.stats().spilled_bytes > 0
    del hidden, loss
    assert_at_rest(outer)
    assert_at_rest(inner)


def test_left_in_the_order_of_entry() -> None:
    """As with torch's own hooks the innermost pair goes first; nothing may be lost by that."""
    model, x = make_model(), make_input()
    expected = step(model, x)
    first, second = offload(model, to="host"), offload(model)
    model.zero_grad()
    first.__enter__()
    hidden = model[0](x)
    second.__enter__()
    hidden = model[1](hidden)
    first.__exit__(None, None, None)
    hidden = model[2](hidden)
    second.__exit__(None, None, None)
    loss = hidden.square().mean()
    loss.backward()
    assert_same_bits([loss.detach(), *gradients(model)], expected)
    del hidden, loss
    assert_at_rest(first)
    assert_at_rest(second)


def test_backward_inside_the_context() -> None:
    model, x = make_model(), make_input()
    expected = step(model, x)
    tide = offload(model)
    model.zero_grad()
    with tide:
        loss = model(x).square().mean()
        loss.backward()
    assert_same_bits([loss.detach(), *gradients(model)], expected)
    assert_loaded(tide)
    del loss
    assert_at_rest(tide)


def test_hooks_are_gone_after_an_exception() -> None:
    model, x = make_model(), make_input()
    tide = offload(model)
    with raised_text(KeyError), tide:
        raise KeyError
    saved = tide.stats().saved_tensors
    step(model, x)
    assert tide.stats().saved_tensors == saved == 0


@disk_first
def test_object_dropped_before_backward() -> None:
    model, x = make_model(), make_input()
    expected = step(model, x)
    used = process.spill_file(
        Path(ebb.offload(to="disk")._session.transfers.tiers.space.directory), False
    )
    before = used.used_bytes
    model.zero_grad()
    with offload(model):
        loss = model(x).square().mean()
    assert used.used_bytes > before
    loss.backward()
    assert_same_bits([loss.detach(), *gradients(model)], expected)
    del loss
    assert used.used_bytes == before


def on_another_thread(function: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(function).result()


def assert_left(tide: ebb.Offload) -> None:
    """Torch brings hooks back that are taken away inside a backward: they must do nothing."""
    storages = tide.stats().storages
    y = make_input().requires_grad_().exp()
    y.sum().backward()
    assert tide.stats().storages == storages
    assert_at_rest(tide)


on_the_callers_thread = pytest.mark.skipif(
    DEVICE != "cpu", reason="the device's own thread runs backward, and has entered no context"
)


@on_the_callers_thread
@pytest.mark.parametrize("prefetch_bytes", [0, 1 << 20])
def test_left_from_inside_an_unpack(prefetch_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = make_model(), make_input()
    expected = step(model, x)
    tide = offload(model, prefetch_bytes=prefetch_bytes)
    original: Any = TorchFramework.allocate
    left: list[int] = []

    def allocate(self: TorchFramework, nbytes: int, residue: int, device: int) -> Any:
        if not left:
            left.append(nbytes)
            tide.__exit__(None, None, None)
        return original(self, nbytes, residue, device)

    def use() -> None:
        model.zero_grad()
        tide.__enter__()
        loss = model(x).square().mean()
        loss.backward()
        assert left
        assert_same_bits([loss.detach(), *gradients(model)], expected)
        del loss
        assert_left(tide)

    monkeypatch.setattr(TorchFramework, "allocate", allocate)
    on_another_thread(use)


@on_the_callers_thread
def test_left_from_a_gradient_hook() -> None:
    model, x = make_model(), make_input()
    expected = step(model, x)
    tide = offload(model)

    def use() -> None:
        model.zero_grad()
        tide.__enter__()
        hidden = model[:2](x)
        hidden.register_hook(lambda grad: tide.__exit__(None, None, None))
        loss = model[2](hidden).square().mean()
        loss.backward()
        assert_same_bits([loss.detach(), *gradients(model)], expected)
        assert_loaded(tide)
        del hidden, loss
        assert_left(tide)

    on_another_thread(use)


def test_left_without_being_entered() -> None:
    tide = offload()
    with raised_text(UsageError) as text:
        tide.__exit__(None, None, None)
    assert "[offload]" in text[0] and "enter and leave on one thread" in text[0]


def test_left_on_another_thread() -> None:
    model, x = make_model(), make_input()
    tide = offload(model)
    caught: list[str] = []

    def leave() -> None:
        try:
            tide.__exit__(None, None, None)
        except UsageError as error:
            caught.append(str(error))

    with tide:
        thread = threading.Thread(target=leave)
        thread.start()
        thread.join()
        loss = model(x).square().mean()
    assert caught and "enter and leave on one thread" in caught[0]
    loss.backward()
    del loss
    assert_loaded(tide)
    assert_at_rest(tide)


class Cycle:
    """Garbage that only the collector finds, with a graph and its tickets in it."""

    def __init__(self, held: object) -> None:
        self.held = held
        self.me = self


@pytest.mark.parametrize("to", ["disk", "host"])
def test_garbage_collection_inside_pack(to: str) -> None:
    model, x = make_model(), make_input()
    expected = step(model, x)
    collected = []

    def policy(tensor: torch.Tensor) -> CheckpointPolicy:
        collected.append(gc.collect(0))
        return CheckpointPolicy.MUST_SWAP

    tide = offload(model, to=to, policy=policy)
    for _ in range(3):
        with tide:
            Cycle(model(x))  # dies at some later pack
        assert_same_bits(step(model, x, tide), expected)
    assert max(collected) > 0
    gc.collect()
    assert_loaded(tide)
    assert_at_rest(tide)


@pytest.mark.parametrize(
    "place",
    ["storage_ref", "weak", "witness", "version", "counter_owner", "allocate", "make_view"],
)
def test_garbage_collection_anywhere(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The destructors of tickets come back into the session at every place where Python may run."""
    model, x = make_model(), make_input(rows=4)
    expected = step(model, x)
    original: Any = inspect.getattr_static(TorchFramework, place)
    calls: list[int] = []

    def collecting(self: TorchFramework, *arguments: Any) -> Any:
        calls.append(gc.collect(0))
        return original.__get__(self)(*arguments)

    monkeypatch.setattr(TorchFramework, place, collecting)
    tide = offload(model)
    for _ in range(2):
        with tide:
            Cycle(model(x))
        assert_same_bits(step(model, x, tide), expected)
    assert sum(calls) > 0
    gc.collect()
    assert_loaded(tide)
    assert_at_rest(tide)


def threads_and_files() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("to", ["disk", "host"])
def test_a_hundred_objects_in_turn(to: str) -> None:
    model, x = make_model(depth=1), make_input()
    expected = step(model, x)

    def use() -> None:
        tide = offload(model, to=to)
        assert_same_bits(step(model, x, tide), expected)
        assert_loaded(tide)
        assert_at_rest(tide)

    use()
    slabs, used = process.host_pool().slab_allocations, process.host_pool().used_bytes
    before = threads_and_files()
    for _ in range(100):
        use()
    assert threads_and_files() == before
    assert process.host_pool().slab_allocations == slabs
    assert process.host_pool().used_bytes == used == 0


def test_a_hundred_objects_at_once() -> None:
    model, x = make_model(depth=1), make_input()
    expected = step(model, x)
    offload(model).__enter__().__exit__(None, None, None)
    before = threads_and_files()
    tides = [offload(model) for _ in range(100)]
    for tide in tides:
        assert_same_bits(step(model, x, tide), expected)
    assert threads_and_files() == before
    for tide in tides:
        assert_loaded(tide)
        assert_at_rest(tide)
