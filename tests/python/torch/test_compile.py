"""Compiled code under the context: equal to itself without; the context inside it: equal or refused."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from support import EXACT, assert_at_rest, assert_loaded
from torch import nn
from torch_support import assert_same_bits
from training import assert_step_equal, gradients, make_input, make_model, offload, step

import ebbtide.torch as ebb

if not torch._dynamo.is_dynamo_supported():
    pytest.skip("torch.compile does not support this Python", allow_module_level=True)

# Torch's own, while it compiles.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace"),
]
backends = pytest.mark.parametrize("backend", ["eager", "aot_eager"])


@pytest.fixture(autouse=True)
def nothing_compiled_yet() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class WithBreak(nn.Module):
    def __init__(self, model: nn.Sequential) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.model[0](x)
        torch._dynamo.graph_break()
        return self.model[2](self.model[1](x))


def compiled(model: nn.Module, backend: str, **options: bool) -> Callable[..., torch.Tensor]:
    return torch.compile(model, backend=backend, **options)


@backends
@pytest.mark.parametrize("to", ["disk", "host"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_full_graph(backend: str, to: str, dynamic: bool) -> None:
    model = make_model()
    run = compiled(model, backend, fullgraph=True, dynamic=dynamic)
    tide = offload(model, to=to)
    for rows in (16, 24, 16):
        x = make_input(rows)
        expected = step(run, x)
        assert_same_bits(step(run, x, tide), expected)
        assert_at_rest(tide)
    assert_loaded(tide)
    stats = tide.stats()
    assert stats.kept["parameter"] > 0


@backends
def test_compiled_first_under_the_context(backend: str) -> None:
    model, x = make_model(), make_input()
    tide = offload(model)
    first = step(compiled(model, backend, fullgraph=True), x, tide)
    assert_loaded(tide)
    assert_at_rest(tide)
    torch._dynamo.reset()
    assert_same_bits(first, step(compiled(model, backend, fullgraph=True), x))


@backends
def test_graph_break(backend: str) -> None:
    model, x = WithBreak(make_model()), make_input()
    run = compiled(model, backend)
    expected = step(run, x)
    tide = offload(model)
    for _ in range(2):
        assert_same_bits(step(run, x, tide), expected)
        assert_loaded(tide)
        assert_at_rest(tide)


@backends
def test_one_block_of_several(backend: str) -> None:
    model, x = make_model(), make_input()
    model[1].compile(backend=backend)
    expected = step(model, x)
    tide = offload(model)
    assert_same_bits(step(model, x, tide), expected)
    assert_loaded(tide)
    assert_at_rest(tide)


@backends
def test_weights_of_compiled_code_are_not_copied(backend: str) -> None:
    """They come to the hooks as the graph's inputs, views of them too."""
    model, x = make_model(depth=1, width=256), make_input(rows=2, width=256)
    run = compiled(model, backend, fullgraph=True)
    smallest_weight = 256 * 256 * 4
    for known in (model, None):
        tide = offload(known)
        step(run, x, tide)
        assert 0 < tide.stats().d2h_bytes < smallest_weight
        assert_at_rest(tide)


@backends
def test_context_inside(backend: str) -> None:
    """Without fullgraph the graph breaks at the context, which then works as ever."""
    model, x = make_model(), make_input()
    tide = offload(model)

    def forward(x: torch.Tensor) -> torch.Tensor:
        x = model[0](x)
        with tide:
            x = model[1](x)
        return model[2](x)

    plain = compiled(model, backend)
    expected = step(plain, x)
    run = torch.compile(forward, backend=backend)
    for _ in range(2):
        model.zero_grad()
        loss = run(x).square().mean()
        loss.backward()
        assert_same_bits([loss.detach(), *gradients(model)], expected)
        assert tide.stats().saved_tensors > 0
        del loss
        assert_at_rest(tide)


@backends
def test_context_inside_a_full_graph_is_refused(backend: str) -> None:
    model, x = make_model(), make_input()
    tide = offload(model)

    def forward(x: torch.Tensor) -> torch.Tensor:
        with tide:
            return model(x)

    with pytest.raises(torch._dynamo.exc.Unsupported, match="Offload"):
        torch.compile(forward, backend=backend, fullgraph=True)(x)
    assert_at_rest(tide)
    assert tide.stats().saved_tensors == 0


def test_offload_after_a_failed_compilation() -> None:
    """Which leaves its way of evaluating frames installed, with other reference counts in calls."""
    model, x = make_model(), make_input()
    before = offload(model)
    assert_step_equal(before, model, x)

    def forward(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return model(x)

    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(forward, backend="eager", fullgraph=True)(x)
    after = offload(model)
    assert_step_equal(after, model, x)
    assert after.stats().d2h_bytes == before.stats().d2h_bytes


def test_offload_under_a_tracer() -> None:
    model, x = make_model(), make_input()
    plain, traced = offload(model), offload(model)
    assert_step_equal(plain, model, x)
    outer = sys.gettrace()
    sys.settrace(lambda frame, event, argument: lambda *event: None)
    try:
        assert_step_equal(traced, model, x)
    finally:
        sys.settrace(outer)
    assert traced.stats().d2h_bytes == plain.stats().d2h_bytes


@backends
def test_context_made_and_entered_inside(backend: str) -> None:
    model, x = make_model(), make_input()
    made = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        tide = offload(model)
        made.append(tide)
        with tide:
            return model(x)

    expected = step(compiled(model, backend), x)
    model.zero_grad()
    loss = torch.compile(forward, backend=backend)(x).square().mean()
    loss.backward()
    assert_same_bits([loss.detach(), *gradients(model)], expected)
    del loss
    assert made[0].stats().saved_tensors > 0
    assert_at_rest(made[0])


@pytest.mark.slow
def test_inductor() -> None:
    model, x = make_model(), make_input()
    run = compiled(model, "inductor", fullgraph=True)
    expected = step(run, x)
    tide = offload(model)
    assert_same_bits(step(run, x, tide), expected)
    assert_loaded(tide)
    assert_at_rest(tide)


def test_a_graph_break_in_a_try_block_does_not_trace_the_hooks() -> None:
    """From the break on, frames are compiled one by one; the hooks' own are not among them."""
    model, x = torch.nn.Linear(32, 32), torch.randn(32, 32, requires_grad=True)

    def program(x: torch.Tensor) -> torch.Tensor:
        try:
            y = model(x).tanh()
            print(end="")
            return (y * y).sum()
        finally:
            pass

    expected = torch.autograd.grad(program(x), x)
    tide = ebb.offload(**EXACT)
    with tide:
        loss = torch.compile(program, backend="eager")(x)
    assert_same_bits(torch.autograd.grad(loss, x), expected)
    assert_loaded(tide)


def test_backward_in_inference_mode() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    expected = torch.autograd.grad((x.sin() * x.cos()).sum(), x)
    tide = ebb.offload(**EXACT)
    with tide:
        loss = (x.sin() * x.cos()).sum()
    with torch.inference_mode():
        found = torch.autograd.grad(loss, x)
    assert_same_bits(found, expected)
    assert_loaded(tide)
