"""Blocks of PyTorch, plain and wrapped, and single steps over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from harness import Hyper
from support import DEVICE
from torch import nn
from torch_support import assert_same_bits
from training import gradients, make_input, make_model

import ebbtide.hyper_parallel as hp


def blocks(depth: int = 4) -> nn.Sequential:
    with torch.device(DEVICE):
        return make_model(depth)


def wrapped(model: nn.Sequential, hyper: Hyper, **options: Any) -> nn.Sequential:
    return nn.Sequential(*(hp.swap_wrapper(b, **hyper.options, **options) for b in model))


def chained(hyper: Hyper, depth: int = 4, **options: Any) -> nn.Sequential:
    model = wrapped(blocks(depth), hyper, **options)
    hyper.chain(*model)
    return model


def train(
    model: nn.Module, x: torch.Tensor, forward: Callable[..., Any] | None = None
) -> list[torch.Tensor | None]:
    """Output and every gradient of one step."""
    model.zero_grad(set_to_none=True)
    y = (forward or model)(x)
    y.square().mean().backward()
    return [y.detach(), *gradients(model)]


def expected(depth: int = 4, seed: int = 1) -> list[torch.Tensor | None]:
    return train(blocks(depth), make_input(seed=seed))


def assert_equal_and_moved(hyper: Hyper, model: nn.Module, depth: int = 4) -> None:
    hp.reset_stats()
    assert_same_bits(train(model, make_input()), expected(depth))
    stats = hyper.stats()
    assert stats.d2h_bytes > 0, stats
    assert stats.h2d_bytes == stats.d2h_bytes, stats
    assert stats.unfreed_bytes == 0, stats
    hyper.assert_at_rest()
