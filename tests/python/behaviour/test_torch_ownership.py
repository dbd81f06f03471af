"""PyTorch's own holders: parameters and their views, casts, buffers, and mechanisms that swap or resize memory."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from checks import assert_same
from support import assert_at_rest
from torch import nn
from torch.nn.utils import parametrizations, parametrize

FLOAT = 4


def train(module, x, tide=None, between=None):
    """Output, gradients of the input and of every parameter."""
    x = x.detach().clone().requires_grad_(x.is_floating_point())
    with tide or contextlib.nullcontext():
        output = module(x)
        loss = output.float().square().sum()
    if between is not None:
        between()
    wanted = [p for p in module.parameters() if p.requires_grad]
    wanted += [x] if x.requires_grad else []
    return [output.detach(), *torch.autograd.grad(loss, wanted)]


def compare_module(backend, module, x, *, pass_model, **kwargs):
    """Bits as without; no byte of a weight is copied. Returns the statistics."""
    expected = train(module, x, **kwargs)
    weights = [p.detach().clone() for p in module.parameters()]
    tide = backend.offload(module if pass_model else None)
    found = train(module, x, tide, **kwargs)
    assert_same(backend, found, expected)
    assert_same(backend, [p.detach() for p in module.parameters()], weights)
    found = None
    assert_at_rest(tide)
    return tide.stats()


@pytest.fixture(params=[True, False], ids=["model", "no-model"])
def pass_model(request):
    """The model is known, or weights are recognised by type and base alone."""
    return request.param


def gelu_mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))


def test_weights_and_their_transposes(torch_backend, pass_model):
    stats = compare_module(torch_backend, gelu_mlp(), torch.randn(5, 6), pass_model=pass_model)
    # GELU's input and output; the module's input and the loss's input are held.
    assert stats.d2h_bytes == stats.h2d_bytes == 2 * 5 * 8 * FLOAT
    assert stats.kept["parameter"] == 2


def test_frozen_weights(torch_backend, pass_model):
    model = gelu_mlp()
    for parameter in model[2].parameters():
        parameter.requires_grad_(False)
    stats = compare_module(torch_backend, model, torch.randn(5, 6), pass_model=pass_model)
    assert stats.kept["parameter"] >= 1
    assert stats.d2h_bytes == 5 * 8 * FLOAT  # GELU's input; nobody needs its output


VIEWS_OF_WEIGHTS = {
    "itself": lambda w: w,
    "transposed": lambda w: w.t(),
    "row": lambda w: w[1],
    "view of a view": lambda w: w.t()[1:, 2:],
    "expanded": lambda w: w[:, :1].expand(4, 7),
    "dtype": lambda w: w.view(torch.int32).view(torch.float32),
}


class UsesView(nn.Module):
    def __init__(self, view):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, 7))
        self.view = view

    def forward(self, x):
        view = self.view(self.weight)
        return (x.exp() * view.sum() + (x[:, None, None] * view).sum()).sin() + self.weight.sum()


@pytest.mark.parametrize("name", VIEWS_OF_WEIGHTS)
def test_views_of_a_weight(torch_backend, pass_model, name):
    model = UsesView(VIEWS_OF_WEIGHTS[name])
    stats = compare_module(torch_backend, model, torch.randn(3), pass_model=pass_model)
    # A view of another dtype has no base: without the model it is known by being held.
    assert stats.kept["parameter"] + stats.live_hits >= 1
    # Three numbers of exp, of the sum before sin and at most the scalar: far less than the weight.
    assert stats.d2h_bytes < 4 * 7 * FLOAT


@pytest.mark.parametrize("detach", [lambda w: w.detach(), lambda w: w.data, lambda w: w.data.t()])
def test_detached_views_of_a_weight(torch_backend, pass_model, detach):
    """Their base is gone: with the model they are known by storage, without it they are held."""
    model = UsesView(detach)
    stats = compare_module(torch_backend, model, torch.randn(3), pass_model=pass_model)
    assert stats.d2h_bytes < 4 * 7 * FLOAT
    if pass_model:
        assert stats.kept["parameter"] >= 1
    else:
        assert stats.live_hits >= 1


def test_buffers(torch_backend, pass_model):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))
            self.register_buffer("scale", torch.arange(8.0))

        def forward(self, x):
            return (x * self.weight).exp() * self.scale

    stats = compare_module(torch_backend, Scaled(), torch.randn(5, 8), pass_model=pass_model)
    assert stats.d2h_bytes == 5 * 8 * FLOAT  # exp's output
    if pass_model:
        assert stats.kept["parameter"] >= 2


def test_tied_embedding(torch_backend, pass_model):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embedding = nn.Embedding(11, 6)
            self.head = nn.Linear(6, 11, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens):
            return self.head(self.embedding(tokens).tanh())

    tokens = torch.arange(10).view(2, 5) % 11
    stats = compare_module(torch_backend, Tied(), tokens, pass_model=pass_model)
    # tanh's output only: saved by tanh, and viewed by the product. The tokens are the test's.
    assert stats.d2h_bytes <= 10 * 6 * FLOAT + tokens.numel() * 8
    assert stats.d2h_bytes < 11 * 6 * FLOAT + tokens.numel() * 8


def test_lstm_flat_weights(torch_backend, pass_model):
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(3, 32, num_layers=2)

        def forward(self, x):
            return self.lstm(x)[0]

    stats = compare_module(torch_backend, Net(), torch.randn(2, 1, 3), pass_model=pass_model)
    # A fused operator saves the biases too.
    assert stats.kept["parameter"] in (4, 8)
    assert stats.d2h_bytes > 0


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_parametrised_weights(torch_backend, pass_model, norm):
    """The computed weight is an activation; what it is computed from is a weight."""
    torch.manual_seed(0)
    layer = nn.Linear(6, 4)
    model = nn.Sequential(norm(layer), nn.Tanh(), nn.Linear(4, 2)).train()
    x = torch.randn(5, 6)
    state = copy.deepcopy(model.state_dict())
    expected = train(model, x)
    model.load_state_dict(state)
    tide = torch_backend.offload(model if pass_model else None)
    assert_same(torch_backend, train(model, x, tide), expected)
    assert tide.stats().h2d_bytes > 0
    assert_at_rest(tide)


def test_a_cached_parametrisation_stays_readable(torch_backend):
    torch.manual_seed(0)
    model = parametrizations.weight_norm(nn.Linear(6, 4))
    tide = torch_backend.offload(model)
    x = torch.randn(5, 6)
    expected = train(model, x)
    with parametrize.cached():
        found = train(model, x, tide)
        cached = model.weight
        assert torch.equal(cached, model.weight)
    assert_same(torch_backend, found, expected)
    cached = None
    assert_at_rest(tide)


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
def test_autocast_casts_of_weights(torch_backend, pass_model, frozen):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    if frozen:
        model[2].requires_grad_(False)

    def cast(x, tide=None):
        def forward(x):
            with torch.autocast(torch_backend.device, torch.bfloat16):
                return model(x)

        return train(Forwarder(model, forward), x, tide)

    x = torch.randn(2, 64)
    expected = cast(x)
    tide = torch_backend.offload(model if pass_model else None)
    assert_same(torch_backend, cast(x, tide), expected)
    stats = tide.stats()
    # A frozen weight is cast without a graph: nothing tells its cast from an activation.
    assert stats.kept["parameter_cast"] == (1 if frozen else 2)
    # The cast of the input, GELU's input and, for the second weight's gradient, its output; the
    # loss works on its own float copy.
    activations = (2 if frozen else 3) * 2 * 64 * 2 + 2 * 64 * 4
    assert stats.d2h_bytes == activations + (64 * 64 * 2 if frozen else 0)
    assert_at_rest(tide)


class Forwarder(nn.Module):
    def __init__(self, model, forward):
        super().__init__()
        self.model = model
        self.run = forward

    def forward(self, x):
        return self.run(x)


# --- mechanisms that take memory away and put it back


class Scale(nn.Module):
    """Saves the parameter itself, not a view of it."""

    def __init__(self, requires_grad=True):
        super().__init__()
        self.scale = nn.Parameter(torch.arange(1.0, 9.0), requires_grad)
        self.shift = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return (x + self.shift).exp() * self.scale


@pytest.mark.parametrize("requires_grad", [True, False], ids=["trainable", "frozen"])
@pytest.mark.parametrize("put_back", [1.0, 3.0], ids=["same", "other values"])
def test_a_parameter_emptied_after_forward_and_put_back_before_backward(
    torch_backend, pass_model, requires_grad, put_back
):
    """As ZeRO-3 does. Plain autograd reads what the parameter holds at backward."""
    model = Scale(requires_grad)
    full = model.scale.data

    def between():
        model.scale.data = torch.empty(0)
        model.scale.data = full * put_back

    def swap_back():
        model.scale.data = full

    x = torch.randn(3, 8)
    expected = train(model, x, between=between)
    swap_back()
    tide = torch_backend.offload(model if pass_model else None)
    found = train(model, x, tide, between=between)
    assert_same(torch_backend, found, expected)
    assert tide.stats().h2d_bytes == 3 * 8 * FLOAT  # exp's output
    assert_at_rest(tide)


@pytest.mark.parametrize("requires_grad", [True, False], ids=["trainable", "frozen"])
def test_an_emptied_parameter_gives_its_memory_back(torch_backend, pass_model, requires_grad):
    from torch.multiprocessing.reductions import StorageWeakRef

    for offloaded in (False, True):
        model = Scale(requires_grad)
        tide = torch_backend.offload(model if pass_model else None)
        memory = StorageWeakRef(model.scale.untyped_storage())
        if offloaded:
            with tide:
                output = model(torch.randn(3, 8))
        else:
            output = model(torch.randn(3, 8))
        model.scale.data = torch.empty(0)
        assert memory.expired(), f"{offloaded=}"
        assert output.requires_grad
    output = None
    assert_at_rest(tide)


@pytest.mark.parametrize("held", [True, False], ids=["held", "let go"])
def test_a_storage_resized_to_nothing_and_back(torch_backend, held):
    """As FSDP does with the gathered weights: the memory goes after forward and is filled again."""
    backend = torch_backend

    def attempt(tide):
        gathered = torch.arange(8.0)
        values = gathered.clone()
        storage = gathered.untyped_storage()
        leaf = backend.leaf(2)

        def program(a):
            return backend.save(a, [gathered[2:6], gathered])

        forward = backend.forward(program, [leaf], tide)
        storage.resize_(0)
        storage.resize_(32)
        gathered.data.copy_(values)
        if not held:
            storage = gathered = program = None
        return forward.gradients()

    expected = attempt(None)
    tide = backend.offload()
    assert_same(backend, attempt(tide), expected)
    assert tide.stats().d2h_bytes == 0
    assert_at_rest(tide)


def test_a_storage_resized_before_the_context_ends(torch_backend):
    """The look at parked storages finds no memory there: nothing is read from it."""
    backend = torch_backend

    def attempt(tide):
        x = torch.arange(8.0)
        storage = x.untyped_storage()

        def program(a):
            a = backend.save(a, [x])
            storage.resize_(0)
            return backend.save(a, [backend.tensor(4)])

        forward = backend.forward(program, [backend.leaf(2)], tide)
        storage.resize_(32)
        x.data.copy_(torch.arange(8.0))
        return forward.gradients()

    expected = attempt(None)
    tide = backend.offload()
    assert_same(backend, attempt(tide), expected)
    assert_at_rest(tide)


def test_what_the_caller_held_until_backward_began_is_not_moved_then(backend):
    """It is what backward needs first: it would come straight back."""
    held = []

    def program(anchor):
        held[:] = [backend.tensor(64, seed=1)]
        return backend.save(anchor, [backend.tensor(32), held[0]])

    tide = backend.offload()
    forward = backend.forward(program, [backend.leaf(2)], tide)
    assert tide.stats().parked == 1
    held.clear()
    forward.gradients()
    stats = tide.stats()
    assert stats.live_hits == 1
    assert stats.d2h_bytes == stats.h2d_bytes == 32 * 4
    forward = None
    assert_at_rest(tide)
