"""In-place writes for tests: who writes, what is saved, and how an attempt ends."""

from __future__ import annotations

import contextlib

import torch
from checks import assert_same
from support import assert_at_rest

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
