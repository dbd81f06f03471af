"""Dispatch modes see the user's operations, and none of Ebbtide's: checkpointing, for one, counts what it sees."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support import DEVICE, assert_loaded
from torch.utils._python_dispatch import TorchDispatchMode
from training import offload


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        self.operations.append(str(func))
        return func(*args, **(kwargs or {}))


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.exp().sin().exp().sum()


def parts(x: torch.Tensor) -> torch.Tensor:
    """Of one storage, and not all of it."""
    y = x * 2
    z, w = y[100:-100].sin(), y[300:-300].cos()
    del y
    return z.exp().sum() + w.sum()


def step(forward: Callable[[torch.Tensor], torch.Tensor], context: Any, elements: int) -> list[str]:
    with Seen() as seen:
        x = torch.full((elements,), 0.5, device=DEVICE, requires_grad=True)
        with context:
            loss = forward(x)
        loss.backward()
    # PyTorch itself detaches what a hook gets and gives back.
    return [name for name in seen.operations if name != "aten.detach.default"]


# Sizes that no other test has: parts of the page-locked memory are made at first use, and kept.
@pytest.mark.parametrize("elements", [70_001, 90_007])
@pytest.mark.parametrize("group_swap", [False, True])
@pytest.mark.parametrize("forward", [whole, parts])
def test_modes_see_the_users_operations_alone(
    forward: Callable[[torch.Tensor], torch.Tensor], group_swap: bool, elements: int
) -> None:
    elements += 2 * (forward is whole) + group_swap
    tide = offload(to="host", group_swap=group_swap)
    assert step(forward, tide, elements) == step(forward, nullcontext(), elements)
    assert_loaded(tide)
