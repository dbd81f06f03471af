"""Policies of recomputed regions on torch: results that are saved, leave or are recomputed; contexts inside and around."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from harness import Hyper
from recompute_regions import (
    HIDDEN_BYTES,
    RECOMPUTE,
    SAVE,
    SWAP,
    Regions,
    aten,
    check,
    leaf,
    make,
    products,
)
from torch import nn
from torch_support import assert_same_bits

import ebbtide.hyper_parallel as hp
import ebbtide.torch as ebb
from ebbtide.errors import UsageError


@pytest.mark.parametrize("answer", [SAVE, SWAP, RECOMPUTE, True])
@pytest.mark.parametrize("swap_inputs", [False, True])
def test_policies(hyper: Hyper, answer: Any, swap_inputs: bool) -> None:
    plain = make(hyper)
    options = {"policy_fn": products(answer), "swap_inputs": swap_inputs, **hyper.options}
    check(hyper, Regions(plain, partial(hp.checkpoint, **options)), plain, leaf(hyper))
    stats = hp.stats()
    swapped = 3 * 3 * HIDDEN_BYTES if answer is SWAP else 0
    inputs = HIDDEN_BYTES if swap_inputs else 0  # the second block's
    assert stats.d2h_bytes == swapped + inputs
    assert stats.unfreed_bytes == 0


def test_a_list_of_operations(hyper: Hyper) -> None:
    plain = make(hyper)
    model = Regions(plain, partial(hp.checkpoint, policy_fn=[aten.addmm.default]))
    check(hyper, model, plain, leaf(hyper))


def test_contexts_for_torchs_own_checkpoint(hyper: Hyper) -> None:
    plain = make(hyper)
    contexts = partial(hp.create_selective_checkpoint_contexts, products(SWAP), **hyper.options)
    call = partial(torch_checkpoint.checkpoint, use_reentrant=False, context_fn=contexts)
    check(hyper, Regions(plain, call), plain, leaf(hyper))
    assert hp.stats().d2h_bytes == 9 * HIDDEN_BYTES


def test_contexts_stack(hyper: Hyper) -> None:
    entered: list[str] = []

    class Note:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            entered.append(self.name)

        def __exit__(self, *error: object) -> None:
            entered.append(f"-{self.name}")

    plain = make(hyper, 1)
    options = {"policy_fn": products(SWAP), **hyper.options}
    call = partial(hp.checkpoint, context_fn=lambda: (Note("forward"), Note("again")), **options)
    check(hyper, Regions(plain, call), plain, leaf(hyper))
    assert entered == ["forward", "-forward", "again", "-again"] * 3
    assert hp.stats().d2h_bytes > 0


def test_two_policies_stack_and_torchs_does_not(hyper: Hyper) -> None:
    plain = make(hyper)
    options = {"policy_fn": [aten.addmm.default], **hyper.options}
    other = partial(hp.create_selective_checkpoint_contexts, [aten.tanh.default])
    call = partial(hp.checkpoint, context_fn=other, **options)
    check(hyper, Regions(plain, call), plain, leaf(hyper))
    foreign = partial(torch_checkpoint.create_selective_checkpoint_contexts, [aten.tanh.default])
    with pytest.raises(UsageError, match="create_selective_checkpoint_contexts"):
        hp.checkpoint(plain[0], leaf(hyper), context_fn=foreign, **options)


def test_a_result_that_an_outer_swap_saves_too_moves_once(hyper: Hyper) -> None:
    """The region's output is swapped by its policy, and saved by the operation behind it under the outer hooks."""

    def body(x: torch.Tensor) -> torch.Tensor:
        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
            return SWAP if op is aten.exp.default else RECOMPUTE

        y = hp.checkpoint(lambda x: x.sin().exp(), x, policy_fn=policy, **hyper.options)
        return (y.sin() * y).tanh()

    def plain(x: torch.Tensor) -> torch.Tensor:
        y = x.sin().exp()
        return (y.sin() * y).tanh()

    x = leaf(hyper)
    expected = torch.autograd.grad(plain(x).clone().sum(), x)
    out = hp.swap(body, x, **hyper.options).clone().sum()
    out.backward()
    assert_same_bits([x.grad], expected)
    stats = hp.stats()
    # Of exp, sin and tanh; the last is held to the end, as is x.
    assert stats.d2h_bytes == stats.h2d_bytes == 2 * HIDDEN_BYTES
    assert (stats.storages, stats.exact_duplicates, stats.unfreed_bytes) == (4, 2, 0)
    del out
    hyper.assert_at_rest()


@pytest.mark.parametrize("inner", ["swap", "offload", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("outer", ["none", "swap", "offload"])
def test_inside_and_around(hyper: Hyper, inner: str, outer: str) -> None:
    plain = make(hyper)
    tide = ebb.offload(
        plain,
        device=hyper.backend.device,
        to="host",
        min_bytes=0,
        keep_last_bytes=0,
        in_flight_bytes=0,
    )

    def body(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if inner == "swap":
            return hp.swap(block, x, **hyper.options)
        if inner == "offload":
            with tide:
                return block(x)
        return torch_checkpoint.checkpoint(block, x, use_reentrant=inner == "reentrant")

    def call(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        options = {"policy_fn": products(SWAP), "swap_inputs": True, **hyper.options}
        return hp.checkpoint(body, block, x, **options)

    regions = Regions(plain, call)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = plain

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if outer == "swap":
                return hp.swap(regions, x, **hyper.options)
            if outer == "offload":
                with tide:
                    return regions(x)
            return regions(x)

    check(hyper, Model(), plain, leaf(hyper))
    stats = tide.stats()
    assert (stats.entries, stats.device_bytes, stats.host_bytes) == (0, 0, 0)
    # What two objects save is held by each for the other: it stays.
    assert (hp.stats().d2h_bytes > 0) == (inner != "offload")
