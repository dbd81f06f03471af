"""A storage is never taken for another one, whatever address it has; contents of one forward never for another's."""

from __future__ import annotations

import numpy
import pytest
from checks import assert_moved, assert_same, compare, note, run
from reused_memory import ReusedMemory
from support import assert_at_rest, assert_loaded

FLOAT = 4


@pytest.mark.parametrize("sizes", [[64], [64, 48, 16], [1, 400, 33]], ids=["one", "three", "mixed"])
def test_a_reused_address_is_a_new_storage(backend, sizes):
    """The memory of what was offloaded is handed out again, for storages of equal and other sizes."""
    restored, memory = [], ReusedMemory(backend, max(sizes))
    sizes = [sizes[i % len(sizes)] for i in range(60)]

    def program(part):
        def forward(anchor):
            for i in part:
                x = memory.tensor(sizes[i], seed=i)
                anchor = backend.save(anchor, [x], restored=restored)
                x = None
                backend.settle()
            return anchor

        return forward

    def both(tide=None):
        parts = range(30), range(30, 60)
        passes = [backend.forward(program(part), [backend.leaf(1)], tide) for part in parts]
        return [gradient for p in reversed(passes) for gradient in p.gradients()]

    expected = both()
    contents = [backend.bits(tensor) for tensor in restored]
    restored.clear(), memory.addresses.clear()
    tide = backend.offload()
    assert_same(backend, both(tide), expected)
    assert memory.is_reused(), "no address was reused: the test shows nothing"
    stats = tide.stats()
    assert (stats.storages, stats.exact_duplicates) == (60, 0)
    assert_moved(backend, stats, FLOAT * sum(sizes), copies=60, packs=2)
    assert [backend.bits(tensor) for tensor in restored] == contents
    assert_at_rest(tide)


def test_an_address_reused_by_the_next_forward(backend):
    """The first graph lives on while the second forward gets the memory of its activations."""
    leaves = [backend.leaf(8, 8, dtype="float32"), backend.leaf(8, 8, dtype="float32", seed=1)]

    def program(a):
        return backend.op("exp", backend.op("exp", a))

    expected = [run(backend, program, [leaf]) for leaf in leaves]
    tide = backend.offload()
    passes = [backend.forward(program, [leaf], tide) for leaf in leaves]
    found = [[p.output, *p.gradients()] for p in passes]
    for a, b in zip(found, expected, strict=True):
        assert_same(backend, a, b)
    assert_loaded(tide)
    assert tide.stats().storages == 4
    found, passes, a = None, None, None
    assert_at_rest(tide)


def test_an_address_reused_by_a_restored_storage(backend):
    """While one backward holds what it restored, the next forward saves storages around it."""
    leaf = backend.leaf(16)
    tide = backend.offload()
    noted, restored = [], []

    def program(anchor):
        x = backend.tensor(16, seed=len(noted))
        noted.append(note(backend, x))
        return backend.save(anchor, [x], restored=restored)

    for _ in range(20):
        backend.forward(program, [leaf], tide).gradients()
        if len(restored) > 3:
            restored.pop(0), noted.pop(0)
        assert [note(backend, t) for t in restored] == noted
    assert_at_rest(tide)


def test_the_map_is_bounded_by_what_lives(backend):
    leaf = backend.leaf(8)
    tide = backend.offload()
    passes = []
    for step in range(60):
        passes.append(
            backend.forward(
                lambda a: backend.save(a, [backend.tensor(8), backend.tensor(9)]), [leaf], tide
            )
        )
        if len(passes) > 3:
            passes.pop(0).gradients()
        assert tide.stats().entries == 2 * min(step + 1, 3)
    passes.clear()
    assert_at_rest(tide)


# --- memory that others describe too


def test_two_storages_that_touch(backend):
    """Two storages side by side in one array of the user's."""
    array = numpy.arange(32, dtype=numpy.float32)

    def program(anchor):
        x, y = backend.around(array[:16]), backend.around(array[16:])
        assert backend.address(y) == backend.address(x) + 64
        restored.clear()
        return backend.save(anchor, [x, y], restored=restored)

    restored = []
    stats = compare(backend, program, [backend.leaf(2)])
    assert stats.storages == 2
    assert_moved(backend, stats, 128, copies=2)
    assert backend.bits(restored[0]) + backend.bits(restored[1]) == array.tobytes()
    assert not backend.same_storage(*restored)


def test_two_storages_at_one_address(backend):
    array = numpy.arange(64, dtype=numpy.uint8)

    def program(anchor):
        return backend.save(anchor, [backend.around(array), backend.around(array[:24])])

    stats = compare(backend, program, [backend.leaf(2)])
    assert (stats.storages, stats.exact_duplicates) == (2, 0)
    assert_moved(backend, stats, 64 + 24, copies=2)


def test_a_zero_byte_storage_at_the_start_of_another(backend):
    array = numpy.arange(16, dtype=numpy.float32)

    def program(anchor):
        empty, x = backend.around(array[:0]), backend.around(array)
        restored.clear()
        return backend.save(anchor, [empty, x, empty], restored=restored)

    restored = []
    stats = compare(backend, program, [backend.leaf(2)])
    assert_moved(backend, stats, 16 * FLOAT)
    assert [backend.layout(t).sizes for t in restored] == [(0,), (16,), (0,)]


# --- contents that change between forwards


def refilled(backend, tide, leaf, refill, contexts):
    """Two forwards over one static buffer that is refilled between them; both backwards afterwards."""
    static = backend.tensor(12, dtype="int32", seed=5)

    def program(a):
        return backend.save(a, [static])

    if contexts == "one":
        with tide:
            first = backend.forward(program, [leaf])
            refill(static)
            second = backend.forward(program, [leaf])
    else:
        first = backend.forward(program, [leaf], tide)
        refill(static)
        second = backend.forward(program, [leaf], tide)
    return [*second.gradients(), *first.gradients()]


class Nothing:
    def __enter__(self): ...
    def __exit__(self, *error): ...


def uncounted(backend):
    return lambda static: backend.write(static, counted=False)


def through_numpy(backend):
    return lambda static: backend.numpy(static).__setitem__(slice(None), 7)


@pytest.mark.parametrize("contexts", ["one", "two"])
@pytest.mark.parametrize("refill", [uncounted, through_numpy])
def test_a_static_buffer_refilled_unseen_between_two_forwards(backend, refill, contexts):
    """Plain autograd reads the new contents for both graphs: so does this."""
    leaf = backend.leaf(3)
    expected = refilled(backend, Nothing(), leaf, refill(backend), contexts)
    tide = backend.offload()
    found = refilled(backend, tide, leaf, refill(backend), contexts)
    assert_same(backend, found, expected)
    assert_at_rest(tide)


def test_a_refilled_buffer_where_use_counts_are_not_known(backend, monkeypatch):
    """The buffer was copied in the first forward: the second one must not be given that copy."""
    backend.hide_use_counts(monkeypatch)
    leaf = backend.leaf(3)
    refill = uncounted(backend)
    expected = refilled(backend, Nothing(), leaf, refill, "two")
    tide = backend.offload()
    found = refilled(backend, tide, leaf, refill, "two")
    assert_same(backend, found[:1], expected[:1])
    assert tide.stats().storages == 2
    assert_at_rest(tide)


def test_a_static_buffer_refilled_in_sight_between_two_forwards(backend):
    """The first graph's gradients are refused, as without; the second graph's are right."""
    leaf = backend.leaf(3)
    static = backend.tensor(12, dtype="int32", seed=5)

    def program(a):
        return backend.save(a, [static])

    for tide in (Nothing(), backend.offload()):
        first = backend.forward(program, [leaf], tide)
        backend.write(static)
        second = backend.forward(program, [leaf], tide)
        assert_same(backend, second.gradients(), run(backend, program, [leaf])[1:])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            first.gradients()
        first = second = None
    assert_at_rest(tide)


def test_a_restored_tensor_that_was_written_unseen_and_saved_again(backend):
    """The restored storage has the old bytes in a tier: a later forward must not be given them."""
    leaf = backend.leaf(3)

    def twice(tide):
        restored = []
        first = backend.forward(
            lambda a: backend.save(a, [backend.tensor(8, dtype="int32")], restored=restored),
            [leaf],
            tide,
        )
        gradients = first.gradients(retain=True)
        x = restored.pop()
        backend.write(x, counted=False)
        second = backend.forward(lambda a: backend.save(a, [x]), [leaf], tide)
        x = None
        return gradients + second.gradients()

    def alone(tide):
        x = backend.tensor(8, dtype="int32")
        first = backend.forward(lambda a: backend.save(a, [backend.op("clone", x)]), [leaf], tide)
        backend.write(x, counted=False)
        second = backend.forward(lambda a: backend.save(a, [x]), [leaf], tide)
        return first.gradients() + second.gradients()

    tide = backend.offload()
    assert_same(backend, twice(tide), alone(Nothing()))
    assert_loaded(tide)
    assert_at_rest(tide)
