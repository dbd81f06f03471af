"""Forwards that fail, backwards that never come, and writes that forbid one: as without offload, and nothing is left."""

from __future__ import annotations

import pytest
from checks import assert_same, compare, run
from support import anonymous_bytes, assert_at_rest, assert_loaded

MODIFIED = "modified by an inplace operation"
MIB = 1 << 20


class Failure(Exception):
    pass


def network(backend, fails=False):
    def program(a):
        x = backend.op("tanh", backend.op("exp", backend.op("sin", a)))
        x = backend.save(x, [backend.tensor(1 << 12)])
        if fails:
            raise Failure("in the middle of a forward")
        return backend.op("sigmoid", x)

    return program


def fail(backend, leaf, tide):
    """Leaves neither the exception nor its frames behind."""
    with pytest.raises(Failure, match="in the middle of a forward"):
        backend.forward(network(backend, fails=True), [leaf], tide)


def test_a_forward_that_raises(backend):
    """Nothing of it is held, and the next step is right."""
    leaf, tide = backend.leaf(6, 6), backend.offload()
    expected = run(backend, network(backend), [leaf])
    for _ in range(3):
        fail(backend, leaf, tide)
        assert_at_rest(tide)
        found = run(backend, network(backend), [leaf], tide)
        assert_same(backend, found, expected)
        found = None
        assert_at_rest(tide)
    assert_loaded(tide)


def test_a_backward_that_raises(backend):
    """The node after it is never reached; the same graph's next backward is right where the graph was retained."""
    leaf, tide = backend.leaf(6, 6), backend.offload()

    class Refusing(list):
        def extend(self, tensors):
            if refuses:
                raise Failure("in the middle of a backward")

    def program(a):
        x = backend.op("exp", backend.op("sin", a))
        return backend.op("tanh", backend.save(x, [backend.tensor(64)], restored=Refusing()))

    refuses = False
    expected = run(backend, program, [leaf])
    refuses = True
    forward = backend.forward(program, [leaf], tide)
    with pytest.raises(Failure, match="in the middle of a backward"):
        forward.gradients(retain=True)
    refuses = False
    assert_same(backend, [forward.output, *forward.gradients()], expected)
    forward = None
    assert_at_rest(tide)
    compare(backend, program, [leaf], tide=tide)


def test_forwards_without_a_backward(backend):
    """Hundreds of them leave nothing: no entry, no byte of the tier, no memory of the process."""
    leaf, tide = backend.leaf(8, 8), backend.offload()

    def program(a):
        for i in range(4):
            a = backend.save(backend.op("exp", a), [backend.tensor(1 << 16, seed=i)])
        return a

    # Page-locked slabs and a device's blocks are used for the first time for longer.
    warm = 50 if backend.device == "cpu" else 300
    for step in range(warm + 150):
        forward = backend.forward(program, [leaf], tide)
        assert tide.stats().entries > 0
        forward = None
        assert tide.stats().entries == 0
        backend.settle()  # what a copy that nobody waits for holds
        if step == warm:
            before = anonymous_bytes()
    assert forward is None
    # One step saves a MiB.
    assert anonymous_bytes() - before < 16 * MIB
    assert tide.stats().d2h_bytes > 0
    assert_at_rest(tide)


# --- writes that a counter sees


WHEN = ["before the save", "between save and copy", "after the context"]


def attempt(backend, leaf, when, tide):
    """Gradients, or the words of the framework's error; the tensor that is written is held throughout."""
    x = backend.tensor(32, dtype="int32")

    def program(a):
        if when == "before the save":
            backend.write(x)
        a = backend.save(a, [x])
        if when == "between save and copy":
            backend.write(x)
        return backend.save(a, [backend.tensor(8, dtype="int32")])

    forward = backend.forward(program, [leaf], tide)
    if when == "after the context":
        backend.write(x)
    try:
        return forward.gradients()
    except RuntimeError as error:
        assert MODIFIED in str(error), error
        return MODIFIED


@pytest.mark.parametrize("keep_last_bytes", [0, "1MiB"], ids=["copied at once", "not yet copied"])
@pytest.mark.parametrize("when", WHEN)
def test_a_write_in_place_ends_as_without(backend, when, keep_last_bytes):
    leaf = backend.leaf(3)
    expected = attempt(backend, leaf, when, None)
    assert (expected == MODIFIED) == (when != "before the save")
    tide = backend.offload(keep_last_bytes=keep_last_bytes)
    found = attempt(backend, leaf, when, tide)
    if expected == MODIFIED:
        assert found == MODIFIED
    else:
        assert_same(backend, found, expected)
    assert_at_rest(tide)


def test_a_write_that_no_backward_asks_about_is_legal(backend):
    leaf, tide = backend.leaf(3), backend.offload()
    x = backend.tensor(32)

    def program(a):
        spoiled = backend.save(a, [x])  # a branch that nobody uses
        backend.write(x)
        del spoiled
        return backend.save(a, [backend.tensor(8)])

    compare(backend, program, [leaf], tide=tide)
