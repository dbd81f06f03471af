"""Activation checkpointing inside, around and between: equal, nothing managed twice, all at rest."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from support import assert_at_rest, assert_loaded
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)
from torch_support import assert_same_bits
from training import WIDTH, gradients, make_input, make_model, offload, raised_text, step

import ebbtide.torch as ebb

ROWS = 16
HIDDEN_BYTES = ROWS * WIDTH * 4

reentrant_or_not = pytest.mark.parametrize("reentrant", [False, True])


class Checkpointed(nn.Module):
    """Regions of a model checkpointed, the others not."""

    def __init__(self, model: nn.Sequential, regions: set[int], **options: Any) -> None:
        super().__init__()
        self.model = model
        self.regions = regions
        self.options = options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.model):
            x = checkpoint(block, x, **self.options) if index in self.regions else block(x)
        return x


def leaf_input() -> torch.Tensor:
    """A reentrant region differentiates nothing unless an input asks for it."""
    return make_input(ROWS).requires_grad_()


def check(model: nn.Module, plain: nn.Module, x: torch.Tensor, tide: ebb.Offload) -> None:
    """Equal to the plain model under no context, three times, and at rest after each."""
    expected = step(plain, x)
    for _ in range(3):
        assert_same_bits(step(model, x, tide), expected)
        assert_at_rest(tide)


@reentrant_or_not
@pytest.mark.parametrize("regions", [{0}, {1}, {2}, {0, 1, 2}, {0, 2}])
@pytest.mark.parametrize("to", ["disk", "host"])
def test_inside_the_context(reentrant: bool, regions: set[int], to: str) -> None:
    plain = make_model()
    model = Checkpointed(plain, regions, use_reentrant=reentrant)
    tide = offload(model, to=to)
    check(model, plain, leaf_input(), tide)
    if regions != {0}:  # whose input is a leaf that others hold
        assert_loaded(tide)


@reentrant_or_not
def test_regions_offload_only_their_inputs(reentrant: bool) -> None:
    """Nothing recomputed is managed: a region costs its input, once."""
    plain = make_model()
    model = Checkpointed(plain, {0, 1, 2}, use_reentrant=reentrant)
    tide = offload(model)
    with tide:
        loss = model(leaf_input()).square().mean()
    stats = tide.stats()
    # The inputs of two blocks leave; that of the first is held by the caller, or it died.
    assert 2 * HIDDEN_BYTES <= stats.d2h_bytes <= 4 * HIDDEN_BYTES
    loss.backward()
    after = tide.stats()
    assert after.saved_tensors == stats.saved_tensors
    assert after.d2h_bytes == stats.d2h_bytes
    assert after.h2d_bytes <= after.d2h_bytes
    assert_loaded(tide)
    del loss
    assert_at_rest(tide)


@reentrant_or_not
def test_backward_inside_the_context(reentrant: bool) -> None:
    """Then a reentrant region's recomputed tensors are saved under the context too."""
    plain, x = make_model(), leaf_input()
    expected = step(plain, x)
    model = Checkpointed(plain, {0, 1, 2}, use_reentrant=reentrant)
    tide = offload(model)
    for _ in range(2):
        model.zero_grad()
        with tide:
            loss = model(x).square().mean()
            saved = tide.stats().saved_tensors
            loss.backward()
            assert (tide.stats().saved_tensors > saved) == reentrant
        assert_same_bits([loss.detach(), *gradients(model)], expected)
        del loss
        assert_at_rest(tide)
    assert_loaded(tide)


class Around(nn.Module):
    """The context inside a region: entered again when the region is recomputed."""

    def __init__(self, model: nn.Sequential, tide: ebb.Offload, **options: Any) -> None:
        super().__init__()
        self.model, self.tide, self.options = model, tide, options

    def body(self, x: torch.Tensor) -> torch.Tensor:
        with self.tide:
            x = self.model[1](x)
        return self.model[2](x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.body, self.model[0](x), **self.options)


@reentrant_or_not
def test_context_inside_a_region(reentrant: bool) -> None:
    plain = make_model()
    tide = offload(plain)
    model = Around(plain, tide, use_reentrant=reentrant)
    check(model, plain, leaf_input(), offload(plain))  # a second object around it
    assert_at_rest(tide)
    expected = step(plain, leaf_input())
    assert_same_bits(step(model, leaf_input()), expected)
    assert tide.stats().saved_tensors > 0
    assert_at_rest(tide)


@reentrant_or_not
def test_between_contexts(reentrant: bool) -> None:
    plain, x = make_model(), leaf_input()
    expected = step(plain, x)
    tide = offload(plain)
    plain.zero_grad()
    with tide:
        hidden = plain[0](x)
    hidden = checkpoint(plain[1], hidden, use_reentrant=reentrant)
    with tide:
        loss = plain[2](hidden).square().mean()
    loss.backward()
    assert_same_bits([loss.detach(), *gradients(plain)], expected)
    assert_loaded(tide)
    del hidden, loss
    assert_at_rest(tide)


@reentrant_or_not
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_nested_regions(reentrant: bool) -> None:
    plain = make_model()

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = plain

        def outer(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(self.model[0], x, use_reentrant=reentrant)
            return checkpoint(self.model[1], x, use_reentrant=reentrant)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.model[2](checkpoint(self.outer, x, use_reentrant=reentrant))

    tide = offload(plain)
    check(Nested(), plain, leaf_input(), tide)
    assert_loaded(tide)


@reentrant_or_not
def test_inputs_in_a_list(reentrant: bool) -> None:
    """Hooks are offered the direct tensor inputs only; what is in a list stays, and is right."""
    plain, x = make_model(), leaf_input()

    class Lists(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = plain

        def body(self, anchor: torch.Tensor, tensors: list[torch.Tensor]) -> torch.Tensor:
            return self.model[1](tensors[0]) * tensors[1] + anchor

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.model[0](x)
            scale = hidden.sigmoid()
            if reentrant:  # gradients flow through direct inputs only
                hidden, scale = hidden.detach(), scale.detach()
            return self.model[2](self.run(self.model[0](x), [hidden, scale]))

        def run(self, anchor: torch.Tensor, tensors: list[torch.Tensor]) -> torch.Tensor:
            return self.body(anchor, tensors)

    class Checkpoints(Lists):
        def run(self, anchor: torch.Tensor, tensors: list[torch.Tensor]) -> torch.Tensor:
            return checkpoint(self.body, anchor, tensors, use_reentrant=reentrant)

    tide = offload(plain)
    check(Checkpoints(), Lists(), x, tide)
    assert_loaded(tide)


def test_checkpoint_sequential() -> None:
    plain = make_model(depth=6)

    class Segments(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = plain

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint_sequential(self.model, 3, x, use_reentrant=False)

    tide = offload(plain)
    check(Segments(), plain, leaf_input(), tide)
    assert_loaded(tide)


def save_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    products = (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize(
    "contexts",
    [
        partial(create_selective_checkpoint_contexts, save_products),
        partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default]),
    ],
    ids=["policy", "operators"],
)
def test_selective(contexts: Callable[[], Any]) -> None:
    plain = make_model()
    model = Checkpointed(plain, {0, 1, 2}, use_reentrant=False, context_fn=contexts)
    tide = offload(plain)
    check(model, plain, leaf_input(), tide)
    assert_loaded(tide)


@reentrant_or_not
def test_dropout_is_recomputed_alike(reentrant: bool) -> None:
    plain = nn.Sequential(*(nn.Sequential(b, nn.Dropout(0.5)) for b in make_model()))
    model = Checkpointed(plain, {0, 1, 2}, use_reentrant=reentrant)
    x = leaf_input()
    found = []
    tide = offload(plain)
    for context in (nullcontext(), tide):
        torch.manual_seed(3)
        found.append(step(model, x, context))
    assert_same_bits(found[1], found[0])
    assert_loaded(tide)
    assert_at_rest(tide)


def test_user_error_in_a_recomputation() -> None:
    plain, x = make_model(), leaf_input()
    calls: list[int] = []

    class Second(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            if len(calls) == 2:
                raise KeyError("recomputed")
            return x.exp()

    model = Checkpointed(nn.Sequential(*plain, Second()), {1, 3}, use_reentrant=False)
    tide = offload(model)
    with raised_text(KeyError) as text:
        step(model, x, tide)
    assert text == ["'recomputed'"]
    assert_at_rest(tide)


# --- only="layer_inputs"


@reentrant_or_not
@pytest.mark.parametrize("regions", [{0, 1, 2}, {1}, {1, 2}])
def test_layer_inputs(reentrant: bool, regions: set[int]) -> None:
    """Of all that is saved only the inputs of the regions move."""
    plain = make_model()
    model = Checkpointed(plain, regions, use_reentrant=reentrant)
    tide = offload(model, only="layer_inputs")
    check(model, plain, leaf_input(), tide)
    assert_loaded(tide)
    stats = tide.stats()
    own = len(regions - {0})  # block 0's input is the caller's
    assert stats.d2h_bytes == stats.h2d_bytes == 3 * own * HIDDEN_BYTES
    assert stats.storages == 3 * len(regions)
    assert stats.kept["policy"] > 0


def test_layer_inputs_without_regions() -> None:
    plain = make_model()
    tide = offload(plain, only="layer_inputs")
    check(plain, plain, leaf_input(), tide)
    stats = tide.stats()
    assert (stats.storages, stats.d2h_bytes) == (0, 0)
    assert stats.kept["policy"] > 0


def exp_of_sum(*tensors: torch.Tensor) -> torch.Tensor:
    return torch.stack(tensors).sum(0).exp()


@reentrant_or_not
@pytest.mark.parametrize(("function", "inputs"), [(exp_of_sum, 1), (exp_of_sum, 3), (torch.exp, 1)])
def test_layer_inputs_of_a_bare_function(
    function: Callable[..., torch.Tensor], inputs: int, reentrant: bool
) -> None:
    """Called by the checkpoint itself, also when it recomputes: what that saves is no input."""
    x = leaf_input()

    def run(call: Callable[..., torch.Tensor]) -> torch.Tensor:
        return call(*(x + index for index in range(inputs))).sum()

    expected = torch.autograd.grad(run(function), x)
    tide = offload(only="layer_inputs")
    with tide:
        loss = run(partial(checkpoint, function, use_reentrant=reentrant))
    with tide:
        loss.backward()
    assert_same_bits([x.grad], expected)
    stats = tide.stats()
    assert stats.storages == inputs
    assert stats.d2h_bytes == stats.h2d_bytes == inputs * HIDDEN_BYTES
    del loss
    assert_at_rest(tide)
