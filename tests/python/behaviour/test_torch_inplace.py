"""In-place writes: an error where plain autograd raises, its gradients where it does not.

Saved-tensor hooks switch PyTorch's own check off, so every case here would otherwise be silent.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from checks import assert_same
from inplace import MODIFIED, SAVED, WRITES, Node, assert_as_plain, outcome, written_between
from support import assert_at_rest, assert_loaded


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
    torch_backend.expect_torn_copies()
    attempt = written_between(SAVED[saved], WRITES[write], when)
    tide = torch_backend.offload()
    result = assert_as_plain(torch_backend, attempt, tide)
    assert (result == MODIFIED) != (write == "nothing")
    # What is packed leaves at the end of the context: a write before spoils it.
    spoiled = torch_backend.packs and when == "in the context" and write != "nothing"
    assert (tide.stats().d2h_bytes > 0) != spoiled


@pytest.mark.parametrize("write", ["itself", "a view", "a detached alias", "nothing"])
def test_a_write_while_the_copy_may_be_running(torch_backend, monkeypatch, write):
    monkeypatch.setattr("ebbtide.torch.framework._use_count", None)
    torch_backend.expect_torn_copies()

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
    # The spoiled entry lets go of the storage, so that the second one is free to be copied.
    assert tide.stats().d2h_bytes == 12 * 4
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
