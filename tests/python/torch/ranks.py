"""What two ranks do for the distributed tests: each case once plain, once under the context."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from gloo_ranks import run_cases
from support import assert_at_rest, assert_loaded
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch_support import assert_same_bits
from training import make_input, make_model, offload

import ebbtide.torch as ebb
from ebbtide import CheckpointPolicy

ROWS = 10  # unlike any dimension of a weight: a shape tells a weight from an activation
STEPS = 2
TIMEOUT = timedelta(seconds=60)

Context = Callable[[], AbstractContextManager[Any]]


class Trunk(nn.Module):
    """Blocks under a context, checkpointed or not; the context is for the forward of each."""

    def __init__(self, context: Context = nullcontext, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = make_model()
        self.context = context
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            with self.context():
                x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x.exp()).sin().tanh()).tanh()


def data_parallel(mesh: DeviceMesh, trunk: nn.Module) -> nn.Module:
    return DistributedDataParallel(trunk, bucket_cap_mb=0.01, gradient_as_bucket_view=True)


def sharded(mesh: DeviceMesh, trunk: nn.Module, **options: Any) -> nn.Module:
    for block in trunk.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(trunk, mesh=mesh, **options)


def sharded_bfloat16(mesh: DeviceMesh, trunk: nn.Module) -> nn.Module:
    return sharded(mesh, trunk, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def sharded_once(mesh: DeviceMesh, trunk: nn.Module) -> nn.Module:
    """Weights stay gathered between forward and backward."""
    return sharded(mesh, trunk, reshard_after_forward=False)


def tensor_parallel(mesh: DeviceMesh, trunk: nn.Module) -> nn.Module:
    trunk.blocks = nn.Sequential(Perceptron(), Perceptron())
    for block in trunk.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return trunk


WRAPPERS: dict[str, Callable[[DeviceMesh, nn.Module], nn.Module]] = {
    "ddp": data_parallel,
    "fsdp": sharded,
    "fsdp bfloat16": sharded_bfloat16,
    "fsdp gathered once": sharded_once,
    "tensor parallel": tensor_parallel,
}
PLACES = ("around", "inside", "around, checkpointed", "inside, checkpointed")
CASES = [f"{wrapper}, {place}" for wrapper in WRAPPERS for place in PLACES]


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def train(model: nn.Module, rank: int, around: Context) -> Iterator[torch.Tensor]:
    """Loss, gradients and new weights of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(STEPS):
        x = make_input(ROWS, seed=10 * index + rank).requires_grad_()
        with around():
            loss = model(x).float().square().mean()
        loss.backward()
        yield loss.detach()
        yield from (local(p.grad).clone() for p in model.parameters() if p.grad is not None)
        optimizer.step()
        optimizer.zero_grad()
        yield from (local(p.detach()).clone() for p in model.parameters())
        del loss


def run_case(case: str, rank: int, mesh: DeviceMesh) -> None:
    wrapper, _, place = case.partition(", ")
    inside, checkpointed = place.startswith("inside"), place.endswith("checkpointed")
    shapes = {tuple(sorted(p.shape)) for p in Trunk().parameters() if p.dim() > 1}
    offered: list[tuple[int, ...]] = []

    def policy(tensor: torch.Tensor) -> CheckpointPolicy:
        offered.append(tuple(sorted(tensor.shape)))
        return CheckpointPolicy.MUST_SWAP

    def run(tide: ebb.Offload | None) -> list[torch.Tensor]:
        def context() -> AbstractContextManager[Any]:
            return tide if tide is not None else nullcontext()

        trunk = Trunk(context if inside else nullcontext, checkpointed)
        model = WRAPPERS[wrapper](mesh, trunk)
        return list(train(model, rank, nullcontext if inside else context))

    expected = run(None)
    tide = offload(policy=policy)
    assert_same_bits(run(tide), expected)
    assert tide.stats().saved_tensors > 0
    assert_loaded(tide)
    assert_at_rest(tide)
    assert not shapes & set(offered), f"weights were offered: {shapes & set(offered)}"


def run_rank(rank: int, directory: str) -> None:
    run_cases(CASES, run_case, rank, directory, TIMEOUT)
