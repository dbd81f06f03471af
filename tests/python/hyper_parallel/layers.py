"""A module of the framework under test that runs a function."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

if os.environ.get("EBBTIDE_TEST_BACKEND", "torch-cpu").startswith("torch"):
    import torch

    class _Layer(torch.nn.Module):
        def __init__(self, function: Callable[..., Any]) -> None:
            super().__init__()
            self.function = function

        def forward(self, *args: Any) -> Any:
            return self.function(*args)

else:
    import mindspore

    class _Layer(mindspore.nn.Cell):
        def __init__(self, function: Callable[..., Any]) -> None:
            super().__init__()
            self.function = function

        def construct(self, *args: Any) -> Any:
            return self.function(*args)


def make_layer(function: Callable[..., Any]) -> Any:
    """Without parameters; in MindSpore an ``nn.Cell``."""
    return _Layer(function)
