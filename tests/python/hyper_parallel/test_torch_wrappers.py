"""What a wrapped module looks like from outside: as if it were not wrapped."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections import OrderedDict
from typing import Any

import pytest
import torch
from harness import Hyper
from support import DEVICE
from torch import nn
from torch_layers import assert_equal_and_moved, blocks, expected, train
from torch_support import assert_same_bits
from training import make_input

import ebbtide.hyper_parallel as hp
from ebbtide.errors import UsageError


class WithBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.norm = nn.BatchNorm1d(32)
        self.steps = 3

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return self.norm(self.linear(x)) * scale

    def twice(self) -> int:
        return 2 * self.steps


def model_of(*, wrap: bool) -> nn.Module:
    torch.manual_seed(5)
    with torch.device(DEVICE):
        layers = [WithBuffers(), WithBuffers()]
    if wrap:
        layers = [hp.swap_wrapper(layer) for layer in layers]
    return nn.Sequential(OrderedDict(first=layers[0], rest=nn.ModuleList([layers[1]])))


def test_names_are_those_of_the_plain_model(hyper: Hyper) -> None:
    plain, model = model_of(wrap=False), model_of(wrap=True)
    for names in ("named_parameters", "named_buffers"):
        assert [n for n, _ in getattr(model, names)()] == [n for n, _ in getattr(plain, names)()]
        inner = [n for n, _ in getattr(plain.first, names)()]
        assert [n for n, _ in getattr(model.first, names)()] == inner
    assert list(model.state_dict()) == list(plain.state_dict())
    assert list(model.first.state_dict()) == list(plain.first.state_dict())
    assert set(dict(model.named_modules())) == set(dict(plain.named_modules()))
    assert model.state_dict()._metadata.keys() == plain.state_dict()._metadata.keys()


def test_state_goes_both_ways(hyper: Hyper) -> None:
    plain, model = model_of(wrap=False), model_of(wrap=True)
    with torch.no_grad():
        for p in plain.parameters():
            p.add_(1)
    model.load_state_dict(plain.state_dict())
    assert_same_bits(model.state_dict().values(), plain.state_dict().values())
    model.first.load_state_dict(plain.rest[0].state_dict(), assign=True)  # type: ignore[index]
    plain.load_state_dict(model.state_dict())
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    model.load_state_dict(torch.load(file))


def test_what_does_not_fit_is_named_without_the_wrapper(hyper: Hyper) -> None:
    model = model_of(wrap=True)
    state = model.state_dict()
    state["first.linear.other"] = state.pop("first.linear.weight")
    found = model.load_state_dict(state, strict=False)
    assert found.missing_keys == ["first.linear.weight"]
    assert found.unexpected_keys == ["first.linear.other"]


def test_attributes_are_the_inner_modules(hyper: Hyper) -> None:
    model = model_of(wrap=True)
    layer: Any = model.first
    assert layer.steps == 3 and layer.twice() == 6
    assert layer.linear.weight.shape == (32, 32)
    assert isinstance(layer, hp.SwapWrapper)
    with pytest.raises(AttributeError, match="nowhere"):
        _ = layer.nowhere
    tied = nn.Linear(32, 32)
    layer.linear = tied
    assert layer.wrapped.linear is tied
    assert hp.swap_wrapper(blocks(2))[1] is not None


def test_modes_are_taken_over_and_passed_on(hyper: Hyper) -> None:
    inner = WithBuffers()
    inner.norm.eval()
    layer = hp.swap_wrapper(inner)
    assert layer.training and not inner.norm.training
    layer.eval()
    assert not inner.training
    assert not hp.swap_wrapper(inner).training


def test_keyword_arguments_and_plain_callables(hyper: Hyper) -> None:
    with torch.device(DEVICE):
        inner = WithBuffers()
    x = make_input()
    assert_same_bits([hp.swap_wrapper(inner)(x, scale=2.0)], [inner(x, scale=2.0)])
    layer = hp.swap_wrapper(torch.sin, **hyper.options)
    assert isinstance(layer, nn.Module)
    x.requires_grad_()
    layer(x).sum().backward()
    assert_same_bits([x.grad], [x.detach().cos()])
    with pytest.raises(UsageError, match="cannot be called"):
        hp.swap_wrapper(3)  # type: ignore[arg-type]


def test_copies_work_by_themselves(hyper: Hyper) -> None:
    layers = nn.Sequential(*(hp.swap_wrapper(b, **hyper.options) for b in blocks()))
    hyper.chain(*layers)
    copied = copy.deepcopy(layers)
    assert copied[0]._call.cpu_pool is hyper.options["cpu_pool"]
    copied[0].down.weight.data.zero_()
    assert layers[0].down.weight.any()
    assert_equal_and_moved(hyper, layers)
    again = copy.deepcopy(layers)
    assert_equal_and_moved(hyper, again)


def test_pickled_modules_work_by_themselves(hyper: Hyper) -> None:
    layers = nn.Sequential(*(hp.swap_wrapper(b, **hyper.options) for b in blocks()))
    hyper.chain(*layers)
    found = pickle.loads(pickle.dumps(layers))
    assert isinstance(found[0], hp.SwapWrapper)
    assert list(found.state_dict()) == list(layers.state_dict())
    assert_same_bits(train(found, make_input()), expected())
    assert found[0]._call.cpu_pool.max_host_bytes == hyper.options["cpu_pool"].max_host_bytes
    hyper.assert_at_rest()


def test_nested_wrappers_warn_and_are_right(hyper: Hyper) -> None:
    layers = nn.Sequential(*(hp.swap_wrapper(b, **hyper.options) for b in blocks()))
    with pytest.warns(RuntimeWarning, match="the inner wrapper decides") as caught:
        nested = hp.swap_wrapper(layers, **hyper.options)
    assert caught[0].filename == __file__
    assert list(nested.state_dict()) == list(blocks().state_dict())
    assert_equal_and_moved(hyper, nested)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hp.swap_wrapper(nn.Linear(2, 2))
