"""Recomputed regions on torch: inputs that leave, options, errors; wrappers and chains; equal to the model without."""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from harness import Hyper
from recompute_regions import (
    HIDDEN_BYTES,
    SWAP,
    Regions,
    aten,
    behind,
    check,
    data,
    leaf,
    make,
    products,
)
from torch import nn
from torch_support import assert_same_bits
from training import step

import ebbtide.hyper_parallel as hp
from ebbtide.errors import UsageError


def test_inputs_leave_and_nothing_else(hyper: Hyper) -> None:
    plain = make(hyper, 4)
    model = Regions(plain, partial(hp.checkpoint, swap_inputs=True, **hyper.options))
    check(hyper, model, plain, leaf(hyper))
    stats = hp.stats()
    # The first block's input is the caller's; the last one's is held until nothing follows that would look at it again.
    assert stats.d2h_bytes == stats.h2d_bytes == 2 * HIDDEN_BYTES
    assert (stats.storages, stats.live_hits, stats.unfreed_bytes) == (4, 2, 0)


def test_without_swap_nothing_moves(hyper: Hyper) -> None:
    plain = make(hyper)
    check(hyper, Regions(plain, hp.checkpoint), plain, leaf(hyper))
    assert hp.stats().saved_tensors == 0


Pair = namedtuple("Pair", "one other")


class _Inputs:
    """Ways to hand a region its tensors: what is passed, and how the region finds them."""

    @staticmethod
    def direct(x: Any, y: Any) -> tuple[Any, Any]:
        return (x, y), {}

    @staticmethod
    def listed(x: Any, y: Any) -> tuple[Any, Any]:
        return ([x, [y]],), {}

    @staticmethod
    def tupled(x: Any, y: Any) -> tuple[Any, Any]:
        return ((x, (3, y)),), {}

    @staticmethod
    def named(x: Any, y: Any) -> tuple[Any, Any]:
        return (Pair(x, y),), {}

    @staticmethod
    def mapped(x: Any, y: Any) -> tuple[Any, Any]:
        return ({"x": x, "others": OrderedDict(y=y)},), {}

    @staticmethod
    def keywords(x: Any, y: Any) -> tuple[Any, Any]:
        return (), {"x": x, "y": {"y": [y, None]}}


def leaves_of(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = list(tree.values())
    return (
        [found for item in tree for found in leaves_of(item)]
        if isinstance(tree, (tuple, list))
        else []
    )


def product(*args: Any, **kwargs: Any) -> torch.Tensor:
    x, y = leaves_of([args, kwargs])
    return (x.sin() * y.cos()).exp()


@pytest.mark.parametrize("way", ["direct", "listed", "tupled", "named", "mapped", "keywords"])
def test_inputs_in_containers(hyper: Hyper, way: str) -> None:
    x = leaf(hyper)
    arrange = getattr(_Inputs, way)
    seen: list[Any] = []

    def forward(call: Callable[..., Any]) -> torch.Tensor:
        args, kwargs = arrange(x * 2, x + 1)

        def function(*args: Any, **kwargs: Any) -> torch.Tensor:
            seen.append([args, kwargs])
            return product(*args, **kwargs)

        return call(function, *args, **kwargs).square().mean()

    expected = torch.autograd.grad(
        forward(lambda function, *a, **k: function(*a, **k)).exp().log(), x
    )
    seen.clear()
    loss = forward(partial(hp.checkpoint, swap_inputs=True, early_stop=False, **hyper.options))
    kinds = _kinds(seen.pop())
    loss = behind(hyper, loss).log()
    assert hp.stats().storages == 3
    loss.backward()
    assert_same_bits([x.grad], expected)
    assert _kinds(seen.pop()) == kinds
    stats = hp.stats()
    assert stats.d2h_bytes == stats.h2d_bytes == 2 * HIDDEN_BYTES
    del loss
    hyper.assert_at_rest()


def _kinds(tree: Any) -> Any:
    if isinstance(tree, dict):
        return type(tree), [(key, _kinds(item)) for key, item in tree.items()]
    if isinstance(tree, (list, tuple)):
        return type(tree), [_kinds(item) for item in tree]
    return type(tree)


def test_aliases_among_the_inputs_cross_once(hyper: Hyper) -> None:
    x = leaf(hyper)

    def function(parts: list[torch.Tensor], whole: torch.Tensor) -> torch.Tensor:
        return (parts[0] * parts[1]).sin().mean() + whole.cos().mean()

    def forward(call: Callable[..., Any]) -> torch.Tensor:
        y = x * 2
        return call(function, list(y.chunk(2, -1)), y.t())

    expected = torch.autograd.grad(forward(lambda function, *args: function(*args)).exp(), x)
    behind(hyper, forward(partial(hp.checkpoint, swap_inputs=True, **hyper.options))).backward()
    assert_same_bits([x.grad], expected)
    stats = hp.stats()
    assert (stats.storages, stats.d2h_copies, stats.d2h_bytes) == (2, 1, HIDDEN_BYTES)
    assert stats.h2d_bytes == HIDDEN_BYTES
    hyper.assert_at_rest()


def test_tensors_in_other_objects_stay_and_are_right(hyper: Hyper) -> None:
    class Box:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

    x = leaf(hyper)

    def forward(call: Callable[..., Any]) -> torch.Tensor:
        return call(lambda a, box: (a * box.tensor).exp(), x * 2, Box(x.sin())).mean()

    expected = torch.autograd.grad(forward(lambda function, *args: function(*args)).exp(), x)
    behind(hyper, forward(partial(hp.checkpoint, swap_inputs=True, **hyper.options))).backward()
    assert_same_bits([x.grad], expected)
    assert hp.stats().d2h_bytes == HIDDEN_BYTES
    hyper.assert_at_rest()


def test_the_options_of_torch_pass(hyper: Hyper) -> None:
    plain = nn.Sequential(*(nn.Sequential(block, nn.Dropout(0.5)) for block in make(hyper)))
    options = {"preserve_rng_state": True, "determinism_check": "none", "debug": False}
    model = Regions(plain, partial(hp.checkpoint, swap_inputs=True, **options, **hyper.options))
    x = leaf(hyper)
    torch.manual_seed(3)
    expected = step(plain, x)
    torch.manual_seed(3)
    assert_same_bits(step(model, x), expected)
    hyper.assert_at_rest()


def test_no_early_stop_runs_all(hyper: Hyper) -> None:
    calls: list[int] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.exp().clone()
        calls.append(1)
        return y

    for early_stop, times in ((True, 1), (False, 2)):
        calls.clear()
        hp.checkpoint(function, leaf(hyper), early_stop=early_stop).sum().backward()
        assert len(calls) == times


def test_no_grad_and_no_backward(hyper: Hyper) -> None:
    plain = make(hyper)
    options = {"swap_inputs": True, "policy_fn": products(SWAP), **hyper.options}
    model = Regions(plain, partial(hp.checkpoint, **options))
    x = leaf(hyper)
    with torch.no_grad():
        assert_same_bits([model(x)], [plain(x)])
    assert hp.stats().saved_tensors == 0
    out = model(x)
    assert hp.stats().d2h_bytes > 0
    del out
    hyper.assert_at_rest()


@pytest.mark.parametrize("place", ["forward", "recomputation"])
def test_user_errors_keep_their_type(hyper: Hyper, place: str) -> None:
    calls: list[int] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        y = x.sin().exp()
        if len(calls) == (1 if place == "forward" else 2):
            raise KeyError(place)
        return y.tanh()

    options = {"swap_inputs": True, "policy_fn": products(SWAP), **hyper.options}
    try:
        hp.checkpoint(function, leaf(hyper) * 2, **options).sum().backward()
    except KeyError as error:
        assert error.args == (place,)
    else:
        raise AssertionError
    hyper.assert_at_rest()


# --- wrappers


def test_the_wrapper_is_not_to_be_seen(hyper: Hyper) -> None:
    plain = make(hyper)
    wrapped = copy.deepcopy(plain)
    for index, block in enumerate(wrapped):
        wrapped[index] = hp.checkpoint_wrapper(block, swap_inputs=True, **hyper.options)
    assert all(isinstance(block, hp.CheckpointWrapper) for block in wrapped)
    assert [name for name, _ in wrapped.named_parameters()] == [
        name for name, _ in plain.named_parameters()
    ]
    assert list(wrapped.state_dict()) == list(plain.state_dict())
    wrapped.load_state_dict(plain.state_dict())
    check(hyper, wrapped, plain, leaf(hyper))
    assert hp.stats().d2h_bytes == HIDDEN_BYTES
    assert wrapped[0].up is wrapped[0].wrapped.up


def test_wrappers_are_copied_and_pickled(hyper: Hyper) -> None:
    plain = make(hyper, 1)
    wrapped = hp.checkpoint_wrapper(plain[0], policy_fn=[aten.addmm.default], early_stop=False)
    excluded = hp.checkpoint_exclude_wrapper(plain[0], save_output=False)
    for module in (wrapped, excluded):
        buffer = io.BytesIO()
        if module is excluded:  # operators cannot be pickled
            pickle.dump(module, buffer)
            copies = [copy.deepcopy(module), pickle.loads(buffer.getvalue())]
        else:
            copies = [copy.deepcopy(module)]
        for copied in copies:
            assert type(copied) is type(module)
            assert_same_bits(step(copied, data(hyper)), step(plain[0], data(hyper)))


def test_what_cannot_be_wrapped(hyper: Hyper) -> None:
    for wrapper in (hp.checkpoint_wrapper, hp.checkpoint_exclude_wrapper):
        with pytest.raises(UsageError, match=wrapper.__name__):
            wrapper(3)
    block = make(hyper, 1)[0]
    with pytest.warns(RuntimeWarning, match="wrapped module"):
        hp.checkpoint_wrapper(nn.Sequential(hp.checkpoint_wrapper(block)))
    hp.checkpoint_wrapper(nn.Sequential(hp.checkpoint_exclude_wrapper(block)))
    with pytest.raises(UsageError, match="non-reentrant"):
        hp.checkpoint(block, data(hyper), use_reentrant=True)


# --- chains


def test_a_chain_of_recomputed_layers(hyper: Hyper) -> None:
    """Its groups say when inputs and results leave, and bring them back; of the last layer nothing leaves."""
    plain = make(hyper, 4)
    options = {"swap_inputs": True, "policy_fn": products(SWAP), **hyper.options}
    layers = [hp.checkpoint_wrapper(block, **options) for block in plain]
    hyper.chain(*layers)
    check(hyper, nn.Sequential(*layers), plain, leaf(hyper))
    stats = hp.stats()
    # Three layers' results, and the inputs of the second and third: the first's is the caller's.
    assert stats.d2h_bytes == stats.h2d_bytes == (3 * 3 + 2) * HIDDEN_BYTES
    assert (stats.unfreed_bytes, stats.prefetch_misses) == (0, 0)
    if hyper.group_swap:
        assert stats.d2h_copies < 3 * 2 + 2


def test_micro_batches_through_a_chain(hyper: Hyper) -> None:
    plain = make(hyper)
    options = {"swap_inputs": True, "policy_fn": products(SWAP), **hyper.options}
    layers = [hp.checkpoint_wrapper(block, **options) for block in plain]
    hyper.chain(*layers)
    model = nn.Sequential(*layers)
    inputs = [data(hyper, seed=seed) for seed in range(3)]

    def run(network: nn.Module, order: list[int]) -> list[Any]:
        network.zero_grad()
        losses = [network(x).square().mean() for x in inputs]
        for index in order:
            losses[index].backward()
        found = [parameter.grad.clone() for parameter in plain.parameters()]
        return [*(loss.detach() for loss in losses), *found]

    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        expected = run(plain, order)
        hp.reset_stats()
        assert_same_bits(run(model, order), expected)
        assert hp.stats().d2h_bytes > 0
        hyper.assert_at_rest()
