"""What others hold stays readable, is not copied for nothing, and never loses its memory to offload."""

from __future__ import annotations

import pytest
from checks import assert_back, assert_moved, assert_out, assert_same, compare, run
from support import assert_at_rest

FLOAT = 4


def in_a_list(x):
    return [x]


def in_a_closure(x):
    return lambda: x


def in_a_dict_of_tuples(x):
    return {"a": (1, x)}


def as_storage(x):
    return x.untyped_storage()


@pytest.mark.parametrize("hold", [in_a_list, in_a_closure, in_a_dict_of_tuples])
def test_what_the_user_holds_is_parked_and_not_copied(backend, hold):
    kept = []

    def program(anchor):
        x = backend.tensor(6, 4)
        kept[:] = [hold(x), backend.bits(x)]
        return backend.save(anchor, [x, backend.view(x, ("t",))])

    leaves = [backend.leaf(2)]
    expected = run(backend, program, leaves)
    tide = backend.offload()
    forward = backend.forward(program, leaves, tide)
    stats = tide.stats()
    assert (stats.parked, stats.d2h_bytes, stats.unfreed_bytes) == (1, 0, 0)
    assert_same(backend, [forward.output, *forward.gradients()], expected)
    assert tide.stats().live_hits == 2
    assert_at_rest(tide)


def test_a_held_tensor_stays_readable_at_every_moment(backend):
    x = backend.tensor(6, 4)
    bits = backend.bits(x)
    tide = backend.offload()
    forward = backend.forward(lambda a: backend.save(a, [x]), [backend.leaf(2)], tide)
    assert backend.bits(x) == bits
    forward.gradients()
    assert backend.bits(x) == bits
    forward = None
    assert_at_rest(tide)
    assert backend.bits(x) == bits


def test_a_tensor_let_go_between_forward_and_backward(backend):
    """Parked at the end of the context: plain autograd's memory, given back when its graph is gone."""
    held = [backend.tensor(6, 4)]

    def program(a):
        return backend.save(a, [held[0]])

    leaves = [backend.leaf(2)]
    expected = run(backend, program, leaves)
    tide = backend.offload()
    forward = backend.forward(program, leaves, tide)
    held.clear()
    assert_same(backend, forward.gradients(), expected[1:])
    assert_at_rest(tide)


def test_a_table_shared_by_all_layers_is_never_copied(backend):
    """Rotary cos and sin: inputs of every layer, held by the caller of the model."""
    cos, sin = backend.leaf(4, 8, seed=1), backend.leaf(4, 8, seed=2)
    cos, sin = backend.view(cos, ("detach",)), backend.view(sin, ("detach",))

    def program(a):
        x = a
        for _ in range(6):
            x = backend.op(
                "add", backend.op("mul", backend.op("sin", x), cos), backend.op("mul", x, sin)
            )
        return x

    leaves = [backend.leaf(4, 8)]
    tide = backend.offload()
    stats = compare(backend, program, leaves, tide=tide)
    # Six layers save their input for sin (the first is the leaf); the tables cost nothing.
    assert stats.d2h_bytes == stats.h2d_bytes == 5 * 4 * 8 * 8
    assert stats.unfreed_bytes == 0


def test_the_input_of_the_module_is_not_copied(backend):
    x = backend.tensor(8, 4)
    bits = backend.bits(x)
    weight = backend.leaf(5, 4, dtype="float32", seed=1)
    tide = backend.offload()
    stats = compare(
        backend,
        lambda w: backend.op("linear", x, w),
        [weight],
        tide=tide,
        loads=False,
    )
    # The weight is saved too where its gradient's formula is not told that nobody wants that of `x`.
    assert (stats.d2h_bytes, stats.live_hits) == (0, stats.saved_tensors)
    assert backend.bits(x) == bits


def test_an_output_that_shares_its_storage_with_what_is_saved(backend):
    """exp saves its output; the caller holds a view of it as the output."""

    def program(a):
        return backend.view(backend.op("exp", a), ("t",))

    leaves = [backend.leaf(5, 3)]
    expected = run(backend, program, leaves)
    tide = backend.offload()
    forward = backend.forward(program, leaves, tide)
    held = backend.counts_holders
    assert tide.stats().parked == (1 if held else 0)
    bits = backend.bits(forward.output)
    output, gradients = forward.output, forward.gradients()
    assert_same(backend, [output, *gradients], expected)
    assert backend.bits(output) == bits
    stats = tide.stats()
    assert (stats.d2h_bytes, stats.h2d_bytes) == ((0, 0) if held else (120, 120))
    forward = output = None
    assert_at_rest(tide)


def test_an_input_that_comes_out_as_the_output(backend):
    """The caller's tensor, its view saved for backward, and an output that aliases both."""
    x = backend.leaf(6, 4)

    def program(a):
        y = backend.view(a, ("t",))
        return backend.op("mul", y, y)

    stats = compare(backend, program, [x], loads=False)
    backend.require("kernels that save views")
    assert stats.d2h_bytes == 0


def test_only_the_held_storages_stay(backend):
    held = []

    def program(anchor):
        held.clear()
        for i in range(6):
            x = backend.tensor(8, seed=i)
            if i % 3 == 0:
                held.append(x)
            anchor = backend.save(anchor, [x])
        return anchor

    leaves = [backend.leaf(1)]
    expected = run(backend, program, leaves)
    tide = backend.offload()
    forward = backend.forward(program, leaves, tide)
    assert tide.stats().parked == 2
    assert_same(backend, forward.gradients(), expected[1:])
    stats = tide.stats()
    assert_out(backend, stats, 4 * 8 * FLOAT, copies=4)
    assert_back(backend, stats, 4 * 8 * FLOAT, copies=4)
    assert stats.live_hits == 2
    assert_at_rest(tide)


def test_nothing_of_a_restored_storage_is_taken_from_who_keeps_it(backend):
    """A user may keep what backward read, for as long as they want."""
    restored = []

    def program(anchor):
        return backend.save(anchor, [backend.tensor(9, seed=3)], restored=restored)

    tide = backend.offload()
    for _ in range(3):
        backend.forward(program, [backend.leaf(1)], tide).gradients()
    assert_at_rest(tide)
    bits = backend.bits(backend.tensor(9, seed=3))
    assert [backend.bits(t) for t in restored] == [bits] * 3
    assert_moved(backend, tide.stats(), 3 * 9 * FLOAT, copies=3, packs=3)
