"""In-place writes by backward, the saved copy instead of an error, and numerical checks of derivatives."""

from __future__ import annotations

import contextlib

import pytest
import torch
from checks import assert_same
from inplace import MODIFIED, SAVED, WRITES, Node, assert_as_plain, written_between
from support import assert_at_rest, assert_loaded

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
    if not (inside and torch_backend.packs):
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
    if not (inside and torch_backend.packs):
        assert_loaded(tide)
    assert_at_rest(tide)
