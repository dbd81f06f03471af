"""Graph mode and what ``ms.jit`` compiles: a clear refusal, or gradients as without; and the next step is right."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mindspore as ms
import mindspore_memory as memory
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from support import EXACT, assert_at_rest, assert_loaded

import ebbtide.mindspore as ebb
from ebbtide.errors import UsageError


def body(x: Tensor) -> Tensor:
    return ops.sin(ops.exp(x)).sum()


compiled = ms.jit(body)


def data() -> Tensor:
    return Tensor(np.random.default_rng(0).standard_normal((4, 4)), ms.float32)


def gradient(function: Callable[[Tensor], Tensor]) -> bytes:
    found = ms.grad(function)(data())
    return memory.elements(found).tobytes()


def inside(context: Any, function: Callable[[Tensor], Tensor] = body) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        with context:
            return function(x)

    return forward


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For what MindSpore's compiler leaves where it runs."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def graph_mode() -> Iterator[None]:
    ms.set_context(mode=ms.GRAPH_MODE)
    yield
    ms.set_context(mode=ms.PYNATIVE_MODE)


@pytest.fixture
def tide() -> Iterator[Any]:
    """After whatever a test does, a step in PyNative mode is right, and nothing is held."""
    tide = ebb.offload(to="disk", **EXACT)
    yield tide
    ms.set_context(mode=ms.PYNATIVE_MODE)
    assert gradient(inside(tide)) == gradient(body)
    assert_loaded(tide)
    assert_at_rest(tide)


def test_the_context_cannot_be_entered_in_graph_mode(tide: Any, graph_mode: None) -> None:
    for _ in range(2):
        with pytest.raises(UsageError, match=r"graph mode.*PYNATIVE_MODE"), tide:
            pytest.fail("entered")
    with pytest.raises(UsageError, match="outside of the context"), tide.group("first"):
        pytest.fail("a group began")


def test_a_wrapped_cell_is_compiled_as_the_plain_one(tide: Any, graph_mode: None) -> None:
    """Nothing leaves there: the context is not entered."""
    net = nn.SequentialCell(nn.Dense(4, 4), nn.ReLU())
    expected = memory.elements(net(data())).tobytes()
    wrapped = tide.wrap(copy.deepcopy(net))
    assert memory.elements(wrapped(data())).tobytes() == expected
    assert tide.stats().storages == 0
    ms.set_context(mode=ms.PYNATIVE_MODE)
    assert gradient(lambda x: wrapped(x).sum()) == gradient(lambda x: net(x).sum())
    assert tide.stats().storages > 0


def test_graph_mode_begins_inside_the_context(tide: Any) -> None:
    """What is compiled there is not seen; leaving the context works."""
    expected = gradient(body)
    with tide:
        ms.set_context(mode=ms.GRAPH_MODE)
        assert gradient(compiled) == expected
    assert tide.stats().storages == 0


def test_a_backward_in_graph_mode_of_a_forward_before_it(tide: Any) -> None:
    expected = gradient(body)
    _, backward = ms.vjp(inside(tide), data())
    ms.set_context(mode=ms.GRAPH_MODE)
    found = backward(Tensor(1.0))
    found = found[0] if isinstance(found, tuple) else found
    assert memory.elements(found).tobytes() == expected
    assert_loaded(tide)


def test_compiled_functions_inside_the_context_are_not_seen(tide: Any) -> None:
    def mixed(x: Tensor) -> Tensor:
        return compiled(ops.sin(x)) + ops.exp(ops.exp(x)).sum()

    expected = gradient(mixed)
    assert gradient(inside(tide, mixed)) == expected
    assert gradient(inside(nullcontext(), mixed)) == expected
    assert_loaded(tide)
    tide.reset_stats()
    with tide:
        assert gradient(compiled) == gradient(body)


def test_the_context_cannot_be_entered_in_what_is_compiled(tide: Any) -> None:
    @ms.jit
    def forward(x: Tensor) -> Tensor:
        with tide:
            return body(x)

    for call in (forward, ms.grad(forward)):
        with pytest.raises(TypeError, match="Offload"):
            call(data())
    with pytest.raises(UsageError, match="outside of the context"), tide.group("first"):
        pytest.fail("a group began")
