"""In-place writes: an error where plain autograd raises, its gradients where it does not.

Saved-tensor hooks switch PyTorch's own check off, so every case here would otherwise be silent.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from checks import assert_same
from support import assert_at_rest, assert_loaded

MODIFIED = "modified by an inplace operation"

# Who writes, given the saved tensor's base. Every one of them moves the base's counter but `.data`.
WRITES = {
    "itself": lambda x: x.mul_(2),
    "a view": lambda x: x[1].add_(1),
    "a transposed view": lambda x: x.t()[0].zero_(),
    "a detached alias": lambda x: x.detach().mul_(2),
    "a view of a detached alias": lambda x: x.detach()[0].neg_(),
    "out=": lambda x: torch.add(x, 1, out=x.detach()),
    "index": lambda x: x.detach().__setitem__((0, 0), 5.0),
    "copy": lambda x: x.detach().copy_(torch.zeros_like(x)),
    "twice": lambda x: (x.detach().mul_(2), x.detach().mul_(0.5)),
    ".data": lambda x: x.data.mul_(2),
    "nothing": lambda x: None,
}

# What is saved, of the tensor that is written.
SAVED = {
    "itself": lambda x: x,
    "a view": lambda x: x[:, 1:],
    "transposed": lambda x: x.t(),
    "a detached alias": lambda x: x.detach(),
}


class Node(torch.autograd.Function):
    """Saves one tensor; `act` is called in backward with what comes back."""

    @staticmethod
    def forward(ctx, anchor, saved, act):
        ctx.save_for_backward(saved)
        ctx.act = act
        return anchor.clone()

    @staticmethod
    def backward(ctx, grad):
        (saved,) = ctx.saved_tensors
        if ctx.act is not None:
            ctx.act(saved)
        return grad * saved.detach().double().sum(), None, None


def outcome(attempt, *args):
    """Gradients, or the words of the error."""
    try:
        return attempt(*args)
    except RuntimeError as error:
        assert MODIFIED in str(error), error
        return MODIFIED


def assert_as_plain(backend, attempt, tide):
    """`attempt(tide)` ends as `attempt(None)` does. Returns how."""
    expected, found = outcome(attempt, contextlib.nullcontext()), outcome(attempt, tide)
    if expected == MODIFIED or found == MODIFIED:
        assert found == expected
    else:
        assert_same(backend, found, expected)
    assert_at_rest(tide)
    return expected


def written_between(saved, write, hold):
    """A write after the save, inside the context or after it, by somebody who holds the tensor."""

    def attempt(context):
        leaf = torch.ones(3, dtype=torch.float64, requires_grad=True)
        x = torch.arange(12.0).view(3, 4).clone()
        with context:
            output = Node.apply(leaf, saved(x), None)
            if hold == "in the context":
                write(x)
        if hold == "after the context":
            write(x)
        return torch.autograd.grad(output.sum(), leaf)

    return attempt


@pytest.mark.parametrize("when", ["in the context", "after the context"])
@pytest.mark.parametrize("saved", SAVED)
@pytest.mark.parametrize("write", WRITES)
def test_a_write_between_save_and_backward(torch_backend, write, saved, when):
    attempt = written_between(SAVED[saved], WRITES[write], when)
    result = assert_as_plain(torch_backend, attempt, torch_backend.offload())
    legal = write in (".data", "nothing")
    assert (result == MODIFIED) != legal


@pytest.mark.parametrize("when", ["in the context", "after the context"])
@pytest.mark.parametrize("saved", SAVED)
@pytest.mark.parametrize("write", [w for w in WRITES if w != ".data"])
def test_a_write_after_the_copy(torch_backend, monkeypatch, write, saved, when):
    """Where use counts are not known the copy is made at once and the lease is gone."""
    monkeypatch.setattr("ebbtide.torch.framework._use_count", None)
    attempt = written_between(SAVED[saved], WRITES[write], when)
    tide = torch_backend.offload()
    result = assert_as_plain(torch_backend, attempt, tide)
    assert (result == MODIFIED) != (write == "nothing")
    assert tide.stats().d2h_bytes > 0


@pytest.mark.parametrize("write", ["itself", "a view", "a detached alias", "nothing"])
def test_a_write_while_the_copy_may_be_running(torch_backend, monkeypatch, write):
    monkeypatch.setattr("ebbtide.torch.framework._use_count", None)

    def attempt(context):
        leaf = torch.ones(3, dtype=torch.float64, requires_grad=True)
        x = torch.ones(1024, 1024)
        with context:
            output = Node.apply(leaf, x, None)
            WRITES[write](x)
        return torch.autograd.grad(output.sum(), leaf)

    tide = torch_backend.offload(in_flight_bytes=1 << 30)
    result = assert_as_plain(torch_backend, attempt, tide)
    assert (result == MODIFIED) == (write != "nothing")


@pytest.mark.parametrize("write", WRITES)
def test_a_write_to_a_tensor_that_stays_on_the_device(torch_backend, write):
    for options in ({"min_bytes": "1MiB"}, {"policy": lambda t: False}):
        if "policy" in options:
            from ebbtide.torch import CheckpointPolicy

            options = {"policy": lambda t: CheckpointPolicy.MUST_SAVE}
        attempt = written_between(SAVED["itself"], WRITES[write], "after the context")
        tide = torch_backend.offload(**options)
        assert_as_plain(torch_backend, attempt, tide)
        assert tide.stats().storages == 0


@pytest.mark.parametrize("write", WRITES)
def test_a_write_to_a_tensor_in_the_window(torch_backend, write):
    attempt = written_between(SAVED["itself"], WRITES[write], "after the context")
    tide = torch_backend.offload(keep_last_bytes="1MiB")
    assert_as_plain(torch_backend, attempt, tide)
    assert tide.stats().d2h_bytes == 0


@pytest.mark.parametrize("write", WRITES)
def test_a_write_before_the_save_is_legal(torch_backend, write):
    def attempt(context):
        leaf = torch.ones(3, dtype=torch.float64, requires_grad=True)
        with context:
            x = torch.arange(12.0).view(3, 4).clone()
            first = Node.apply(leaf, x.clone(), None)
            WRITES[write](x)
            output = Node.apply(first, x, None)
            x = None
        return torch.autograd.grad(output.sum(), leaf)

    tide = torch_backend.offload()
    assert assert_as_plain(torch_backend, attempt, tide) != MODIFIED
    assert_loaded(tide)


@pytest.mark.parametrize("write", [w for w in WRITES if w != ".data"])
def test_a_write_between_two_saves_of_one_tensor(torch_backend, write):
    """The first save is spoiled and never copied; the second has an entry of its own."""

    def attempt(context):
        leaves = [torch.ones(3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
        with context:
            x = torch.arange(12.0).view(3, 4).clone()
            first = Node.apply(leaves[0], x, None)
            WRITES[write](x)
            second = Node.apply(leaves[1], x, None)
            x = None
        gradients = torch.autograd.grad(second.sum(), leaves[1])
        return [*gradients, outcome(torch.autograd.grad, first.sum(), leaves[0])]

    expected = attempt(contextlib.nullcontext())
    tide = torch_backend.offload()
    found = attempt(tide)
    assert_same(torch_backend, found[:1], expected[:1])
    if write == "nothing":
        assert_same(torch_backend, found[1], expected[1])
    else:
        assert (found[1], expected[1]) == (MODIFIED, MODIFIED)
    # The spoiled entry stays with its storage, as plain autograd's would.
    assert tide.stats().d2h_bytes == (12 * 4 if write == "nothing" else 0)
    assert tide.stats().storages == (1 if write == "nothing" else 2)
    assert_at_rest(tide)


def test_a_spoiled_entry_that_is_never_unpacked_never_raises(torch_backend):
    def attempt(context):
        used = torch.ones(3, dtype=torch.float64, requires_grad=True)
        unused = torch.ones(3, dtype=torch.float64, requires_grad=True)
        with context:
            x = torch.arange(12.0)
            y = x * 2
            spoiled = Node.apply(unused, x, None)
            output = Node.apply(used, y, None)
            x.zero_()
            y = None
        total = output.sum() + spoiled.sum()
        return torch.autograd.grad(total, used)

    tide = torch_backend.offload()
    assert assert_as_plain(torch_backend, attempt, tide) != MODIFIED
    assert tide.stats().d2h_bytes == tide.stats().h2d_bytes == 12 * 4


# --- parameters


class SaysItself(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(4, 4)
        self.second = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.second(self.first(x).relu())


@pytest.mark.parametrize("pass_model", [True, False], ids=["model", "no-model"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_step_between_forward_and_backward(torch_backend, optimizer, pass_model):
    def attempt(context):
        model = built[-1]
        x = torch.ones(2, 4)
        steps = optimizer(model.parameters(), lr=0.1)
        model(x).sum().backward()
        with context:
            loss = model(x).sum()
        steps.step()
        loss.backward()

    built = [SaysItself()]
    assert outcome(attempt, contextlib.nullcontext()) == MODIFIED
    built.append(SaysItself())
    tide = torch_backend.offload(built[-1] if pass_model else None)
    assert outcome(attempt, tide) == MODIFIED
    assert_at_rest(tide)


# --- writes by backward


def in_backward(write, readers):
    """Several nodes read one tensor; the first to run backward writes to what it got."""

    def attempt(context):
        leaf = torch.ones(3, dtype=torch.float64, requires_grad=True)
        with context:
            x = torch.arange(12.0).view(3, 4).clone()
            output = leaf
            for _ in range(readers):
                output = Node.apply(output, x, None)
            output = Node.apply(output, x, write)
            x = None
        return torch.autograd.grad(output.sum(), leaf)

    return attempt


@pytest.mark.parametrize("readers", [0, 1, 3])
@pytest.mark.parametrize("write", WRITES)
def test_a_backward_formula_that_writes_to_what_it_reads(torch_backend, write, readers):
    tide = torch_backend.offload()
    result = assert_as_plain(torch_backend, in_backward(WRITES[write], readers), tide)
    assert (result == MODIFIED) == (readers > 0 and write not in (".data", "nothing"))
    assert_loaded(tide)


@pytest.mark.parametrize("write", WRITES)
def test_a_backward_formula_that_writes_to_another_view(torch_backend, write):
    """One node reads a view of what the node before it has written to."""

    def attempt(context):
        leaf = torch.ones(3, dtype=torch.float64, requires_grad=True)
        with context:
            x = torch.arange(12.0).view(3, 4).clone()
            output = Node.apply(leaf, x.t()[1:], None)
            output = Node.apply(output, x, WRITES[write])
            x = None
        return torch.autograd.grad(output.sum(), leaf)

    tide = torch_backend.offload()
    assert_as_plain(torch_backend, attempt, tide)
    assert_loaded(tide)


@pytest.mark.parametrize("write", WRITES)
def test_a_write_during_backward_by_a_holder(torch_backend, write):
    """A hook on a gradient writes to a tensor that an earlier node has saved."""

    def attempt(context):
        leaf = torch.ones(3, dtype=torch.float64, requires_grad=True)
        x = torch.arange(12.0).view(3, 4).clone()
        with context:
            middle = Node.apply(leaf, x, None)
            output = Node.apply(middle, torch.ones(2), None)

        def hook(grad):
            WRITES[write](x)

        middle.register_hook(hook)
        return torch.autograd.grad(output.sum(), leaf)

    assert_as_plain(torch_backend, attempt, torch_backend.offload())


def test_restoring_moves_no_version(torch_backend):
    versions = []
    leaf = torch.ones(3, dtype=torch.float64, requires_grad=True)
    tide = torch_backend.offload()
    with tide:
        x = torch.zeros(6)
        x.add_(1), x.mul_(2)
        output = Node.apply(leaf, x, lambda saved: versions.append(saved._version))
        output = Node.apply(output, x[2:], lambda saved: versions.append(saved._version))
        assert x._version == 2
        x = None
    torch.autograd.grad(output.sum(), leaf, retain_graph=True)
    torch.autograd.grad(output.sum(), leaf)
    assert versions == [2, 2, 2, 2]
    assert_loaded(tide)
    assert_at_rest(tide)


# --- the saved copy instead of an error


@pytest.mark.parametrize("write", [w for w in WRITES if w not in (".data", "nothing")])
def test_the_saved_copy_is_used_when_asked_for(torch_backend, monkeypatch, write):
    """on_inplace="saved": gradients of what was saved, where the copy was complete before."""
    monkeypatch.setattr("ebbtide.torch.framework._use_count", None)
    attempt = written_between(SAVED["a view"], WRITES[write], "after the context")
    before = written_between(SAVED["a view"], WRITES["nothing"], "after the context")
    tide = torch_backend.offload(on_inplace="saved")
    assert_same(torch_backend, attempt(tide), before(contextlib.nullcontext()))
    assert_loaded(tide)
    assert_at_rest(tide)


@pytest.mark.parametrize("write", ["itself", "a view", "a detached alias"])
def test_without_a_complete_copy_the_error_stays(torch_backend, write):
    """on_inplace="saved" and a parked storage: there is no copy."""
    attempt = written_between(SAVED["itself"], WRITES[write], "after the context")
    tide = torch_backend.offload(on_inplace="saved")
    with pytest.raises(RuntimeError, match=MODIFIED):
        attempt(tide)
    assert_at_rest(tide)


# --- numerical checks


def smooth(a, b):
    x = (a @ b).tanh()
    y = torch.softmax(x.t(), -1) * x.t()
    return (y.exp() * y[:, :1] + x.t()).sigmoid().sum(0)


@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward after"])
def test_gradcheck(torch_backend, inside):
    tide = torch_backend.offload()
    leaves = [torch_backend.leaf(3, 4, seed=1), torch_backend.leaf(4, 3, seed=2)]

    def function(a, b):
        with contextlib.nullcontext() if inside else tide:
            return smooth(a, b)

    with tide if inside else contextlib.nullcontext():
        assert torch.autograd.gradcheck(function, leaves)
    assert_loaded(tide)
    assert_at_rest(tide)


@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward after"])
def test_gradgradcheck(torch_backend, inside):
    tide = torch_backend.offload()
    leaves = [torch_backend.leaf(2, 3, seed=1), torch_backend.leaf(3, 2, seed=2)]

    def function(a, b):
        with contextlib.nullcontext() if inside else tide:
            return smooth(a, b)

    with tide if inside else contextlib.nullcontext():
        assert torch.autograd.gradgradcheck(function, leaves)
    assert_loaded(tide)
    assert_at_rest(tide)
