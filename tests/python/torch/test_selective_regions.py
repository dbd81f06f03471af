"""Regions of selective checkpointing: backward again, errors, several policies, nested, weights."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from selective_regions import (
    MATRIX,
    ROWS,
    SAVE,
    SWAP,
    Nth,
    Swaps,
    answering,
    aten,
    check,
    everything,
    run,
)
from support import DEVICE, assert_loaded
from torch.utils.checkpoint import checkpoint
from torch_support import assert_same_bits
from training import gradients, make_input, make_model, raised_text, step

from ebbtide.torch.selective import selective_contexts


def test_a_second_backward(swaps: Swaps) -> None:
    x = make_input().requires_grad_()
    contexts = partial(selective_contexts, everything(SWAP), swaps)
    out = checkpoint(mlp_of_one, x, use_reentrant=False, context_fn=contexts)
    out.sum().backward(retain_graph=True)
    with raised_text(RuntimeError) as text:
        out.sum().backward()
    assert text[0].startswith("Trying to backward an extra time")
    del out


def mlp_of_one(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * 2).exp()


def test_a_region_that_changes(swaps: Swaps) -> None:
    x = make_input().requires_grad_()
    flips: list[int] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        flips.append(1)
        return x.sin().exp() if len(flips) == 1 else x.cos().exp()

    contexts = partial(selective_contexts, everything(SAVE), swaps)
    out = checkpoint(function, x, use_reentrant=False, context_fn=contexts)
    with raised_text(RuntimeError) as text:
        out.sum().backward()
    assert "aten.cos.default" in text[0] and "changed between forward and backward" in text[0]
    del out


def test_no_backward_and_errors_leave_nothing(swaps: Swaps) -> None:
    x = make_input().requires_grad_()

    def failing(x: torch.Tensor) -> torch.Tensor:
        x.sin()
        raise KeyError("user")

    contexts = partial(selective_contexts, everything(SWAP), swaps)
    with raised_text(KeyError):
        checkpoint(failing, x, use_reentrant=False, context_fn=contexts)
    out = checkpoint(mlp_of_one, x, use_reentrant=False, context_fn=contexts)
    assert swaps.stats().entries > 0
    del out


@pytest.mark.parametrize(("inner", "outer"), [(SAVE, SWAP), (SWAP, SAVE), (SWAP, SWAP)])
def test_two_policies_on_one_region(inner: Any, outer: Any, swaps: Swaps) -> None:
    """Each keeps what it was told to; calls are numbered alike for both."""

    def stacked() -> tuple[Any, Any]:
        pairs = [
            selective_contexts(Nth(aten.mm.default, 2, outer), swaps),
            selective_contexts(Nth(aten.mm.default, 1, inner), swaps),
        ]
        stacks = ExitStack(), ExitStack()

        class Both:
            def __init__(self, index: int) -> None:
                self.index = index

            def __enter__(self) -> None:
                for pair in pairs:
                    stacks[self.index].enter_context(pair[self.index])

            def __exit__(self, *error: object) -> None:
                stacks[self.index].__exit__(*error)

        return Both(0), Both(1)

    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = (x @ weight).sin()
        return x

    inputs = make_input(ROWS), MATRIX()
    assert_same_bits(run(function, *inputs, contexts=stacked), run(function, *inputs))


@pytest.mark.parametrize("answer", [SAVE, SWAP])
def test_nested_regions(answer: Any, swaps: Swaps) -> None:
    contexts = partial(selective_contexts, answering({aten.mm.default: answer}), swaps)

    def inner(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (x @ weight).tanh() @ weight

    def outer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = checkpoint(inner, x.sin(), weight, use_reentrant=False, context_fn=contexts)
        return checkpoint(inner, y * x, weight, use_reentrant=False, context_fn=contexts)

    check(swaps, outer, answering({aten.mm.default: answer}), make_input(ROWS), MATRIX())


def test_weights_and_their_casts_stay(swaps: Swaps) -> None:
    model = make_model()
    x = make_input(ROWS)
    contexts = partial(selective_contexts, everything(SWAP), swaps)

    class Regions(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.model:
                x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
            return x

    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=dtype is torch.bfloat16):
            expected = step(model, x)
            assert_same_bits(step(Regions(), x), expected)
    assert all(gradient is not None for gradient in gradients(model))
    assert_loaded(swaps.tide)
    assert swaps.stats().unfreed_bytes == 0
