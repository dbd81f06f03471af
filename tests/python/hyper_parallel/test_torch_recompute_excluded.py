"""Modules in recomputed regions that are not recomputed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from harness import Hyper
from recompute_regions import (
    HIDDEN_BYTES,
    ROWS,
    SAVE,
    SWAP,
    aten,
    check,
    leaf,
    make,
    products,
)
from torch import nn
from torch_support import assert_same_bits
from training import WIDTH, step

import ebbtide.hyper_parallel as hp
from ebbtide.errors import InplaceModificationError, UsageError


class Counted(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inner(x)


def region_of(*blocks: nn.Module, **options: Any) -> nn.Module:
    return hp.checkpoint_wrapper(nn.Sequential(*blocks), early_stop=False, **options)


@pytest.mark.parametrize("save_output", [True, False])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("policy", [None, SAVE, SWAP])
def test_an_excluded_module(hyper: Hyper, save_output: bool, place: int, policy: Any) -> None:
    """What it saved in forward is what its backward takes."""
    plain = make(hyper)
    counted = [Counted(block) for block in plain]
    blocks: list[nn.Module] = list(counted)
    blocks[place] = hp.checkpoint_exclude_wrapper(blocks[place], save_output=save_output)
    policy_fn = None if policy is None else products(policy)
    model = region_of(*blocks, swap_inputs=True, policy_fn=policy_fn, **hyper.options)
    check(hyper, model, plain, leaf(hyper))
    again = [3, 3, 3]
    again[place] = 0 if save_output else 3
    assert [block.calls for block in counted] == [3 + n for n in again]


def test_excluded_modules_go_through_outer_hooks(hyper: Hyper) -> None:
    plain = make(hyper)
    region = region_of(plain[0], hp.checkpoint_exclude_wrapper(plain[1]), plain[2])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.region = region

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return hp.swap(region, x, **hyper.options)

    check(hyper, Model(), plain, leaf(hyper))
    assert hp.stats().d2h_bytes > 3 * HIDDEN_BYTES


@pytest.mark.parametrize("save_output", [True, False])
def test_random_numbers_behind_an_excluded_module(hyper: Hyper, save_output: bool) -> None:
    parts = [nn.Sequential(block, nn.Dropout(0.5)) for block in make(hyper)]
    plain = nn.Sequential(*parts)
    excluded = hp.checkpoint_exclude_wrapper(parts[1], save_output=save_output)
    model = region_of(parts[0], excluded, parts[2])
    x = leaf(hyper)
    torch.manual_seed(3)
    expected = step(plain, x)
    torch.manual_seed(3)
    assert_same_bits(step(model, x), expected)


def test_an_excluded_module_in_nested_regions(hyper: Hyper) -> None:
    plain = make(hyper)
    counted = Counted(plain[1])
    inner = region_of(plain[0], hp.checkpoint_exclude_wrapper(counted))
    with pytest.warns(RuntimeWarning, match="wrapped module"):
        model = region_of(inner, plain[2])
    check(hyper, model, plain, leaf(hyper))
    assert counted.calls == 3


def test_a_region_in_an_excluded_module(hyper: Hyper) -> None:
    plain = make(hyper)
    counted = Counted(plain[1])
    region = hp.checkpoint_wrapper(
        counted, swap_inputs=True, policy_fn=products(SWAP), **hyper.options
    )
    with pytest.warns(RuntimeWarning, match="wrapped module"):
        model = region_of(plain[0], hp.checkpoint_exclude_wrapper(region), plain[2])
    check(hyper, model, plain, leaf(hyper))
    assert counted.calls == 6


def test_an_excluded_output_that_is_written_to(hyper: Hyper) -> None:
    plain = make(hyper)
    block = hp.checkpoint_exclude_wrapper(plain[0])

    def function(x: torch.Tensor) -> torch.Tensor:
        return plain[1](block(x).mul_(2))

    with pytest.raises(InplaceModificationError) as caught:
        hp.checkpoint(function, leaf(hyper)).sum().backward()
    text = str(caught.value)
    assert text.startswith("[checkpoint_exclude_wrapper] the output of Block in region "), text
    assert "test_an_excluded_output_that_is_written_to.<locals>.function" in text, text
    assert "save_output=False" in text and "write to a copy" in text, text
    assert f"[{ROWS}, {WIDTH}]" in text and "modified by an inplace operation" in text, text


def test_excluded_outputs_in_containers(hyper: Hyper) -> None:
    x = leaf(hyper)
    calls: list[int] = []

    def parts(x: torch.Tensor) -> dict[str, Any]:
        calls.append(1)
        y = x.exp()
        return {"views": [y.t(), (y[:4], 3)], "plain": torch.arange(4, device=x.device)}

    excluded = hp.checkpoint_exclude_wrapper(parts)

    def function(call: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        found = call(x.sin())
        return (found["views"][0] * 2).cos().sum() + found["views"][1][0].sin().sum() * found[
            "plain"
        ].sum()

    expected = torch.autograd.grad(function(parts, x), x)
    calls.clear()
    hp.checkpoint(partial(function, excluded), x).backward()
    assert_same_bits([x.grad], expected)
    assert len(calls) == 1


def test_excluded_in_a_region_of_torchs_own_policies(hyper: Hyper) -> None:
    block = hp.checkpoint_exclude_wrapper(make(hyper, 1)[0])
    foreign = partial(torch_checkpoint.create_selective_checkpoint_contexts, [aten.tanh.default])
    with pytest.raises(UsageError, match="count the operations"):
        hp.checkpoint(block, leaf(hyper), context_fn=foreign)
