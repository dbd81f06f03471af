"""Parameters, buffers, their views and autocast's casts of them stay where they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from support import DEVICE, EXACT, assert_at_rest, assert_loaded
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch_support import assert_same_bits
from training import gradients, make_input, make_model, offload, step

import ebbtide.torch as ebb
from ebbtide import CheckpointPolicy

WIDTH = 24  # unlike the number of rows: a shape tells a weight from an activation
ROWS = 10


class Head(nn.Module):
    """Layers before and after the one looked at, so that its input needs a gradient."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.middle = middle
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.middle(self.before(x).tanh()).tanh()).sin()


class WithWeight(nn.Module):
    """A product with ``use(weight)``."""

    def __init__(
        self, use: Callable[[torch.Tensor], torch.Tensor], kind: str = "parameter"
    ) -> None:
        super().__init__()
        weight = torch.linspace(-1, 1, WIDTH * WIDTH).reshape(WIDTH, WIDTH)
        if kind == "buffer":
            self.register_buffer("weight", weight)
        else:
            self.weight = nn.Parameter(weight, requires_grad=kind == "parameter")
        self.use = use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.use(self.weight)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH, bias=False)
        self.two = nn.Linear(WIDTH, WIDTH, bias=False)
        self.two.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x).exp().tanh())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x[:, None])[0][:, 0]


class NormOfBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


class Embedded(nn.Module):
    """The head of a language model: its weight is the table that the input came from."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, WIDTH)
        self.head = nn.Linear(WIDTH, 50, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = torch.arange(x.shape[0])
        return self.head(self.table(tokens) * x) @ torch.ones(50, WIDTH)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "frozen linear": lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "batch norm": NormOfBatch,
    "evaluated batch norm": lambda: NormOfBatch().eval(),
    "lstm": Recurrent,
    "tied": Tied,
    "tied embedding": Embedded,
    "parameter": lambda: WithWeight(lambda w: w),
    "frozen parameter": lambda: WithWeight(lambda w: w, "frozen"),
    "buffer": lambda: WithWeight(lambda w: w, "buffer"),
    "transposed": lambda: WithWeight(lambda w: w.t()),
    "rows of a frozen one": lambda: WithWeight(
        lambda w: w.view(2, -1, WIDTH)[0].t().repeat(1, 2), "frozen"
    ),
}
# Views that show neither by type nor by base what they are views of.
ALIASES: dict[str, Callable[[], nn.Module]] = {
    "detached": lambda: WithWeight(lambda w: w.detach()),
    "detached view": lambda: WithWeight(lambda w: w.detach().t()),
    "view of detached rows": lambda: WithWeight(lambda w: w.detach().view(-1).view(WIDTH, WIDTH)),
    "data": lambda: WithWeight(lambda w: w.data),
    "view of data": lambda: WithWeight(lambda w: w.data.t()),
    "view of a buffer": lambda: WithWeight(lambda w: w.t(), "buffer"),
    "detached buffer": lambda: WithWeight(lambda w: w.detach(), "buffer"),
}  # fmt: skip


def addresses(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


class Offered:
    """A policy that offloads all it is asked about, and keeps what that was."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def __call__(self, tensor: torch.Tensor) -> CheckpointPolicy:
        self.tensors.append(tensor.detach())
        return CheckpointPolicy.MUST_SWAP


def count_saved_weights(model: nn.Module, x: torch.Tensor) -> int:
    """How many saved tensors lie in the storage of a weight."""
    own, saved = addresses(weights_of(model)), []
    with saved_tensors_hooks(lambda t: saved.append(t.detach()), lambda t: t):
        model(x)
    return sum(tensor.untyped_storage().data_ptr() in own for tensor in saved)


def make(middle: Callable[[], nn.Module]) -> Head:
    torch.manual_seed(5)
    return Head(middle())


def check(model: nn.Module, known: nn.Module | None) -> None:
    """Equal, no weight offered for offload, each counted."""
    x = make_input(ROWS, WIDTH)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    expected = step(model, x)
    model.load_state_dict(state)
    saved_weights = count_saved_weights(model, x)
    model.load_state_dict(state)
    offered = Offered()
    tide = offload(known, policy=offered)
    step(model, x, tide)
    assert not addresses(offered.tensors) & addresses(weights_of(model))
    assert tide.stats().kept["parameter"] == saved_weights > 0
    del offered.tensors[:]
    assert_at_rest(tide)
    model.load_state_dict(state)
    tide = offload(known)
    assert_same_bits(step(model, x, tide), expected)
    assert_loaded(tide)
    assert_at_rest(tide)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("given", [True, False], ids=["model given", "model unknown"])
def test_by_type_or_base(name: str, given: bool) -> None:
    if name in ("batch norm", "evaluated batch norm", "buffer") and not given:
        pytest.skip("buffers that are plain tensors are known by the model alone")
    model = make(MODULES[name])
    check(model, model if given else None)


@pytest.mark.parametrize("name", ALIASES)
def test_by_storage(name: str) -> None:
    model = make(ALIASES[name])
    check(model, model)


@pytest.mark.parametrize("name", [*ALIASES, "buffer", "batch norm"])
def test_unknown_aliases_are_held_by_the_model_and_not_copied(name: str) -> None:
    model, x = make((MODULES | ALIASES)[name]), make_input(ROWS, WIDTH)
    expected = step(model, x)
    known, unknown = offload(model), offload()
    assert_same_bits(step(model, x, known), expected)
    assert_same_bits(step(model, x, unknown), expected)
    assert unknown.stats().d2h_bytes == known.stats().d2h_bytes > 0
    assert unknown.stats().unfreed_bytes == 0
    assert_at_rest(unknown)


def test_parametrised_weight() -> None:
    """The weight is computed at each use: an activation, unless it is cached and somebody holds it."""

    class Symmetric(nn.Module):
        def forward(self, w: torch.Tensor) -> torch.Tensor:
            return w.triu() + w.triu(1).transpose(-1, -2)

    model = make(lambda: nn.Linear(WIDTH, WIDTH))
    parametrize.register_parametrization(model.middle, "weight", Symmetric())
    x = make_input(ROWS, WIDTH)
    expected = step(model, x)
    tide = offload(model)
    assert_same_bits(step(model, x, tide), expected)
    assert_loaded(tide)
    assert_at_rest(tide)
    computed = tide.stats().d2h_bytes
    tide.reset_stats()
    with parametrize.cached():
        with tide:
            loss = model(x).square().mean()
        model.zero_grad()
        loss.backward()
        assert_same_bits([loss.detach(), *gradients(model)], expected)
        assert tide.stats().d2h_bytes == computed - WIDTH * WIDTH * 4
        del loss
    assert_at_rest(tide)


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_normed_weight(norm: Callable[..., nn.Module]) -> None:
    model = make(lambda: norm(nn.Linear(WIDTH, WIDTH)))
    model.eval()  # the spectral norm's power iteration would change its buffers
    check(model, model)


def test_module_replaced_after_the_object_was_made() -> None:
    model = make(ALIASES["detached"])
    x = make_input(ROWS, WIDTH)
    offered = Offered()
    tide = offload(model, policy=offered)
    model.double()  # all weights have new storages
    model.after = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    expected = step(model, x.double())
    assert_same_bits(step(model, x.double(), tide), expected)
    assert not addresses(offered.tensors) & addresses(weights_of(model))
    assert tide.stats().kept["parameter"] == count_saved_weights(model, x.double()) > 0
    del offered.tensors[:]
    assert_at_rest(tide)


def test_weights_of_a_dead_model_are_forgotten() -> None:
    """The index holds them weakly: a later tensor at the same address is no weight."""
    tide = offload(make_model(depth=1))
    model, x = make_model(), make_input()
    assert_same_bits(step(model, x, tide), step(model, x))
    assert_loaded(tide)
    assert_at_rest(tide)


def test_weight_replaced_by_a_tensor_while_entered() -> None:
    model, x = make(ALIASES["data"]), make_input(ROWS, WIDTH)
    expected = step(model, x)
    tide = offload(model)
    model.zero_grad()
    with tide:
        model.middle.weight.data = model.middle.weight.data.clone()
        loss = model(x).square().mean()
    loss.backward()
    assert_same_bits([loss.detach(), *gradients(model)], expected)
    assert_loaded(tide)
    del loss
    assert_at_rest(tide)


def test_lazy_and_sparse_weights() -> None:
    model = nn.Sequential(nn.LazyLinear(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    x = make_input(ROWS, WIDTH)
    tide = offload(model)  # while the first weight has no storage yet
    with torch.no_grad():
        model(x)
    expected = step(model, x)
    assert_same_bits(step(model, x, tide), expected)
    assert tide.stats().kept["parameter"] == count_saved_weights(model, x)
    model.register_buffer("sparse", torch.eye(3, device="cpu").to_sparse())
    assert_same_bits(step(model, x, tide), expected)
    assert_loaded(tide)
    assert_at_rest(tide)


# --- autocast


def cast_step(model: nn.Module, x: torch.Tensor, tide: Any = None) -> list[torch.Tensor | None]:
    with torch.autocast(DEVICE, torch.bfloat16):
        return step(model, x, tide)


def shapes(tensors: Iterable[torch.Tensor]) -> set[tuple[int, ...]]:
    return {tuple(sorted(tensor.shape)) for tensor in tensors if tensor.dim() > 1}


# With the number of casts saved: not that of the first layer, whose input needs no gradient.
AUTOCAST: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "linear": (lambda: nn.Linear(WIDTH, WIDTH), 2),
    "transposed": (lambda: WithWeight(lambda w: w.t()), 2),
    "tied": (Tied, 3),
    "wide": (lambda: nn.Sequential(nn.Linear(WIDTH, 99), nn.Linear(99, WIDTH)), 3),
}


@pytest.mark.parametrize("name", AUTOCAST)
@pytest.mark.parametrize("given", [True, False], ids=["model given", "model unknown"])
def test_casts_of_weights(name: str, given: bool) -> None:
    middle, casts = AUTOCAST[name]
    model, x = make(middle), make_input(ROWS, WIDTH)
    expected = cast_step(model, x)
    offered = Offered()
    tide = offload(model if given else None, policy=offered)
    assert_same_bits(cast_step(model, x, tide), expected)
    assert tide.stats().kept["parameter_cast"] == casts
    assert not shapes(offered.tensors) & shapes(weights_of(model))
    assert any(tensor.dtype == torch.bfloat16 for tensor in offered.tensors)
    del offered.tensors[:]
    assert_at_rest(tide)
    tide = offload(model)
    assert_same_bits(cast_step(model, x, tide), expected)
    assert_loaded(tide)
    assert_at_rest(tide)


def test_context_around_autocast() -> None:
    model, x = make(AUTOCAST["linear"][0]), make_input(ROWS, WIDTH)
    expected = cast_step(model, x)
    tide = offload(model)
    model.zero_grad()
    with tide, torch.autocast(DEVICE, torch.bfloat16):
        loss = model(x).square().mean()
    loss.backward()
    assert_same_bits([loss.detach(), *gradients(model)], expected)
    assert tide.stats().kept["parameter_cast"] == 2
    assert_loaded(tide)
    del loss
    assert_at_rest(tide)


def test_casts_of_frozen_weights_are_right() -> None:
    """They have no graph that would tell what they are casts of."""
    model, x = make(lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False)), make_input(ROWS, WIDTH)
    expected = cast_step(model, x)
    tide = offload(model)
    assert_same_bits(cast_step(model, x, tide), expected)
    assert tide.stats().kept["parameter_cast"] == 1  # the last layer's, which is trained
    assert_loaded(tide)
    assert_at_rest(tide)


def test_a_cast_of_an_activation_is_none_of_a_weight() -> None:
    x = torch.linspace(0, 1, 64, requires_grad=True)
    tide = offload()
    with tide, torch.autocast(DEVICE, torch.bfloat16):
        loss = F.gelu(x.exp().to(torch.bfloat16)).float().sin().sum()
    assert tide.stats().kept["parameter_cast"] == 0
    loss.backward()
    found, x.grad = x.grad, None
    F.gelu(x.exp().to(torch.bfloat16)).float().sin().sum().backward()
    assert_same_bits([found], [x.grad])
    assert_loaded(tide)
    del loss
    assert_at_rest(tide)


@pytest.mark.parametrize("kind", ["buffer", "input"])
@pytest.mark.parametrize("size", [4, 200])
def test_data_put_into_a_leaf_after_forward_is_seen_as_without(kind: str, size: int) -> None:
    """Autograd holds the leaf itself: backward reads what its owner has put in since."""

    def gradient(context: AbstractContextManager[object]) -> torch.Tensor:
        module = nn.Module()
        module.register_buffer("table", torch.ones(size, size))
        leaf = module.table if kind == "buffer" else torch.ones(size, size)
        w = torch.randn(size, size, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with context:
            loss = (w * leaf).sum()
        leaf.data = torch.full((size, size), 3.0)
        return torch.autograd.grad(loss, w)[0]

    expected = gradient(nullcontext())
    assert torch.equal(expected, torch.full((size, size), 3.0))
    assert_same_bits([gradient(ebb.offload(**EXACT))], [expected])
