"""Trains a model of the zoo, plain or under Ebbtide, and notes every bit and every byte of each step."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from saved_bytes import SavedBytes
from support import DEVICE
from torch import nn
from torch.utils._pytree import tree_leaves
from torch_saved_bytes import count_saved
from torch_support import assert_same_bits
from zoo import SMALL, ZOO, Batch, Size

import ebbtide.torch as ebb
from ebbtide.report import Stats

STEPS = 3


@dataclass(frozen=True)
class Training:
    """What is trained, and how."""

    name: str
    size: Size = SMALL
    autocast: bool = False
    reentrant: bool | None = None
    """Of gradient checkpointing; None leaves it off."""
    keeps_outputs: bool = False
    """Whether the caller keeps all that the model returns until backward is over."""

    def make_model(self) -> nn.Module:
        torch.manual_seed(0)
        model = ZOO[self.name].make(self.size).train().to(DEVICE)
        if hasattr(model, "tie_weights"):
            model.tie_weights()  # a move to some devices makes every parameter anew
        if self.reentrant is not None:
            options = {"use_reentrant": self.reentrant}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        return model

    def batch(self, step: int) -> Batch:
        batch = ZOO[self.name].batch(self.size, torch.Generator().manual_seed(step))
        return {name: tensor.to(DEVICE) for name, tensor in batch.items()}

    def forward(self, model: nn.Module, batch: Batch, step: int) -> tuple[torch.Tensor, Any]:
        torch.manual_seed(step)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=self.autocast):
            loss, output = ZOO[self.name].run(model, batch)
        return loss, output if self.keeps_outputs else None


@dataclass(frozen=True)
class Moved:
    """What Ebbtide says of one step."""

    after_forward: Stats
    after_backward: Stats
    at_rest: Stats


@dataclass(frozen=True)
class Step:
    loss: torch.Tensor
    gradients: list[torch.Tensor | None]
    buffers: list[torch.Tensor]
    outputs: list[torch.Tensor]
    """As the caller reads them after backward, where it keeps them."""
    batch: Batch
    saved: SavedBytes | None = None
    moved: Moved | None = None


def train(
    training: Training, model: nn.Module, tide: ebb.Offload | None = None, *, count: bool = False
) -> list[Step]:
    """Three optimizer steps. ``count`` also counts what each forward saves, on a copy."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    steps = []
    for number in range(STEPS):
        batch = training.batch(number)
        saved = _count(training, model, batch, number) if count else None
        if tide is not None:
            tide.reset_stats()
        with tide or nullcontext():
            loss, output = training.forward(model, batch, number)
        after_forward = _stats(tide)
        loss.backward()
        after_backward = _stats(tide)
        outputs = [tensor.detach().clone() for tensor in tree_leaves(output) if tensor is not None]
        loss, output = loss.detach(), None
        moved = None if tide is None else Moved(after_forward, after_backward, _stats(tide))
        gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        buffers = [buffer.clone() for buffer in model.buffers()]
        steps.append(Step(loss, gradients, buffers, outputs, batch, saved, moved))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return steps


@cache
def plain(training: Training) -> list[Step]:
    """Without Ebbtide, and counted."""
    return train(training, training.make_model(), count=True)


def train_and_compare(training: Training, **options: Any) -> tuple[ebb.Offload, list[Step]]:
    """Under Ebbtide; every loss, gradient and buffer has the bits of the plain training."""
    expected = plain(training)
    model = training.make_model()
    tide = ebb.offload(model, device=DEVICE, **options)
    found = train(training, model, tide)
    assert len({step.loss.item() for step in found}) == STEPS  # it does train
    for a, b in zip(found, expected, strict=True):
        assert_same_bits([a.loss], [b.loss])
        assert_same_bits(a.gradients, b.gradients)
        assert_same_bits(a.buffers, b.buffers)
        assert_same_bits(a.outputs, b.outputs)
    return tide, found


def _count(training: Training, model: nn.Module, batch: Batch, number: int) -> SavedBytes:
    model = copy.deepcopy(model)  # running statistics are not to move twice
    weights = [*model.parameters(), *model.buffers()]
    return count_saved(lambda: training.forward(model, batch, number), weights)


def _stats(tide: ebb.Offload | None) -> Any:
    if tide is None:
        return None
    tide.synchronize()
    return tide.stats()
