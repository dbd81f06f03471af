"""What the tests of selective checkpointing share: a plain session as where results go, policies, the comparison."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from torch_support import assert_same_bits
from training import WIDTH, make_input, offload

from ebbtide import CheckpointPolicy
from ebbtide._core import Saving
from ebbtide.torch.selective import selective_contexts

aten = torch.ops.aten
ROWS = 16
HIDDEN_BYTES = ROWS * WIDTH * 4

SAVE, SWAP, RECOMPUTE = (
    CheckpointPolicy.MUST_SAVE,
    CheckpointPolicy.MUST_SWAP,
    CheckpointPolicy.MUST_RECOMPUTE,
)


class Swaps:
    """A session, and the epoch of each region's forward."""

    def __init__(self, **options: Any) -> None:
        self.tide = offload(to="host", **options)
        self.session = self.tide._session
        self.weights = self.tide._weights

    def __call__(self) -> Region:
        return Region(self)

    def stats(self) -> Any:
        return self.tide.stats()


class Region:
    def __init__(self, swaps: Swaps) -> None:
        self.session = swaps.session
        self.saving = Saving(0, swaps.weights)
        self.unpack = swaps.session.unpack

    def __enter__(self) -> Region:
        self.epoch = self.session.begin_epoch()
        self.saving.epoch = self.epoch.number
        return self

    def __exit__(self, *error: object) -> None:
        self.epoch.end()

    def pack(self, tensor: torch.Tensor) -> Any:
        return self.session.pack(tensor, self.saving)


def answering(answers: dict[Any, Any], others: Any = RECOMPUTE) -> Callable[..., Any]:
    return lambda ctx, op, *args, **kwargs: answers.get(op, others)


def everything(answer: Any) -> Callable[..., Any]:
    return lambda ctx, op, *args, **kwargs: answer


Function = Callable[..., torch.Tensor]


def run(function: Function, *inputs: torch.Tensor, contexts: Any = None) -> list[torch.Tensor]:
    """The result and the gradients; checkpointed where contexts are given."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    torch.manual_seed(5)
    if contexts is None:
        out = function(*leaves)
    else:
        out = checkpoint(function, *leaves, use_reentrant=False, context_fn=contexts)
    out.square().sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def check(
    swaps: Swaps, function: Function, policy: Any, *inputs: torch.Tensor, **options: Any
) -> None:
    inputs = inputs or (make_input(ROWS),)
    expected = run(function, *inputs)
    contexts = partial(selective_contexts, policy, swaps, **options)
    assert_same_bits(run(function, *inputs, contexts=contexts), expected)


def mlp(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return ((x @ weight).tanh() @ weight.t()).exp() * ((x * 2).sigmoid() @ weight).sin()


MATRIX = partial(make_input, WIDTH, seed=2)


class Nth:
    """Answers one call of an operator otherwise than the rest."""

    def __init__(self, op: Any, nth: int, answer: Any) -> None:
        self.op, self.left, self.answer = op, nth, answer

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        if op is self.op:
            self.left -= 1
            if self.left == 0:
                return self.answer
        return RECOMPUTE
