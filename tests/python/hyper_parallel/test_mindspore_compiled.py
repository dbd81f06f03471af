"""Cells that are wrapped or chained where MindSpore compiles them: it compiles what they wrap, and nothing leaves there."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

import ebbtide.hyper_parallel as hp
import ebbtide.mindspore as ebb
from ebbtide.errors import UsageError

WIDTH = 4


class Layer(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Dense(WIDTH, WIDTH)

    def construct(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.activated(self.dense(x)) * scale

    def activated(self, x: Tensor) -> Tensor:
        return ops.tanh(x)


class Inherits(Layer):
    def construct(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().construct(x, scale) + x


class InheritsInMethod(Layer):
    def activated(self, x: Tensor) -> Tensor:
        return super().activated(x) + x


class Net(nn.Cell):
    def __init__(self, layer: type[Layer] = Layer) -> None:
        super().__init__()
        self.first, self.second = layer(), layer()
        random = np.random.RandomState(0)
        for parameter in self.get_parameters():
            values = random.randn(*parameter.shape) * 0.3
            parameter.set_data(Tensor(values.astype(np.float32)))

    def construct(self, x: Tensor) -> Tensor:
        return self.second(self.first(x), scale=0.5)


def wrapped_by(wrapper: Callable[[nn.Cell], nn.Cell], net: Net) -> Net:
    net.first, net.second = wrapper(net.first), wrapper(net.second)
    return net


def chained(net: Net) -> Net:
    hp.SwapManager().set_forward_prefetch_layer(net.first, net.second)
    return net


def around(net: nn.Cell) -> nn.Cell:
    return ebb.offload(net, to="host", min_bytes=0).wrap(net)


def recomputed(cell: nn.Cell) -> nn.Cell:
    return hp.checkpoint_wrapper(cell, swap_inputs=True)


MAKE: dict[str, Callable[[Net], nn.Cell]] = {
    "wrapped": around,
    "chained": chained,
    "chained and wrapped": lambda net: around(chained(net)),
    "swap_wrapper": lambda net: wrapped_by(hp.swap_wrapper, net),
    "swap_wrapper around all": hp.swap_wrapper,
    "swap_wrapper, chained": lambda net: chained(wrapped_by(hp.swap_wrapper, net)),
    "checkpoint_wrapper": lambda net: wrapped_by(recomputed, net),
}


def data() -> Tensor:
    return Tensor(np.random.RandomState(1).randn(2, WIDTH).astype(np.float32))


def in_jit(net: nn.Cell) -> Any:
    @ms.jit
    def run(x: Tensor) -> Tensor:
        return net(x)

    return run(data()), ms.grad(run, None, net.trainable_params())(data())


def in_graph_mode(net: nn.Cell) -> Any:
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        return net(data()), ms.grad(net, None, net.trainable_params())(data())
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)


def exported(net: nn.Cell) -> Any:
    ms.export(net, data(), file_name="net", file_format="MINDIR")
    return nn.GraphCell(ms.load("net.mindir"))(data())


COMPILE: dict[str, Callable[[nn.Cell], Any]] = {
    "jit": in_jit,
    "graph mode": in_graph_mode,
    "export": exported,
    "jvp": lambda net: ms.jvp(net, data(), ops.ones_like(data())),
    "jacfwd": lambda net: ms.jacfwd(net)(data()),
    "jacrev": lambda net: ms.jacrev(net)(data()),
}


def arrays(found: Any) -> list[bytes]:
    if isinstance(found, Tensor):
        return [found.asnumpy().tobytes()]
    return [array for item in found for array in arrays(item)]


def in_pynative(net: nn.Cell) -> list[bytes]:
    return arrays(ms.value_and_grad(lambda x: net(x).sum(), 0, net.trainable_params())(data()))


@pytest.fixture(autouse=True)
def folder(backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For what MindSpore's compiler leaves where it runs."""
    monkeypatch.chdir(tmp_path)
    yield
    hp.SwapManager().unregister_forward_prefetch_hooks()


SLOW = ("jacfwd", "jacrev")  # seconds each: they compile several graphs


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=[pytest.mark.slow] if how in SLOW else []) for how in COMPILE]
)
@pytest.mark.parametrize("kind", MAKE)
def test_what_is_wrapped_is_compiled(kind: str, how: str) -> None:
    net, plain = MAKE[kind](Net()), Net()
    expected = in_pynative(plain)
    assert in_pynative(net) == expected
    hp.reset_stats()
    assert arrays(COMPILE[how](net)) == arrays(COMPILE[how](plain))
    assert hp.stats().storages == 0
    assert in_pynative(net) == expected


def test_a_wrapped_function_is_compiled() -> None:
    def function(x: Tensor) -> Tensor:
        return ops.sin(x) * x

    net, expected = hp.swap_wrapper(function), function(data())
    assert arrays(ms.jvp(net, data(), data())[0]) == arrays(expected)


@pytest.mark.parametrize("how", ["jit", "graph mode", "export", "jvp"])
@pytest.mark.parametrize("layer", [Inherits, InheritsInMethod])
@pytest.mark.parametrize("kind", ["wrapped", "chained"])
def test_where_super_is_used_the_error_says_what_to_do(
    kind: str, layer: type[Layer], how: str
) -> None:
    net = Net(layer) if kind == "chained" else layer()
    net, plain = MAKE[kind](net), copy.deepcopy(net)
    with pytest.raises(ValueError, match=r"ebbtide.*super\(\).*PyNative.*deepcopy"):
        COMPILE[how](net)
    assert in_pynative(net) == in_pynative(plain)
    assert arrays(COMPILE[how](copy.deepcopy(net))) == arrays(COMPILE[how](plain))


def test_super_in_what_a_wrapper_wraps_is_compiled() -> None:
    net = wrapped_by(hp.swap_wrapper, Net(Inherits))
    assert arrays(in_jit(net)) == arrays(in_jit(Net(Inherits)))


def test_what_mindspore_has_not_is_refused_where_the_wrapper_is_made() -> None:
    with pytest.raises(UsageError, match="checkpoint_exclude_wrapper.*not available"):
        hp.checkpoint_exclude_wrapper(Layer())
    for option in ("policy_fn", "context_fn"):
        with pytest.raises(UsageError, match=r"policies for operations.*not available"):
            hp.checkpoint_wrapper(Layer(), **{option: lambda *_: True})
    assert in_pynative(hp.checkpoint_wrapper(Layer(), policy_fn=None))
