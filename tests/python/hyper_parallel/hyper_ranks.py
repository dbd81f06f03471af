"""What two ranks do: layers wrapped and chained inside of DDP and FSDP2, each case compared with the plain model."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from gloo_ranks import run_cases
from ranks import (
    ROWS,
    TIMEOUT,
    data_parallel,
    sharded,
    sharded_bfloat16,
    sharded_once,
    train,
)
from support import assert_at_rest
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch_support import assert_same_bits
from training import make_input, make_model

import ebbtide.hyper_parallel as hp

Outer = Callable[[DeviceMesh, nn.Module], nn.Module]

OUTER: dict[str, Outer] = {
    "ddp": data_parallel,
    "fsdp": sharded,
    "fsdp bfloat16": sharded_bfloat16,
    "fsdp gathered once": sharded_once,
}
INNER = ("swap", "checkpoint", "checkpoint in swap")
SWAPS = ("group_swap=off", "group_swap=on")
CASES = [f"{outer}, {inner}, {swap}" for outer in OUTER for inner in INNER for swap in SWAPS]

# Exact counts: nothing is held back, and the offload of a group is over when it is waited for.
EXACT = {"KEEP_LAST_BYTES": "0", "IN_FLIGHT_BYTES": "0", "PREFETCH_BYTES": "0"}


class Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = make_model(depth=4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def wrapped(inner: str, policy_fn: Any = None, **options: Any) -> Trunk:
    trunk = Trunk()
    for index, block in enumerate(trunk.blocks):
        if inner.startswith("checkpoint"):
            block = hp.checkpoint_wrapper(block, swap_inputs=inner == "checkpoint", **options)
        if inner.endswith("swap"):
            block = hp.swap_wrapper(block, policy_fn, **options)
        trunk.blocks[index] = block
    for first, second in zip(trunk.blocks, trunk.blocks[1:], strict=False):
        hp.SwapManager().set_forward_prefetch_layer(first, second)
    return trunk


def moved_alone(inner: str, dtype: torch.dtype, **options: Any) -> int:
    """Bytes that one forward and backward of the wrapped layers alone moves out: activations, no weights."""
    hp.reset_stats()
    trunk = wrapped(inner, **options).to(dtype)
    x = make_input(ROWS).to(dtype).requires_grad_()
    trunk(x).float().square().mean().backward()
    return hp.stats().d2h_bytes


def run_case(case: str, rank: int, mesh: DeviceMesh) -> None:
    outer, inner, swap = case.split(", ")
    options = {"group_swap": swap.endswith("on"), "cpu_pool": hp.PinnedMemoryPool("64MiB")}
    expected = list(train(OUTER[outer](mesh, Trunk()), rank, nullcontext))
    dtype = torch.bfloat16 if "bfloat16" in outer else torch.float32
    nbytes = moved_alone(inner, dtype, **options)
    shapes = {tuple(sorted(p.shape)) for p in Trunk().parameters() if p.dim() > 1}
    offered: list[tuple[int, ...]] = []

    def policy(tensor: torch.Tensor) -> hp.CheckpointPolicy:
        offered.append(tuple(sorted(tensor.shape)))
        return hp.CheckpointPolicy.MUST_SWAP

    hp.reset_stats()
    model = OUTER[outer](mesh, wrapped(inner, policy, **options))
    assert_same_bits(train(model, rank, nullcontext), expected)
    assert bool(offered) == inner.endswith("swap")
    assert not shapes & set(offered), f"weights were offered: {shapes & set(offered)}"
    stats = hp.stats()
    assert nbytes > 0
    steps = 2
    # A weight among what was moved, sharded, gathered or cast, would show here.
    assert (stats.d2h_bytes, stats.h2d_bytes) == (steps * nbytes, steps * nbytes), (nbytes, stats)
    assert_at_rest(hp)


def run_rank(rank: int, directory: str) -> None:
    os.environ.update({f"EBBTIDE_{name}": value for name, value in EXACT.items()})
    run_cases(CASES, run_case, rank, directory, TIMEOUT)
