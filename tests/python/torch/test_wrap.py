"""Modules that are wrapped: every forward runs inside the context, and nothing else changes."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from support import EXACT
from torch import nn

import ebbtide
import ebbtide.torch as ebb


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.fails = False

    def forward(self, x):
        if self.fails:
            raise ValueError("a layer failed")
        return self.linear(x).exp().sin()


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(Layer(), Layer(), Layer())


def gradients_of(model, x):
    model.zero_grad()
    model(x).sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_gradients_are_the_same_and_weights_keep_their_names():
    x = torch.randn(8, 16)
    plain, model = make_model(), make_model()
    tide = ebb.offload(model, **EXACT, to="host")
    assert tide.wrap(model) is model
    assert isinstance(model, nn.Sequential)
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)  # trainers ask
    assert list(model.state_dict()) == list(plain.state_dict())
    for expected, found in zip(gradients_of(plain, x), gradients_of(model, x), strict=True):
        assert torch.equal(expected, found)
    assert tide.stats().h2d_bytes > 0


def test_a_forward_that_raises_leaves_the_context():
    model = make_model()
    tide = ebb.offload(model, **EXACT, to="host")
    tide.wrap(model)
    model[2].fails = True
    with pytest.raises(ValueError, match="a layer failed"):
        model(torch.randn(8, 16))
    with pytest.raises(ebbtide.UsageError, match="outside of the context"):
        with tide.group("late"):
            pass
    assert tide.stats().entries == 0


def test_a_copy_is_not_wrapped_and_a_second_wrap_is_refused():
    model = make_model()
    tide = ebb.offload(model, **EXACT, to="host")
    tide.wrap(model)
    assert type(copy.deepcopy(model)) is nn.Sequential
    assert type(pickle.loads(pickle.dumps(model))) is nn.Sequential
    with pytest.raises(ebbtide.UsageError, match="wrapped already"):
        tide.wrap(model)
    with pytest.raises(ebbtide.UsageError, match="no model"):
        tide.wrap(lambda x: x)
