"""A small training step with faults in it, and what must hold after whatever they did to it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from saving import NBYTES, assert_all_at_rest, end_backward, gradient, leaf, save
from support import EXACT

import ebbtide.torch as ebb
from ebbtide import EbbtideError, process

STORAGES = 6
# What may reach the user: ours, or PyTorch's own.
STATED = (EbbtideError, torch.OutOfMemoryError, RuntimeError)


def offload(**options: Any) -> ebb.Offload:
    given = {"to": "host", "device": "tide", "prefetch_bytes": 2 * NBYTES} | EXACT | options
    return ebb.offload(**given)


def forward(tide: ebb.Offload | None, to: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """Two groups that share a storage, and one storage outside of groups."""
    with tide if tide is not None else contextlib.nullcontext():
        output = to
        shared = inputs[0] * 1
        for group in range(2):
            with tide.group(f"{group}") if tide is not None else contextlib.nullcontext():
                for i in range(2):
                    mine = inputs[1 + 2 * group + i] * 2
                    output = save(output, mine, shared)
                    del mine
        del shared
        last = inputs[5] + 1
        output = save(output, last)
        del last
    return output


class Step:
    """One forward and backward; the numbers are the same in every one."""

    def __init__(self, control: Any) -> None:
        self.control = control
        self.leaf = leaf()
        elements = NBYTES // 4
        steps = torch.arange(STORAGES * elements, dtype=torch.float32).view(STORAGES, elements)
        self.inputs = (steps % 13 / 8).to("tide")
        torch.accelerator.synchronize(0)
        self.expected = gradient(forward(None, self.leaf, self.inputs), self.leaf).cpu()
        self.assert_trains_on(offload())  # which makes the streams and the slab

    def output(self, tide: ebb.Offload, settled: bool = False) -> torch.Tensor:
        """``settled``: what was copied is let go of, so that it has to be loaded."""
        output = forward(tide, self.leaf, self.inputs)
        if settled:
            tide.synchronize()
        return output

    def is_right(self, grad: torch.Tensor) -> bool:
        return torch.equal(grad.cpu(), self.expected)

    def gradient(self, output: torch.Tensor, **options: Any) -> torch.Tensor:
        return gradient(output, self.leaf, **options)

    def assert_trains_on(self, tide: ebb.Offload) -> None:
        """After the fault: all is let go of, nothing was touched too late, the next step is right."""
        for device in range(torch.accelerator.device_count()):
            torch.accelerator.synchronize(device)
        assert_all_at_rest(tide)
        before = tide.stats()
        assert self.is_right(self.gradient(self.output(tide, settled=True)))
        after = tide.stats()
        assert after.h2d_bytes - before.h2d_bytes >= 4 * NBYTES, "the next step offloads again"
        assert_all_at_rest(tide)
        assert not self.control.races(), self.control.races()[0]


@contextlib.contextmanager
def no_leaks(control: Any) -> Iterator[None]:
    """Device memory, blocks in page-locked memory and streams are as before."""
    before = held(control)
    yield
    deadline = time.monotonic() + 5
    while held(control) != before:
        assert time.monotonic() < deadline, (before, held(control))
        end_backward()


def held(control: Any) -> tuple[int, int, int]:
    torch.accelerator.synchronize(0)
    pools = process._pinned_pools.values()
    return (
        control.memory().used_bytes
        // NBYTES,  # less is what the thread of a backward may still hold
        sum(pool.space.used_bytes for pool in pools),
        control.streams(),
    )
