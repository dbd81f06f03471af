"""Exceptions in forward and backward of the public ways to differentiate: as without offload, and nothing stays held."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import mindspore as ms
import mindspore_memory as memory
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore.common._grad_function import _Function
from mindspore.graph.api import _pynative_executor as executor
from support import EXACT, assert_at_rest, assert_loaded

import ebbtide.mindspore as ebb

WIDTH = 8


class Refusing(_Function):
    """Its backward raises once it has its tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.copy()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ZeroDivisionError(f"in a backward, of {len(ctx.saved_tensors)}")


class Net(nn.Cell):
    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        ms.set_seed(0)
        np.random.seed(0)
        self.norm = nn.LayerNorm((WIDTH,)) if norm else None
        self.dense = nn.Dense(WIDTH, WIDTH)
        self.fails_in = ""

    def construct(self, x: Tensor) -> Tensor:
        x = self.dense(x if self.norm is None else self.norm(x))
        if self.fails_in == "forward":
            raise ZeroDivisionError("in a forward")
        x = ops.exp(ops.sin(x))
        if self.fails_in == "backward":
            x = Refusing.apply(x)
        return ops.tanh(ops.exp(x)).sum()


def step(net: Net, context: Any) -> list[bytes]:
    def forward(x: Tensor) -> Tensor:
        with context:
            return net(x)

    x = Tensor(np.random.default_rng(1).standard_normal((4, WIDTH)), ms.float32)
    loss, gradients = ms.value_and_grad(forward, None, net.trainable_params())(x)
    return [memory.elements(tensor).tobytes() for tensor in (loss, *gradients)]


def outcomes(net: Net, context: Any, fails_in: str, count: int = 4) -> list[Any]:
    """A step that fails, and those after it: gradients, or the first line of what MindSpore itself raises."""
    net.fails_in = fails_in
    with pytest.raises(ZeroDivisionError, match=f"in a {fails_in}"):
        step(net, context)
    net.fails_in = ""
    found: list[Any] = []
    for _ in range(count):
        try:
            found.append(step(net, context))
        except RuntimeError as error:
            found.append(str(error).splitlines()[0])
    return found


@pytest.mark.parametrize("norm", [False, True], ids=["", "layer norm"])
@pytest.mark.parametrize("fails_in", ["forward", "backward"])
def test_steps_after_one_that_fails_are_as_without(fails_in: str, norm: bool) -> None:
    expected = outcomes(Net(norm), nullcontext(), fails_in)
    assert isinstance(expected[-1], list)
    net = Net(norm)
    tide = ebb.offload(net, to="disk", **EXACT)
    assert outcomes(net, tide, fails_in) == expected
    assert_loaded(tide)
    executor.clear_res()  # graphs that MindSpore keeps of a forward that failed
    assert_at_rest(tide)


def test_what_was_loaded_for_a_backward_that_raises_is_let_go_of_at_the_next_entry() -> None:
    """MindSpore does not tell that it is over. What has still to be given out of a storage is held until then."""
    tide = ebb.offload(to="disk", prefetch_bytes=0, **EXACT)

    def forward(x: Tensor) -> Tensor:
        with tide:
            y = ops.exp(x)  # saved here, and by both operations below
            return (Refusing.apply(y) * y).sum()

    _, backward = ms.vjp(forward, ops.ones((4, WIDTH)))
    with pytest.raises(ZeroDivisionError, match="in a backward"):
        backward(Tensor(1.0))
    assert tide.stats().device_bytes == 4 * WIDTH * 4
    with tide:
        pass
    assert tide.stats().device_bytes == 0
    assert_loaded(tide)
