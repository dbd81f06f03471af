"""Every public way to differentiate, with the context around the forward or around all of it."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import mindspore as ms
import mindspore_memory as memory
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore.graph.api import _pynative_executor as executor
from support import EXACT, assert_at_rest, assert_loaded

import ebbtide.mindspore as ebb

WIDTH = 6


class Layer(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Dense(WIDTH, WIDTH)

    def construct(self, x: Tensor) -> Tensor:
        return x + ops.gelu(self.dense(x))


class Net(nn.Cell):
    """No layer normalisation: after an exception inside `grad`, MindSpore itself fails at the next one of a cell with it."""

    def __init__(self) -> None:
        super().__init__()
        ms.set_seed(0)
        np.random.seed(0)
        self.layers = nn.CellList([Layer() for _ in range(3)])

    def construct(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class LossCell(nn.Cell):
    """The context is part of the forward."""

    def __init__(self, net: nn.Cell, context: Any) -> None:
        super().__init__()
        self.net = net
        self.context = context

    def construct(self, x: Tensor) -> Tensor:
        with self.context:
            return ops.tanh(self.net(x)).sum()


def data(seed: int = 1) -> Tensor:
    return Tensor(np.random.default_rng(seed).standard_normal((4, WIDTH)), ms.float32)


def bits(found: Any) -> list[bytes]:
    if isinstance(found, Tensor):
        return [memory.elements(found).tobytes()]
    return [part for item in found for part in bits(item)]


def by_grad(cell: nn.Cell) -> Any:
    return ms.grad(cell, (0,), cell.trainable_params())(data())


def by_value_and_grad(cell: nn.Cell) -> Any:
    return ms.value_and_grad(cell, None, cell.trainable_params())(data())


def by_grad_operation(cell: nn.Cell) -> Any:
    operation = ops.GradOperation(get_all=True, get_by_list=True)
    return operation(cell, ms.ParameterTuple(cell.trainable_params()))(data())


def by_vjp(cell: nn.Cell) -> Any:
    output, backward = ms.vjp(cell, data())
    return output, backward(Tensor(2.0))


def by_train_one_step(cell: nn.Cell) -> Any:
    step = nn.TrainOneStepCell(cell, nn.SGD(cell.trainable_params(), 0.1))
    losses = [step(data(seed)) for seed in (1, 2)]
    return losses, cell.trainable_params()


WAYS = [by_grad, by_value_and_grad, by_grad_operation, by_vjp, by_train_one_step]


@pytest.mark.parametrize("group_swap", [False, True], ids=["one by one", "group_swap"])
@pytest.mark.parametrize("around", ["forward", "everything"])
@pytest.mark.parametrize("way", WAYS)
def test_gradients(way: Any, around: str, group_swap: bool) -> None:
    expected = bits(way(LossCell(Net(), nullcontext())))
    net = Net()
    tide = ebb.offload(net, to="disk", group_swap=group_swap, **EXACT)
    if around == "forward":
        found = bits(way(LossCell(net, tide)))
        assert_loaded(tide)
    else:
        with tide:
            found = bits(way(LossCell(net, nullcontext())))
    assert found == expected
    assert tide.stats().kept["parameter"] > 0
    assert_at_rest(tide)


@pytest.mark.parametrize("around", ["forward", "everything"])
def test_second_derivatives(around: str) -> None:
    """`grad(grad)` unpacks some tickets twice, and would be zero were a view handed to its first backward."""

    def second(forward_in: Any, backward_in: Any) -> bytes:
        def inner(x: Tensor) -> Tensor:
            with forward_in:
                return (ops.exp(x).transpose(1, 0) * ops.sin(x).transpose(1, 0)).sum()

        with backward_in:
            found = ms.grad(lambda x: (ms.grad(inner)(x) ** 2).sum())(data())
        return bits(found)[0]

    expected = second(nullcontext(), nullcontext())
    assert any(expected)
    tide = ebb.offload(to="disk", **EXACT)
    contexts = (tide, nullcontext()) if around == "forward" else (nullcontext(), tide)
    assert second(*contexts) == expected
    if around == "forward":
        assert_loaded(tide)
    assert_at_rest(tide)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation(reentrant: bool) -> None:
    def gradients(net: Net, context: Any) -> list[bytes]:
        def forward(x: Tensor) -> Tensor:
            with context:
                for layer in net.layers:
                    x = ms.recompute(layer, x, use_reentrant=reentrant)
                return ops.tanh(x).sum()

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return bits(ms.grad(forward, 0, net.trainable_params())(data()))

    expected = gradients(Net(), nullcontext())
    net = Net()
    tide = ebb.offload(net, to="disk", **EXACT)
    assert gradients(net, tide) == expected
    assert_loaded(tide)
    assert_at_rest(tide)


def test_a_forward_that_raises() -> None:
    """Its tickets go when MindSpore lets go of the graph that it began; the next step is right."""
    expected = bits(by_value_and_grad(LossCell(Net(), nullcontext())))
    net = Net()
    tide = ebb.offload(net, to="disk", **EXACT)

    def forward(x: Tensor) -> Tensor:
        with tide:
            ops.exp(net(x))
            raise ZeroDivisionError("in the middle of a forward")

    for _ in range(3):
        with pytest.raises(ZeroDivisionError, match="in the middle of a forward"):
            ms.grad(forward)(data())
        executor.clear_res()
        assert_at_rest(tide)
        assert bits(by_value_and_grad(LossCell(net, tide))) == expected
        assert_at_rest(tide)
    assert_loaded(tide)


def test_forwards_without_a_backward() -> None:
    """MindSpore keeps the graphs of forwards until one of them is run backward or cleared: then all is let go."""
    net = Net()
    tide = ebb.offload(net, to="disk", **EXACT)
    for _ in range(20):
        ms.vjp(LossCell(net, tide), data())
    executor.clear_res()
    assert tide.stats().d2h_bytes > 0
    assert_at_rest(tide)
