"""Gradients of gradients: a ticket is unpacked by both backwards, and what comes back is part of the graph.

A restored tensor that is not would make second derivatives zero, without a word.
"""

from __future__ import annotations

import contextlib

import pytest
from checks import assert_same
from support import assert_at_rest, assert_loaded


def nth_gradients(backend, program, leaf, depth, forward_in, backward_in):
    """Of the sum of `program`, then of the sum of the squares of its gradients, and so on."""
    found = []
    with backward_in:
        with forward_in, backend.recording():
            y = backend.op("sum", program(leaf))
        for left in range(depth)[::-1]:
            (grad,) = backend.gradients(y, [leaf], record=left > 0)
            found.append(grad)
            with backend.recording():
                y = backend.op("sum", backend.op("mul", grad, grad)) if left else None
    return found


def cube(backend):
    def program(a):
        x = backend.op("exp", a)
        return backend.op("mul", backend.op("mul", x, x), x)

    return program


def squares_of(backend, *steps):
    """A node saves a view, with the strides it has, of a result."""

    def program(a):
        x = backend.op("exp", a)
        view = backend.view(x, *steps)
        x = None
        return backend.square(view)

    return program


PROGRAMS = {
    "operations": cube,
    "a saved tensor": lambda backend: squares_of(backend),
    "transposed": lambda backend: squares_of(backend, ("t",)),
    "columns": lambda backend: squares_of(backend, ("narrow", 1, 1, 2)),
    "steps": lambda backend: squares_of(backend, ("step", 0, 2)),
    "a row": lambda backend: squares_of(backend, ("select", 0, 1)),
}


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("inside", ["forward", "everything"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_of_gradients(backend, name, inside, depth):
    if name in ("columns", "a row"):
        backend.require("second derivatives of slices")
    nothing = contextlib.nullcontext()
    program, leaf = PROGRAMS[name](backend), backend.leaf(4, 5)
    expected = nth_gradients(backend, program, leaf, depth, nothing, nothing)
    zeros = b"\0" * len(backend.bits(leaf))
    assert all(backend.bits(gradient) != zeros for gradient in expected)
    tide = backend.offload()
    contexts = (tide, nothing) if inside == "forward" else (nothing, tide)
    found = nth_gradients(backend, program, leaf, depth, *contexts)
    assert_same(backend, found, expected)
    if inside == "forward" or not backend.waits:
        assert_loaded(tide)
    found = None
    assert_at_rest(tide)


def test_a_recorded_backward_may_be_dropped(backend):
    """The first gradients are used, the second ones never asked for."""
    leaf, tide = backend.leaf(4, 5), backend.offload()
    nothing = contextlib.nullcontext()
    program = PROGRAMS["transposed"](backend)
    expected = nth_gradients(backend, program, leaf, 1, nothing, nothing)
    for _ in range(20):
        with tide, backend.recording():
            y = backend.op("sum", program(leaf))
        found = backend.gradients(y, [leaf], record=True)
        assert_same(backend, found, expected)
        y = found = None
        assert_at_rest(tide)
    assert_loaded(tide)
    assert_at_rest(tide)
