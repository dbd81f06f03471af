"""HyperParallel's names in compiled code: they work, or say that they do not."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from harness import Hyper
from torch import nn
from torch_layers import blocks, train
from torch_support import assert_same_bits
from training import make_input

import ebbtide.hyper_parallel as hp

if not torch._dynamo.is_dynamo_supported():
    pytest.skip("torch.compile does not support this Python", allow_module_level=True)

# Torch's own, while it compiles.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace"),
]

PRODUCTS = (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
NOT_OFFLOADED = "MUST_SWAP .* in compiled code, where it saves"


@pytest.fixture(autouse=True)
def nothing_compiled_yet() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def swapping() -> Callable[..., hp.CheckpointPolicy]:
    """A new one each time: each is told of once."""
    policy = hp.CheckpointPolicy
    return lambda ctx, op, *args, **kwargs: (
        policy.MUST_SWAP if op in PRODUCTS else policy.PREFER_RECOMPUTE
    )


def recomputing(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> hp.CheckpointPolicy:
    return hp.CheckpointPolicy.MUST_RECOMPUTE


class Calling(nn.Module):
    """The model, with a call of one of its layers in the middle."""

    def __init__(self, model: nn.Module, call: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.model = model
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self.model, x) * 2


def saved_on_cpu(layer: nn.Module, x: torch.Tensor, options: Any) -> torch.Tensor:
    with hp.async_save_on_cpu(**options):
        return layer(x)


SWAPS: dict[str, Callable[[nn.Module, Any], nn.Module]] = {
    "swap_wrapper": lambda model, options: Calling(
        hp.swap_wrapper(model, **options), lambda layer, x: layer(x)
    ),
    "swap": lambda model, options: Calling(model, functools.partial(hp.swap, **options)),
    "async_save_on_cpu": lambda model, options: Calling(
        model, functools.partial(saved_on_cpu, options=options)
    ),
}


@pytest.mark.parametrize("name", list(SWAPS))
def test_swapped_calls_in_compiled_code_move_bytes(hyper: Hyper, name: str) -> None:
    expected = train(Calling(blocks(2), lambda layer, x: layer(x)), make_input())
    model = torch.compile(SWAPS[name](blocks(2), hyper.options), backend="aot_eager")
    for _ in range(2):
        hp.reset_stats()
        assert_same_bits(train(model, make_input()), expected)
        stats = hp.stats()
        assert stats.d2h_bytes == stats.h2d_bytes > 0, stats
        hyper.assert_at_rest()


@pytest.mark.parametrize("name", list(SWAPS))
def test_swapped_calls_are_refused_in_a_full_graph(name: str) -> None:
    model = torch.compile(SWAPS[name](blocks(2), {}), backend="eager", fullgraph=True)
    place = "async_save_on_cpu" if name == "async_save_on_cpu" else "swap"
    with pytest.raises(torch._dynamo.exc.Unsupported, match=rf"\[{place}\].*fullgraph"):
        model(make_input())


def with_policy(model: nn.Module, policy: Any, options: Any) -> nn.Module:
    return hp.checkpoint_wrapper(model, policy_fn=policy)  # options that name a pool are refused


def with_contexts(model: nn.Module, policy: Any, options: Any) -> nn.Module:
    contexts = functools.partial(hp.create_selective_checkpoint_contexts, policy, **options)
    options = {"use_reentrant": False, "context_fn": contexts}
    return Calling(model, lambda layer, x: torch_checkpoint.checkpoint(layer, x, **options))


@pytest.mark.parametrize("compiler, fullgraph", [("eager", True), ("aot_eager", False)])
def test_must_swap_in_a_compiled_checkpoint_warns(
    hyper: Hyper, compiler: str, fullgraph: bool
) -> None:
    expected = train(blocks(2), make_input())
    region = with_policy(blocks(2), swapping(), hyper.options)
    model = torch.compile(region, backend=compiler, fullgraph=fullgraph)
    with pytest.warns(RuntimeWarning, match=NOT_OFFLOADED) as caught:
        assert_same_bits(train(model, make_input()), expected)
        assert_same_bits(train(model, make_input()), expected)
    texts = [str(warning.message) for warning in caught]
    assert len([text for text in texts if "MUST_SWAP" in text]) == 1, texts
    assert texts[0].startswith("[checkpoint]") and "aten.addmm" in texts[0], texts
    assert hyper.stats().saved_tensors == 0


def test_must_swap_contexts_in_compiled_code_warn(hyper: Hyper) -> None:
    plain = Calling(blocks(2), lambda layer, x: layer(x))
    expected = train(plain, make_input())
    region = with_contexts(blocks(2), swapping(), hyper.options)
    model = torch.compile(region, backend="aot_eager", fullgraph=True)
    with pytest.warns(RuntimeWarning, match=NOT_OFFLOADED):
        assert_same_bits(train(model, make_input()), expected)
    assert hyper.stats().saved_tensors == 0


@pytest.mark.parametrize("make", [with_policy, with_contexts])
def test_policies_that_swap_nothing_say_nothing(make: Any) -> None:
    model = torch.compile(make(blocks(2), recomputing, {}), backend="aot_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        train(model, make_input())


@pytest.mark.parametrize("make", [with_policy, with_contexts])
def test_a_compiled_region_recomputes_what_its_policy_says(make: Any) -> None:
    def saved_bytes(model: nn.Module) -> int:
        weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
        storages = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
            return tensor

        compiled = torch.compile(model, backend="aot_eager")
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            compiled(make_input()).sum().backward()
        return sum(s.nbytes() for address, s in storages.items() if address not in weights)

    everything = saved_bytes(Calling(blocks(2), lambda layer, x: layer(x)))
    inputs = make_input().untyped_storage().nbytes()
    assert saved_bytes(make(blocks(2), recomputing, {})) == inputs < everything


def test_what_the_warning_advises_moves_bytes(hyper: Hyper) -> None:
    expected = train(blocks(2), make_input())
    region = with_policy(blocks(2), swapping(), hyper.options)
    model = functools.partial(hp.swap, torch.compile(region, backend="aot_eager"), **hyper.options)
    with pytest.warns(RuntimeWarning, match="call the compiled function under swap"):
        assert_same_bits(train(region, make_input(), model), expected)
    stats = hyper.stats()
    assert stats.d2h_bytes == stats.h2d_bytes > 0, stats
