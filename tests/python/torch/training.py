"""Small models and single steps for the tests: the same step, plain or under a context."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from support import DEVICE, EXACT, assert_at_rest, assert_loaded
from torch import nn
from torch_support import assert_same_bits

import ebbtide.torch as ebb

WIDTH = 32


class Block(nn.Module):
    """Residual, normalised, with a view and a tensor saved more than once."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.up(self.norm(x)).chunk(2, dim=-1)
        return x + self.down(torch.sigmoid(gate) * value.tanh())


def make_model(depth: int = 3, width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(*(Block(width) for _ in range(depth)))


def make_input(rows: int = 16, width: int = WIDTH, seed: int = 1) -> torch.Tensor:
    """Not a leaf that needs a gradient, so that the first block's input is an activation too."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator, device="cpu").to(DEVICE)


Step = Callable[[AbstractContextManager[Any]], list[torch.Tensor | None]]


def step(
    model: nn.Module, x: torch.Tensor, context: AbstractContextManager[Any] | None = None
) -> list[torch.Tensor | None]:
    """The loss and every gradient of one forward and backward; ``context`` is around forward."""
    model.zero_grad(set_to_none=True)
    with context or nullcontext():
        loss = model(x).square().mean()
    loss.backward()
    return [loss.detach(), *gradients(model)]


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def offload(model: nn.Module | None = None, **options: Any) -> ebb.Offload:
    """An offload object that copies all it can, to disk unless told otherwise."""
    return ebb.offload(model, **{"to": "disk", **EXACT, **options})


def assert_step_equal(tide: ebb.Offload, model: nn.Module, x: torch.Tensor) -> None:
    """One step under ``tide`` has the bits of the plain one, moved bytes, and left nothing."""
    expected = step(model, x)
    tide.reset_stats()
    assert_same_bits(step(model, x, tide), expected)
    assert_loaded(tide)
    assert_at_rest(tide)


@contextmanager
def raised_text(kind: type[BaseException]) -> Iterator[list[str]]:
    """Expects ``kind`` and hands out its text, without keeping the error or its frames alive."""
    text: list[str] = []
    try:
        yield text
    except kind as error:
        assert type(error) is kind, repr(error)
        text.append(str(error))
    else:
        raise AssertionError(f"{kind.__name__} was not raised")
