"""What a case is, the parts that cases are built from, and the list of all of them.

A case makes a scenario: leaves, weights and one step over them, with a small tail at the end of
forward. Nothing here knows an offloader or measures anything; equal scenarios give equal bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

Enter = Callable[[], AbstractContextManager[Any]]

SIDE = 512
"""A square activation of this many rows takes 1 MiB."""
_TAIL = 1024


@dataclass
class Forward:
    """What a step of a user holds between forward and backward."""

    losses: list[torch.Tensor]
    held: list[torch.Tensor] = field(default_factory=list)


@dataclass
class Scenario:
    """One step, to be run any number of times."""

    forward: Callable[[Enter], Forward]
    """Everything that saves tensors runs inside contexts that ``Enter`` makes."""
    leaves: Sequence[torch.Tensor]
    """What gradients are taken by."""
    weights: Sequence[torch.Tensor] = ()
    """Parameters and buffers: to be left where they are."""
    model: torch.nn.Module | None = None
    backward: Callable[[Forward], list[torch.Tensor | None]] | None = None
    """Outside all contexts; by default the gradients of the sum of the losses."""

    def gradients(self, forward: Forward) -> list[torch.Tensor | None]:
        if self.backward is not None:
            return self.backward(forward)
        return gradients(sum(forward.losses[1:], forward.losses[0]), self.leaves)


@dataclass(frozen=True)
class Case:
    kind: str
    name: str
    what: str
    make: Callable[[str], Scenario]
    """Takes the device type."""
    checkpointed: bool = False
    """A model of transformers under its own activation checkpointing."""


def gradients(
    loss: torch.Tensor, leaves: Sequence[torch.Tensor], **options: Any
) -> list[torch.Tensor | None]:
    return list(torch.autograd.grad(loss, list(leaves), allow_unused=True, **options))


def leaf(device: str, *sizes: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """The same bits on every device."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(sizes or (SIDE, SIDE), generator=generator, dtype=dtype)
    return values.to(device).requires_grad_()


def activation(x: torch.Tensor) -> torch.Tensor:
    """A fresh storage that depends on ``x``; saves nothing."""
    return x * 1.5


def tail(y: torch.Tensor) -> torch.Tensor:
    """A loss. Saves 4 KiB: offloaders that keep the last saved tensor keep this one."""
    return y.reshape(_TAIL, -1).mean(1).sin().sum()


def simple(
    program: Callable[..., torch.Tensor], device: str, *shapes: Sequence[int], **options: Any
) -> Scenario:
    """The tail of what ``program`` makes of its leaves, in one context."""
    leaves = [
        leaf(device, *shape, seed=seed, **options) for seed, shape in enumerate(shapes or [()])
    ]

    def forward(enter: Enter) -> Forward:
        with enter():
            return Forward([tail(program(*leaves))])

    return Scenario(forward, leaves)


class Save(torch.autograd.Function):
    """Equals its first argument and saves the rest, of which backward reads every bit."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, reads: int, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        ctx.reads = reads
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        total = torch.ones((), dtype=torch.int64, device=grad.device)
        for _ in range(ctx.reads):
            for place, tensor in enumerate(ctx.saved_tensors):
                total = total + (place + 1) * _digest(tensor)
        return grad * total, *(None for _ in ctx.needs_input_grad[1:])


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    """A number below 1000 that depends on each byte and its place; stays on the device."""
    plain = tensor.detach().resolve_conj().clone(memory_format=torch.contiguous_format)
    words = plain.reshape(-1).view(torch.int32).to(torch.int64)
    places = torch.arange(words.numel(), device=words.device) % 251 + 1
    return (words * places).sum() % 1000


def all_cases() -> list[Case]:
    from peers import lifecycles, models, ownership, patterns

    return [*patterns.CASES, *ownership.CASES, *lifecycles.CASES, *models.CASES]
