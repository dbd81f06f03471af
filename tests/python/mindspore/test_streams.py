"""Devices whose copies run in the background, by a stand-in for mindspore.runtime. Not run on hardware."""

from __future__ import annotations

import inspect
import sys

import mindspore
import numpy as np
import pytest
import standin_runtime
from mindspore import Tensor, nn, ops

from ebbtide.config import OffloadConfig
from ebbtide.mindspore.framework import MindSporeFramework
from ebbtide.offload import Offload
from ebbtide.resolved import Resolved

streams = standin_runtime.StandInStreams(sys.modules[standin_runtime.__name__])


class Layer(nn.Cell):
    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(32, 32)

    def construct(self, x):
        return ops.exp(ops.sin(self.dense(x))) * x


class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.layers = nn.CellList([Layer() for _ in range(6)])

    def construct(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def offload(net, **options):
    config = OffloadConfig(**{"min_bytes": 0, "to": "host", **options})
    resolved = Resolved.from_config(config, "cpu", True, 0)
    return Offload(MindSporeFramework("cpu", streams), config, resolved, net)


@pytest.mark.parametrize(
    "options",
    [
        {"keep_last_bytes": 0, "in_flight_bytes": 0},
        {"keep_last_bytes": 0, "in_flight_bytes": 1 << 14},
        {"keep_last_bytes": 0, "in_flight_bytes": 0, "prefetch_bytes": 1 << 20},
        {"keep_last_groups": 0, "in_flight_bytes": 1 << 14, "group_swap": True},
    ],
    ids=["ordered", "bounded", "prefetch", "packed"],
)
def test_gradients_equal_those_without(options):
    net, x = Net(), Tensor(np.random.RandomState(0).randn(64, 32).astype(np.float32))
    tide = None

    def forward(x):
        if tide is None:
            return (net(x) ** 2).sum()
        with tide:
            y = net(x)
        return (y**2).sum()

    gradient = mindspore.grad(forward, 0, weights=net.trainable_params())

    def gradients():
        of_input, of_weights = gradient(x)
        return [tensor.asnumpy() for tensor in (of_input, *of_weights)]

    expected = gradients()
    tide = offload(net, **options)
    before = streams.copied_bytes
    for _ in range(2):
        found = gradients()
        assert all(a.tobytes() == b.tobytes() for a, b in zip(expected, found, strict=True))
    tide.synchronize()
    stats = tide.stats()
    assert stats.h2d_bytes > 0
    # Those that gather and scatter packs are among them.
    assert streams.copied_bytes - before >= stats.d2h_bytes + stats.h2d_bytes
    assert (stats.entries, stats.device_bytes, stats.host_bytes) == (0, 0, 0)


def test_the_names_that_are_used_are_those_of_mindspore_runtime():
    runtime = mindspore.runtime
    assert list(inspect.signature(runtime.Event.record).parameters) == ["self", "stream"]
    assert list(inspect.signature(runtime.Event.wait).parameters) == ["self", "stream"]
    for name in ("query", "synchronize"):
        assert callable(getattr(runtime.Event, name))
    assert list(inspect.signature(runtime.StreamCtx).parameters) == ["ctx_stream"]
    assert callable(runtime.current_stream)
    assert isinstance(runtime.Stream().id, int)
