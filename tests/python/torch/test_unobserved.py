"""Dispatch modes see the user's operations, and none of Ebbtide's: checkpointing, for one, counts what it sees."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support import assert_loaded
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


def step(context: Any, elements: int) -> list[str]:
    with Seen() as seen:
        x = torch.full((elements,), 0.5, requires_grad=True)
        with context:
            y = x.exp().sin().exp()
        y.sum().backward()
    # PyTorch itself detaches what a hook gets and gives back.
    return [name for name in seen.operations if name != "aten.detach.default"]


# Sizes that no other test has: parts of the page-locked memory are made at first use, and kept.
@pytest.mark.parametrize("elements", [70_001, 90_007])
@pytest.mark.parametrize("group_swap", [False, True])
def test_modes_see_the_users_operations_alone(elements: int, group_swap: bool) -> None:
    elements += group_swap
    tide = offload(to="host", group_swap=group_swap)
    assert step(tide, elements) == step(nullcontext(), elements)
    assert_loaded(tide)
