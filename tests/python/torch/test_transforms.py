"""Function transforms under the context: torch's own answer, be it a value or a refusal."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support import DEVICE, assert_at_rest, assert_loaded
from torch import func
from torch.autograd import functional
from torch.autograd.graph import saved_tensors_hooks
from torch_support import assert_same_bits
from training import assert_step_equal, make_input, make_model, offload, raised_text, step

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")


def scalar(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * x.exp()).sum()


def vector(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * x.exp()


def rows() -> torch.Tensor:
    return torch.linspace(-1, 1, 32).reshape(4, 8)


def leaf() -> torch.Tensor:
    return rows().requires_grad_()


def through_vmap() -> torch.Tensor:
    x = leaf()
    return torch.autograd.grad(func.vmap(scalar)(x).sum(), x)[0]


def batched_gradients() -> torch.Tensor:
    x = leaf()
    y = vector(x)
    directions = torch.eye(32).reshape(32, 4, 8)
    return torch.autograd.grad(y, x, directions, is_grads_batched=True)[0]


def vmap_of_a_layer() -> torch.Tensor:
    model, x = make_model(depth=1), make_input(rows=4)
    loss = func.vmap(model)(x[:, None]).square().mean()
    return torch.autograd.grad(loss, list(model.parameters()))[0]


def forward_over_a_layer() -> torch.Tensor:
    """Of parameters and inputs that need gradients: tangents of zero are saved for backward."""
    model, x = make_model(depth=1), make_input(rows=4).requires_grad_()
    value, tangent = func.jvp(model, (x,), (torch.ones_like(x),))
    return torch.autograd.grad((value + tangent).square().sum(), [x, *model.parameters()])[0]


def dual_numbers() -> torch.Tensor:
    x, weight = leaf(), leaf()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        tangent = torch.autograd.forward_ad.unpack_dual((dual * weight).sin()).tangent
        return torch.autograd.grad(tangent.sum(), weight)[0]


def with_other_weights() -> torch.Tensor:
    model, x = make_model(depth=1), make_input(rows=4)
    weights = {name: (2 * p).detach().requires_grad_() for name, p in model.named_parameters()}
    loss = func.functional_call(model, weights, (x,)).square().mean()
    return torch.autograd.grad(loss, list(weights.values()))[0]


# Answered with a value under hooks.
VALUES: dict[str, Callable[[], torch.Tensor]] = {
    "vmap": lambda: func.vmap(scalar)(rows()),
    "gradient through vmap": through_vmap,
    "vmap of a layer": vmap_of_a_layer,
    "batched gradients": batched_gradients,
    "jvp": lambda: func.jvp(vector, (rows(),), (rows(),))[1],
    "jacfwd": lambda: func.jacfwd(vector)(rows()),
    "jacobian": lambda: functional.jacobian(vector, rows()),
    "vectorized jacobian": lambda: functional.jacobian(vector, rows(), vectorize=True),
    "hessian of autograd": lambda: functional.hessian(scalar, rows()),
    "functional_call": with_other_weights,
}
if DEVICE == "cpu":  # the test device has no tangents of zero, without hooks too
    VALUES |= {"jvp of a layer": forward_over_a_layer, "dual numbers": dual_numbers}
# Refused by torch under any hooks; without hooks the test device has no answer to a Hessian.
REFUSED: dict[str, Callable[[], object]] = {
    "grad": lambda: func.grad(scalar)(rows()),
    "vmap of grad": lambda: func.vmap(func.grad(scalar))(rows()),
    "jacrev": lambda: func.jacrev(vector)(rows()),
    **({"hessian": lambda: func.hessian(scalar)(rows())} if DEVICE == "cpu" else {}),
    "vjp": lambda: func.vjp(vector, rows())[1](rows()),
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("to", ["disk", "host"])
def test_value(name: str, to: str) -> None:
    expected = VALUES[name]()
    tide = offload(to=to)
    with tide:
        found = VALUES[name]()
    assert_same_bits([found], [expected])
    assert_at_rest(tide)


@pytest.mark.parametrize(
    "name", ["gradient through vmap", "batched gradients", "hessian of autograd"]
)
def test_what_they_save_is_managed(name: str) -> None:
    tide = offload()
    with tide:
        VALUES[name]()
    assert tide.stats().storages > 0


def test_batched_gradients_of_what_was_loaded() -> None:
    x = leaf()
    directions = torch.eye(32).reshape(32, 4, 8)
    expected = torch.autograd.grad(vector(x), x, directions, is_grads_batched=True)
    tide = offload()
    with tide:
        y = vector(x)
    assert_same_bits(torch.autograd.grad(y, x, directions, is_grads_batched=True), expected)
    assert_loaded(tide)
    del y
    assert_at_rest(tide)


@pytest.mark.parametrize("name", REFUSED)
def test_refusal_is_torchs_own(name: str) -> None:
    with raised_text(RuntimeError) as expected, saved_tensors_hooks(lambda t: t, lambda t: t):
        REFUSED[name]()
    tide = offload()
    with raised_text(RuntimeError) as found, tide:
        REFUSED[name]()
    assert found == expected and "saved tensor hooks" in found[0]
    assert_at_rest(tide)
    model, x = make_model(), make_input()
    assert_step_equal(offload(model), model, x)


def test_transforms_of_what_was_saved_outside() -> None:
    """A transform runs outside the context, between a forward under it and its backward."""
    model, x = make_model(), make_input()
    expected = step(model, x)
    tide = offload(model)
    model.zero_grad()
    with tide:
        loss = model(x).square().mean()
    for name in REFUSED:
        REFUSED[name]()
    loss.backward()
    assert_same_bits([loss.detach(), *(p.grad for p in model.parameters())], expected)
    assert_loaded(tide)
    del loss
    assert_at_rest(tide)
