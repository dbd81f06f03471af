"""Cells that are wrapped: every forward runs inside the context, and nothing else changes."""

from __future__ import annotations

import copy
import inspect

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

import ebbtide
import ebbtide.mindspore as ebb

EVERYTHING = {"min_bytes": 0, "keep_last_bytes": 0, "in_flight_bytes": 0, "to": "host"}


class Layer(nn.Cell):
    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(16, 16)

    def construct(self, x):
        return ops.tanh(self.dense(x)) * x


class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.layers = nn.CellList([Layer() for _ in range(4)])
        self.fails = False

    def construct(self, x):
        for layer in self.layers:
            x = layer(x)
            if self.fails:
                raise ValueError("a layer failed")
        return x


def make_net():
    mindspore.set_seed(0)
    return Net()


def inputs():
    return Tensor(np.random.RandomState(1).randn(8, 16).astype(np.float32))


def train(net, steps=3):
    optimizer = nn.Adam(net.trainable_params(), 1e-2)
    step = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer)
    step.set_train()
    target = Tensor(np.zeros((8, 16), np.float32))
    losses = [step(inputs(), target).asnumpy() for _ in range(steps)]
    return [array.tobytes() for array in (*losses, *(p.asnumpy() for p in net.trainable_params()))]


@pytest.mark.parametrize("kind", ["plain", "recompute", "recompute without reentrance"])
@pytest.mark.parametrize("groups", [{}, {"keep_last_groups": 0, "group_swap": True}])
def test_training_is_the_same_to_the_last_bit(kind, groups):
    def make():
        net = make_net()
        if kind != "plain":
            for layer in net.layers:
                layer.recompute(use_reentrant=kind == "recompute")
        return net

    expected = train(make())
    options = {**EVERYTHING, **groups}
    if groups:
        del options["keep_last_bytes"]
    net = make()
    names = [parameter.name for parameter in net.get_parameters()]
    tide = ebb.offload(net, **options)
    assert tide.wrap(net) is net
    assert inspect.signature(net.construct) == inspect.signature(make().construct)
    assert isinstance(net, Net) and [p.name for p in net.get_parameters()] == names
    assert train(net) == expected
    assert tide.stats().h2d_bytes > 0


def test_a_forward_that_raises_leaves_the_context():
    net = make_net()
    tide = ebb.offload(net, **EVERYTHING)
    tide.wrap(net)
    expected = [gradient.asnumpy().tobytes() for gradient in gradients_of(make_net(), inputs())]
    net.fails = True
    with pytest.raises(ValueError, match="a layer failed"):
        gradients_of(net, inputs())
    net.fails = False
    found = [gradient.asnumpy().tobytes() for gradient in gradients_of(net, inputs())]
    assert found == expected
    stats = tide.stats()
    assert (stats.entries, stats.device_bytes, stats.host_bytes) == (0, 0, 0)
    with pytest.raises(ebbtide.UsageError, match="outside of the context"):
        with tide.group("late"):
            pass


def gradients_of(net, x):
    gradient = mindspore.grad(lambda x: net(x).sum(), None, weights=net.trainable_params())
    return gradient(x)


def test_a_copy_is_not_wrapped_and_a_second_wrap_is_refused():
    net = make_net()
    tide = ebb.offload(net, **EVERYTHING)
    tide.wrap(net)
    assert type(copy.deepcopy(net)) is Net
    with pytest.raises(ebbtide.UsageError, match="wrapped already"):
        tide.wrap(net)
    with pytest.raises(ebbtide.UsageError, match="no model"):
        tide.wrap(lambda x: x)
