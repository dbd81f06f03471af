"""What the tests of recomputed regions share: a model of regions, compared step by step with the model without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # a first checkpoint would import it, and frames of the import hold what that one holds
from harness import Hyper
from torch import nn
from torch_support import assert_same_bits
from training import WIDTH, make_input, make_model, step

import ebbtide.hyper_parallel as hp

aten = torch.ops.aten
ROWS = 16
HIDDEN_BYTES = ROWS * WIDTH * 4
SAVE, SWAP, RECOMPUTE = (
    hp.CheckpointPolicy.MUST_SAVE,
    hp.CheckpointPolicy.MUST_SWAP,
    hp.CheckpointPolicy.MUST_RECOMPUTE,
)


class Regions(nn.Module):
    """Each block a region, called with a function of this module."""

    def __init__(self, model: nn.Sequential, call: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.model:
            x = self.call(block, x)
        return x


def make(hyper: Hyper, depth: int = 3) -> nn.Sequential:
    return make_model(depth).to(hyper.backend.device)


def data(hyper: Hyper, rows: int = ROWS, width: int = WIDTH, seed: int = 1) -> torch.Tensor:
    return make_input(rows, width, seed).to(hyper.backend.device)


def leaf(hyper: Hyper) -> torch.Tensor:
    return data(hyper).requires_grad_()


def products(answer: Any) -> Callable[..., Any]:
    ops = (aten.addmm.default, aten.mm.default)
    return lambda ctx, op, *args, **kwargs: answer if op in ops else RECOMPUTE


def check(hyper: Hyper, model: nn.Module, plain: nn.Module, x: torch.Tensor) -> None:
    for _ in range(3):
        expected = step(plain, x)
        hp.reset_stats()
        assert_same_bits(step(model, x), expected)
        hyper.assert_at_rest()


def behind(hyper: Hyper, loss: torch.Tensor) -> torch.Tensor:
    """Another region, after which what was held in those before is looked at again. Its own input is four bytes."""
    return hp.checkpoint(torch.exp, loss, swap_inputs=True, **hyper.options)
