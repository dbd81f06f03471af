"""Views of one storage cost the union of their extents and come back as views of one storage."""

from __future__ import annotations

import pytest
from checks import assert_back, assert_moved, assert_out, compare, save_and_restore, write_shows

FLOAT = 4


def test_transpose_and_narrow_with_other_strides_and_offsets(backend):
    def build():
        x = backend.tensor(12, 10)
        return [
            x,
            backend.view(x, ("transpose", 0, 1)),
            backend.view(x, ("narrow", 0, 3, 5)),
            backend.view(x, ("narrow", 1, 2, 4)),
            backend.view(x, ("t",), ("narrow", 0, 7, 3)),
        ]

    stats, restored = save_and_restore(backend, build)
    assert (stats.storages, stats.exact_duplicates) == (1, 0)
    assert_moved(backend, stats, 12 * 10 * FLOAT)
    assert backend.same_storage(*restored)
    assert [backend.layout(t).storage_offset for t in restored] == [0, 0, 30, 2, 7]
    for view in restored[1:]:
        assert write_shows(backend, view, restored[0])


# Name: shape of the base, views, bytes of the union of their extents.
WHOLE = 2 * 3 * 4 * 6 * FLOAT
CASES = {
    "x and x.t()": ((5, 7), [(), [("t",)]], 35 * FLOAT),
    "x.t() alone": ((5, 7), [[("t",)]], 35 * FLOAT),
    "permute": ((2, 3, 4, 6), [(), [("permute", 2, 0, 3, 1)]], WHOLE),
    "channels last": ((2, 3, 4, 6), [[("permute", 0, 3, 1, 2)]], WHOLE),
    "prefix": ((10, 4), [[("narrow", 0, 0, 3)]], 3 * 4 * FLOAT),
    "middle": ((10, 4), [[("narrow", 0, 4, 3)]], 3 * 4 * FLOAT),
    "suffix": ((10, 4), [[("narrow", 0, 8, 2)]], 2 * 4 * FLOAT),
    "base first": ((10, 4), [(), [("narrow", 0, 4, 3)]], 40 * FLOAT),
    "base last": ((10, 4), [[("narrow", 0, 4, 3)], ()], 40 * FLOAT),
    "two slices that touch": (
        (10, 4),
        [[("narrow", 0, 2, 3)], [("narrow", 0, 5, 3)]],
        6 * 4 * FLOAT,
    ),
    "overlapping slices": (
        (10, 4),
        [[("narrow", 0, 1, 4)], [("narrow", 0, 3, 4)]],
        6 * 4 * FLOAT,
    ),
    # The extent of a column slice runs from its first to its last element.
    "columns": ((10, 4), [[("narrow", 1, 1, 2)]], (9 * 4 + 2) * FLOAT),
    "q, k, v behind one another": (
        (3, 4, 5),
        [[("select", 0, 0)], [("select", 0, 1)], [("select", 0, 2)]],
        60 * FLOAT,
    ),
    "q, k, v interleaved": (
        (4, 15),
        [[("chunk", 3, 1, 0)], [("chunk", 3, 1, 1)], [("chunk", 3, 1, 2)]],
        60 * FLOAT,
    ),
    "q, k, v per head": (
        (2, 4, 3, 2, 5),
        [[("select", 2, i), ("transpose", 1, 2)] for i in range(3)],
        2 * 4 * 3 * 2 * 5 * FLOAT,
    ),
    "unfold": ((20,), [[("unfold", 0, 6, 2)]], 20 * FLOAT),
    "unfold and base": ((20,), [[("unfold", 0, 3, 5)], ()], 20 * FLOAT),
    "size-1 dimensions": (
        (12,),
        [[("as_strided", (1, 12, 1), (5, 1, 9), 0)], [("as_strided", (3, 1), (4, 7), 2)]],
        12 * FLOAT,
    ),
    "offset with batch 1": ((6, 8), [[("narrow", 0, 4, 1)]], 8 * FLOAT),
    "steps": ((9, 4), [[("step", 0, 2)]], 36 * FLOAT),
    "steps in the last dimension": ((9, 4), [[("step", 1, 3)]], 36 * FLOAT),
    "diagonal": ((6, 6), [[("diagonal",)]], 36 * FLOAT),
    "one element": ((6, 6), [[("select", 0, 4), ("select", 0, 3)]], FLOAT),
    "as_strided backwards": ((12,), [[("as_strided", (2, 3), (1, 4), 1)]], 10 * FLOAT),
}


@pytest.mark.parametrize("name", CASES)
def test_views_cost_the_union_of_their_extents(backend, name):
    sizes, chains, nbytes = CASES[name]

    def build():
        x = backend.tensor(*sizes)
        return [backend.view(x, *chain) for chain in chains]

    stats, restored = save_and_restore(backend, build)
    assert stats.storages == 1
    assert_moved(backend, stats, nbytes)
    assert backend.same_storage(*restored)


def test_two_slices_with_a_gap_are_two_copies(backend):
    def build():
        x = backend.tensor(10, 4)
        return [backend.view(x, ("narrow", 0, 1, 2)), backend.view(x, ("narrow", 0, 6, 3))]

    stats, restored = save_and_restore(backend, build)
    assert stats.storages == 1
    assert_moved(backend, stats, 5 * 4 * FLOAT, copies=2, packs=2)
    assert backend.same_storage(*restored)
    assert not write_shows(backend, *restored)


def test_overlapping_views_show_each_others_writes(backend):
    def build():
        x = backend.tensor(10, 4)
        return [backend.view(x, ("narrow", 0, 1, 4)), backend.view(x, ("narrow", 0, 3, 4))]

    _, (first, second) = save_and_restore(backend, build)
    assert write_shows(backend, first, second)
    assert write_shows(backend, second, first)


def test_chunked_projection_in_a_network(backend):
    """One projection for q, k and v; every chunk is saved by the products of attention."""

    def program(x, weight):
        projected = backend.op("linear", x, weight)
        q, k, v = (backend.view(projected, ("chunk", 3, 1, i)) for i in range(3))
        scores = backend.op("matmul", q, backend.view(k, ("t",)))
        return backend.op("matmul", backend.op("softmax", scores), v)

    leaves = [backend.leaf(6, 4, dtype="float32"), backend.leaf(15, 4, dtype="float32", seed=1)]
    stats = compare(backend, program, leaves)
    backend.require("kernels that save views")
    softmax = 6 * 6 * FLOAT
    assert_out(backend, stats, 6 * 15 * FLOAT + softmax, copies=2)
    assert_back(backend, stats, 6 * 15 * FLOAT + softmax, copies=2)


# --- views that read more than there is


@pytest.mark.parametrize(
    ("sizes", "chain", "nbytes"),
    [
        ((5, 1), ("expand", 5, 40), 5 * FLOAT),
        ((), ("expand", 3, 7), FLOAT),
        ((1, 4), ("expand", 100, 4), 4 * FLOAT),
        ((16,), ("as_strided", (6, 6), (2, 1), 0), 16 * FLOAT),
        ((16,), ("as_strided", (4, 4, 4), (0, 1, 1), 3), 7 * FLOAT),
    ],
)
def test_an_inflating_view_costs_its_extent(backend, sizes, chain, nbytes):
    stats, (view,) = save_and_restore(
        backend, lambda: [backend.view(backend.tensor(*sizes), chain)]
    )
    assert_moved(backend, stats, nbytes)
    assert backend.storage_nbytes(view) <= max(nbytes + 512, 1024)


def test_a_scalar_expanded_to_a_thousand_million_elements(backend):
    restored = []

    def program(a):
        big = backend.view(backend.tensor(), ("expand", 1_000_000_000))
        return backend.save(a, [big], restored=restored, peek=3)

    stats = compare(backend, program, [backend.leaf(2)])
    assert_moved(backend, stats, FLOAT)
    assert stats.saved_bytes == 1_000_000_000 * FLOAT
    assert backend.layout(restored[-1]).sizes == (1_000_000_000,)
    assert backend.storage_nbytes(restored[-1]) < 1024
