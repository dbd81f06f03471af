"""Threads that share a device, each with streams of its own, disturb neither each other's work nor its place."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support import assert_at_rest
from torch import nn
from torch_support import end_backward

import ebbtide.torch as ebb

WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*[Block() for _ in range(4)]).to("tide")


@pytest.fixture(autouse=True)
def switch_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def together(work: Callable[[int], None], threads: int) -> None:
    failures: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as failure:
            failures.append(failure)

    running = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    torch.accelerator.synchronize(0)
    if failures:
        raise failures[0]


def test_every_thread_stays_on_its_stream(control: ModuleType) -> None:
    models = [model(number) for number in range(2)]
    inputs = [torch.randn(16, WIDTH, device="tide") for _ in models]
    streams = [torch.Stream(device="tide:0") for _ in models]
    torch.accelerator.synchronize(0)

    def train(number: int) -> None:
        with streams[number] as stream:
            tide = ebb.offload(
                models[number], device="tide", to="host", min_bytes=0, keep_last_groups=0
            )
            for _ in range(40):
                with tide:
                    loss = models[number](inputs[number]).square().sum()
                assert torch.accelerator.current_stream(0) == stream
                loss.backward()
                assert torch.accelerator.current_stream(0) == stream

    together(train, 2)
    assert not control.races()


@pytest.mark.parametrize("own_streams", [False, True])
@pytest.mark.parametrize("mode", ["lazy", "worker"])
def test_one_object_on_disk_behind_host_memory_serves_threads(
    control: ModuleType, mode: str, own_streams: bool, tmp_path: Path
) -> None:
    """Whoever gets a storage that another thread is loading uses it after the load, on whatever stream."""
    control.options(mode=mode)
    models = [model(number) for number in range(3)]
    inputs = [torch.randn(16, WIDTH, device="tide") for _ in models]
    shared = torch.accelerator.current_stream(0)
    streams = [torch.Stream(device="tide:0") if own_streams else shared for _ in models]
    torch.accelerator.synchronize(0)
    tide = ebb.offload(
        device="tide",
        to=tmp_path,
        min_bytes=0,
        in_flight_bytes=0,
        keep_last_groups=1,
        max_host_bytes=60_000,
        allow_tmpfs=True,
    )

    def gradients(context: Any) -> list[list[torch.Tensor]]:
        found: list[list[torch.Tensor]] = [[] for _ in models]

        def train(number: int) -> None:
            with torch.Stream(
                stream_id=streams[number].stream_id,
                device_index=0,
                device_type=streams[number].device_type,
            ):
                models[number].zero_grad(set_to_none=True)
                losses = []
                with context or contextlib.nullcontext():
                    for batch in range(3):
                        if context is not None:
                            with context.group(f"batch {batch}"):
                                pass
                        losses.append(models[number](inputs[number]).square().sum())
                for loss in losses:
                    loss.backward()
                found[number] = [p.grad.clone() for p in models[number].parameters()]

        together(train, len(models))
        return [[gradient.cpu() for gradient in of] for of in found]

    expected = gradients(None)
    for _ in range(8):
        for a, b in zip(gradients(tide), expected, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert not control.races()
    assert tide.stats().spilled_bytes > 0
    end_backward()
    assert_at_rest(tide)
