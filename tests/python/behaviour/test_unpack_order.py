"""Backward may read what was saved in any order, several times, and from several graphs."""

from __future__ import annotations

import contextlib
import random

import pytest
from checks import assert_back, assert_moved, assert_out, assert_same, compare, note, run
from support import assert_at_rest, assert_loaded

FLOAT = 4
DOUBLE = 8


def saved_apart(backend, count, noted, restored):
    """`count` forwards that each save a storage and a view of it; their backwards can run in any order."""

    def program(i):
        def forward(anchor):
            x = backend.tensor(6 + i, seed=i)
            views = [x, backend.view(x, ("narrow", 0, i % 4, 3))]
            noted[i] = [note(backend, view) for view in views]
            return backend.save(anchor, views, restored=restored.setdefault(i, []))

        return forward

    return [program(i) for i in range(count)]


ORDERS = {
    "reverse": lambda n: range(n)[::-1],
    "forward": lambda n: range(n),
    "random": lambda n: random.Random(0).sample(range(n), n),
    "inside out": lambda n: sorted(range(n), key=lambda i: abs(2 * i - n)),
}


@pytest.mark.parametrize("contexts", ["one context", "a context each"])
@pytest.mark.parametrize("order", ORDERS)
def test_any_order(backend, order, contexts):
    count = 8
    leaf = backend.leaf(2)
    expected = [run(backend, program, [leaf]) for program in saved_apart(backend, count, {}, {})]
    noted, restored = {}, {}
    programs = saved_apart(backend, count, noted, restored)
    tide = backend.offload()
    if contexts == "one context":
        with tide:
            passes = [backend.forward(program, [leaf]) for program in programs]
    else:
        passes = [backend.forward(program, [leaf], tide) for program in programs]
    for i in ORDERS[order](count):
        found = [passes[i].output, *passes[i].gradients()]
        assert_same(backend, found, expected[i])
        assert [note(backend, t) for t in restored[i]] == noted[i]
        assert backend.same_storage(*restored[i])
    stats = tide.stats()
    nbytes = FLOAT * sum(6 + i for i in range(count))
    packs = 1 if contexts == "one context" else count
    assert_out(backend, stats, nbytes, copies=count, packs=packs)
    if contexts == "a context each" or not (backend.prefetches or backend.packs):
        assert_back(backend, stats, nbytes, copies=count, packs=count)
    else:
        # Guesses and packs bring what other graphs of the context have saved; never less than is needed.
        assert stats.h2d_bytes >= nbytes
    passes = found = None
    assert_at_rest(tide)


def trunk(backend, a):
    return backend.op("exp", backend.op("sin", backend.op("exp", a)))


def test_two_heads_of_one_trunk(backend):
    def program(a):
        x = trunk(backend, a)
        return backend.op("add", backend.op("tanh", x), backend.op("sigmoid", x))

    stats = compare(backend, program, [backend.leaf(5, 4)])
    # exp (saved by sin too), exp, tanh, sigmoid.
    assert_moved(backend, stats, 4 * 20 * DOUBLE, copies=4)


@pytest.mark.parametrize("swapped", [False, True])
def test_two_losses_over_one_trunk(backend, swapped):
    """Two backwards over one graph: what the trunk saved is loaded for each of them."""

    def losses(tide):
        a = backend.leaf(5, 4)
        with tide, backend.recording():
            x = trunk(backend, a)
            pair = [backend.op("sum", backend.op(name, x)) for name in ("tanh", "sigmoid")]
            x = None
        if swapped:
            pair.reverse()
        pair.reverse()
        first = backend.gradients(pair.pop(), [a], retain=True)
        return first + backend.gradients(pair.pop(), [a])

    expected = losses(contextlib.nullcontext())
    tide = backend.offload()
    assert_same(backend, losses(tide), expected)
    stats = tide.stats()
    assert_out(backend, stats, 4 * 20 * DOUBLE, copies=4)
    # The trunk's two storages come twice, each head's once.
    if backend.packs or (backend.prefetches and swapped):
        # The first head to go brings what the second one has saved: packed with it, or by a guess.
        assert 6 * 20 * DOUBLE <= stats.h2d_bytes <= 8 * 20 * DOUBLE
    else:
        assert_back(backend, stats, 6 * 20 * DOUBLE, copies=6)
    assert_at_rest(tide)


@pytest.mark.parametrize("times", [1, 2, 5])
def test_retain_graph(backend, times):
    leaf = backend.leaf(4, 4)

    def program(a):
        x = backend.op("exp", a)
        return backend.op("mul", x, backend.op("sin", x))

    expected = run(backend, program, [leaf])[1:]
    tide = backend.offload()
    forward = backend.forward(program, [leaf], tide)
    for _ in range(times):
        assert_same(backend, forward.gradients(retain=True), expected)
    # A backward loads each storage once, and lets go of it at its end.
    stats = tide.stats()
    assert_out(backend, stats, 2 * 16 * DOUBLE, copies=2)
    assert_back(backend, stats, times * 2 * 16 * DOUBLE, copies=2 * times, packs=times)
    assert stats.device_bytes == 0
    assert_same(backend, forward.gradients(), expected)
    forward = None
    assert_at_rest(tide)


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "after"])
@pytest.mark.parametrize("depth", [2, 3])
def test_create_graph(backend, depth, inside):
    """A recorded backward unpacks what the forward saved, and what it saves itself is unpacked again."""

    def derivatives(tide):
        a = backend.leaf(3, 3)
        found = []
        around = tide if inside else contextlib.nullcontext()
        with around:
            with contextlib.nullcontext() if inside else tide, backend.recording():
                x = backend.op("mul", trunk(backend, a), backend.op("exp", a))
                y = backend.op("sum", x)
                x = None
            for _ in range(depth):
                (grad,) = backend.gradients(y, [a], record=True)
                found.append(backend.bits(grad))
                with backend.recording():
                    y = backend.op("sum", backend.op("mul", grad, grad))
        return found

    expected = derivatives(contextlib.nullcontext())
    assert len(set(expected)) == depth
    tide = backend.offload()
    assert derivatives(tide) == expected
    if not (inside and backend.waits):
        assert_loaded(tide)
    assert_at_rest(tide)


def test_create_graph_copies_nothing_twice(torch_backend):
    """What a backward with create_graph saves of a restored storage is in a tier already."""
    import torch

    a = torch_backend.leaf(6, 6)
    tide = torch_backend.offload()
    with tide:
        y = a.exp().sin()
    assert tide.stats().d2h_bytes == 36 * DOUBLE
    with tide:
        (grad,) = torch.autograd.grad(y.sum(), a, create_graph=True)
    stats = tide.stats()
    assert stats.h2d_bytes == 36 * DOUBLE
    # exp's result is saved again by the cosine and by exp's formula; new are the incoming gradient,
    # one number expanded, and its product with the cosine.
    assert (stats.saved_tensors, stats.exact_duplicates) == (6, 3)
    assert stats.d2h_bytes == 2 * 36 * DOUBLE + DOUBLE
    found = torch.autograd.grad(grad.sum(), a)
    b = a.detach().clone().requires_grad_()
    (plain,) = torch.autograd.grad(b.exp().sin().sum(), b, create_graph=True)
    assert_same(torch_backend, found, torch.autograd.grad(plain.sum(), b))
    grad = y = None
    assert_at_rest(tide)


@pytest.mark.parametrize("reads", [2, 3])
def test_one_saved_tensor_read_several_times_in_one_backward(backend, reads):
    """`ctx.saved_tensors` read again is the same storage, loaded once."""
    restored, noted = [], []

    def program(anchor):
        x = backend.tensor(7, 3)
        views = [x, backend.view(x, ("t",))]
        noted[:] = [note(backend, view) for view in views]
        restored.clear()
        return backend.save(anchor, views, restored=restored, reads=reads)

    stats = compare(backend, program, [backend.leaf(2)])
    assert_moved(backend, stats, 21 * FLOAT)
    assert [note(backend, t) for t in restored] == noted * reads
    assert backend.same_storage(*restored)


def test_one_tensor_read_by_nodes_far_apart(backend):
    """Between the readers others are loaded and let go; the shared one is loaded once."""

    def program(anchor):
        x = backend.tensor(5)
        for i in range(6):
            anchor = backend.save(anchor, [backend.tensor(9, seed=i)])
            anchor = backend.save(anchor, [x])
        return anchor

    stats = compare(backend, program, [backend.leaf(2)])
    assert stats.exact_duplicates == 5
    assert_moved(backend, stats, (5 + 6 * 9) * FLOAT, copies=7)


def test_a_backward_that_needs_only_a_part_of_the_graph(backend):
    """Gradients of a late tensor: what lies before it is neither loaded nor lost."""

    def program(a):
        middle.append(backend.op("sin", backend.op("exp", a)))
        return backend.op("add", *[backend.op("exp", middle[-1])] * 2)

    middle, leaf = [], backend.leaf(4)
    plain = backend.forward(program, [leaf])
    expected_part = backend.gradients(plain.output, middle, retain=True)
    expected = plain.gradients()
    middle.clear()
    tide = backend.offload(prefetch_bytes=0)
    forward = backend.forward(program, [leaf], tide)
    part = backend.gradients(forward.output, middle, retain=True)
    # What lies packed with it comes along.
    assert_back(backend, tide.stats(), (2 if backend.packs else 1) * 4 * DOUBLE)
    assert_same(backend, part, expected_part)
    assert_same(backend, forward.gradients(), expected)
    forward = part = None
    middle.clear()
    assert_at_rest(tide)


def test_what_a_user_kept_of_one_backward_is_found_by_the_next(backend):
    """While somebody holds what was restored and nothing is loaded with others, no second storage is."""
    restored = []

    def program(anchor):
        x = backend.tensor(5, 4)
        anchor = backend.save(anchor, [backend.view(x, ("t",))], restored=restored)
        anchor = backend.save(anchor, [backend.tensor(3, seed=1)])
        anchor = backend.save(anchor, [x], restored=restored)
        return backend.save(anchor, [backend.tensor(3, seed=2)])

    tide = backend.offload()
    forward = backend.forward(program, [backend.leaf(2)], tide)
    first = backend.bits(forward.gradients(retain=True)[0])
    assert backend.bits(forward.gradients()[0]) == first
    assert backend.same_storage(*restored[:2])
    assert backend.same_storage(*restored[2:])
    assert backend.prefetches or backend.packs or backend.same_storage(*restored)
    assert_loaded(tide)
    forward = None
    assert_at_rest(tide)


def test_a_guess_that_arrives_in_the_next_backward_is_one_storage(backend):
    """The guess of one graph's backward is still loading when the graph that needs it is run."""
    restored = []

    def large(anchor):
        x = backend.tensor(1 << 21, dtype="int64")
        small = backend.tensor(3)
        for _ in range(2):
            anchor = backend.save(anchor, [x, small], restored=restored, peek=2)
        return anchor

    def guesses(anchor):
        return backend.save(anchor, [backend.tensor(3)])

    leaf = backend.leaf(2)
    tide = backend.offload()
    with tide:
        needed, other = (backend.forward(program, [leaf]) for program in (large, guesses))
    other.gradients()
    needed.gradients()
    assert backend.same_storage(restored[0], restored[2])
    assert backend.same_storage(restored[1], restored[3])
    assert_loaded(tide)
    needed = other = None
    assert_at_rest(tide)
