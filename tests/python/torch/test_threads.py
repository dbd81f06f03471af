"""Threads: contexts of their own, one object for all, one storage for two, backward elsewhere."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from descriptors import bad_disk
from support import DEVICE, assert_at_rest, assert_loaded, disk_first
from torch_support import assert_same_bits, device_races
from training import gradients, make_input, make_model, offload, step

import ebbtide.torch as ebb
from ebbtide import SpillError
from ebbtide.torch.framework import TorchFramework

THREADS = 4
STEPS = 12
TIMEOUT_S = 30  # only a deadlock takes so long

Result = TypeVar("Result")

backwards_at_once = pytest.mark.skipif(
    DEVICE != "cpu", reason="the device's own thread runs one backward after the other"
)


@pytest.fixture(params=[None, 1e-6], ids=["switch-as-usual", "switch-often"], autouse=True)
def switch_interval(request: pytest.FixtureRequest) -> Iterator[None]:
    """Threads take turns after nearly every instruction: rare interleavings become common."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(request.param or before)
    yield
    sys.setswitchinterval(before)


def in_threads(function: Callable[[int], Result], count: int = THREADS) -> list[Result]:
    """Calls ``function(0)``, ``function(1)``, … at once; raises what one of them raised."""
    barrier = threading.Barrier(count)

    def call(index: int) -> Result:
        torch.set_num_threads(1)
        barrier.wait(TIMEOUT_S)
        return function(index)

    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(call, index) for index in range(count)]
        return [future.result(TIMEOUT_S) for future in futures]


@pytest.mark.parametrize("to", ["disk", "host"])
def test_own_contexts(to: str) -> None:
    models = [make_model() for _ in range(THREADS)]
    inputs = [make_input(rows=8 + index, seed=index) for index in range(THREADS)]
    expected = [step(model, x) for model, x in zip(models, inputs, strict=True)]
    tides = [offload(model, to=to) for model in models]

    def train(index: int) -> None:
        for _ in range(STEPS):
            found = step(models[index], inputs[index], tides[index])
            assert_same_bits(found, expected[index])

    in_threads(train)
    for tide in tides:
        assert_loaded(tide)
        assert_at_rest(tide)


@pytest.mark.parametrize("to", ["disk", "host"])
@pytest.mark.parametrize("in_flight_bytes", [0, 1 << 20])
def test_one_object_for_all(to: str, in_flight_bytes: int) -> None:
    models = [make_model() for _ in range(THREADS)]
    inputs = [make_input(rows=8 + index, seed=index) for index in range(THREADS)]
    expected = [step(model, x) for model, x in zip(models, inputs, strict=True)]
    tide = offload(to=to, in_flight_bytes=in_flight_bytes, prefetch_bytes=1 << 14)

    def train(index: int) -> None:
        for _ in range(STEPS):
            assert_same_bits(step(models[index], inputs[index], tide), expected[index])

    in_threads(train)
    if in_flight_bytes == 0 or DEVICE == "cpu":
        # A copy that no one waits for may never be seen done on a device.
        assert_loaded(tide)
    assert_at_rest(tide)
    assert tide.stats().kept["host_full"] == tide.stats().kept["disk_full"] == 0


def test_threads_join_one_activation() -> None:
    """One storage saved by all threads, each for a graph of its own."""
    shared = make_input(rows=64)
    weights = [torch.full((32,), 0.5 + index, requires_grad=True) for index in range(THREADS)]

    def gradient(index: int, context: Any = None) -> torch.Tensor:
        loss = (shared.sin() * weights[index]).sum() + (shared * weights[index]).exp().mean()
        return torch.autograd.grad(loss, weights[index])[0]

    expected = [gradient(index) for index in range(THREADS)]
    tide = offload()

    def train(index: int) -> None:
        for _ in range(STEPS):
            with tide:
                found = gradient(index)
            assert_same_bits([found], [expected[index]])

    in_threads(train)
    assert_at_rest(tide)


def test_backward_on_another_thread() -> None:
    model, x = make_model(), make_input()
    expected = step(model, x)
    tide = offload(model)
    for _ in range(STEPS):
        model.zero_grad()
        with tide:
            loss = model(x).square().mean()
        in_threads(lambda index, loss=loss: loss.backward(), count=1)
        assert_same_bits([loss.detach(), *gradients(model)], expected)
    del loss
    assert_loaded(tide)
    assert_at_rest(tide)


# Each saves its input. A node of the graph runs in one thread at a time, so each thread has its own.
BRANCHES = (torch.sin, torch.cos, torch.square, torch.sinh)


def forward_branches() -> tuple[list[torch.Tensor], torch.Tensor]:
    """Losses whose nodes all saved the same trunk, and what to differentiate them by."""
    w = torch.linspace(0.1, 1, 32).requires_grad_()
    trunk = (make_input(rows=32) * w).tanh()
    return [branch(trunk).sum() for branch in BRANCHES], w


def differentiate_all(losses: list[torch.Tensor], w: torch.Tensor) -> list[torch.Tensor | None]:
    """The gradient of each loss, in a thread each; None where the disk failed."""

    def differentiate(index: int) -> torch.Tensor | None:
        try:
            return torch.autograd.grad(losses[index], w, retain_graph=True)[0]
        except SpillError:
            return None

    return in_threads(differentiate)


@pytest.mark.parametrize("prefetch_bytes", [0, 1 << 14])
def test_threads_want_one_storage(prefetch_bytes: int) -> None:
    expected = differentiate_all(*forward_branches())
    tide = offload(prefetch_bytes=prefetch_bytes)
    for _ in range(STEPS):
        with tide:
            losses, w = forward_branches()
        assert_same_bits(differentiate_all(losses, w), expected)
        del losses
        assert_at_rest(tide)
    assert_loaded(tide)


@backwards_at_once
def test_second_thread_waits_while_the_first_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is held inside its allocation until the second has asked for the same storage."""
    losses, w = forward_branches()
    expected = [torch.autograd.grad(loss, w, retain_graph=True)[0] for loss in losses[:2]]
    tide = offload(prefetch_bytes=0)
    with tide:
        losses, w = forward_branches()
    original: Any = TorchFramework.allocate
    engine = tide._session._engine
    held, asked = threading.Event(), threading.Event()

    class Engine:
        """The engine; tells when somebody starts to wait for an allocation."""

        def __getattr__(self, name: str) -> Any:
            return getattr(engine, name)

        def wait_allocated(self, storage: int, limit_ms: int) -> bool:
            asked.set()
            return engine.wait_allocated(storage, limit_ms)

    def allocate(self: TorchFramework, nbytes: int, residue: int, device: int) -> Any:
        held.set()
        assert asked.wait(TIMEOUT_S)
        return original(self, nbytes, residue, device)

    graph = [*losses]

    def differentiate(index: int) -> torch.Tensor:
        assert index == 0 or held.wait(TIMEOUT_S)
        return torch.autograd.grad(graph[index], w, retain_graph=True)[0]

    with monkeypatch.context() as patch:
        patch.setattr(TorchFramework, "allocate", allocate)
        patch.setattr(tide._session.transfers, "engine", Engine())
        assert_same_bits(in_threads(differentiate, count=2), expected)
    assert_loaded(tide)
    graph.clear()
    del losses
    assert_at_rest(tide)


@disk_first
def test_first_load_fails_and_each_thread_is_told(tmp_path: Path) -> None:
    """No thread may take memory that another failed to load for the saved tensor."""
    expected = differentiate_all(*forward_branches())
    tide = offload(to=tmp_path, prefetch_bytes=0)
    for _ in range(STEPS):
        with tide:
            losses, w = forward_branches()
        with bad_disk(tmp_path):
            assert differentiate_all(losses, w) == [None] * THREADS
        assert_same_bits(differentiate_all(losses, w), expected)
        del losses
        assert_at_rest(tide)
    assert_loaded(tide)


@pytest.mark.parametrize("failing", range(3))
def test_memory_is_short_for_some_loads(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tried again, never a wrong value."""
    expected = differentiate_all(*forward_branches())
    original: Any = TorchFramework.allocate
    here = threading.local()  # a thread whose second try fails too would give up
    calls: list[int] = []
    failed: list[int] = []

    def allocate(self: TorchFramework, nbytes: int, residue: int, device: int) -> Any:
        calls.append(nbytes)
        if len(calls) % 8 == failing and not hasattr(here, "failed"):
            here.failed = True
            failed.append(nbytes)
            raise MemoryError("none left")
        return original(self, nbytes, residue, device)

    tide = offload(prefetch_bytes=1 << 13)
    monkeypatch.setattr(TorchFramework, "allocate", allocate)
    for _ in range(STEPS):
        with tide:
            losses, w = forward_branches()
        assert_same_bits(differentiate_all(losses, w), expected)
        del losses
        assert_at_rest(tide)
    assert failed
    assert_loaded(tide)


def test_graphs_dropped_on_another_thread() -> None:
    model, x = make_model(), make_input()
    tide = offload(model, in_flight_bytes=1 << 13)
    graphs: list[torch.Tensor] = []

    def work(index: int) -> None:
        for _ in range(STEPS):
            if index % 2:
                with tide:
                    graphs.append(model(x))
            elif graphs:
                graphs.pop()

    in_threads(work)
    assert tide.stats().d2h_bytes > 0
    graphs.clear()
    assert_at_rest(tide)


def test_a_live_hit_while_a_copy_reads_the_storage() -> None:
    """Whoever gets the storage may resize it. Memory of the CPU must not be gone under a copy; what a device copies of
    memory that it has given to others is not used."""

    class Resizing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            y = x * 3
            ctx.save_for_backward(y)
            return x.new_ones(())

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            (y,) = ctx.saved_tensors
            done = 1 if DEVICE == "cpu" else 0
            assert tide.stats().d2h_copies == done, "as the storage is handed out"
            y.untyped_storage().resize_(0)
            return gradient.expand(y.shape)

    x = torch.ones(4_000_000, requires_grad=True)
    tide = ebb.offload(min_bytes=0, keep_last_bytes=0, in_flight_bytes="1GiB")
    with tide:
        loss = Resizing.apply(x)
    loss.backward()
    assert x.grad is not None and x.grad.sum() == 4_000_000
    if DEVICE != "cpu":
        assert tide.stats().d2h_bytes == 0
        assert all("copy D2H" in race and "free" in race for race in device_races())
