"""One storage saved several times is copied once each way.

Exact duplicates, and the same bytes in other shapes.
"""

from __future__ import annotations

import pytest
from checks import assert_moved, compare, save_and_restore, write_shows

FLOAT = 4


def test_exact_duplicate_saved_tensor(backend):
    def program(a):
        x = backend.op("add", a, a)
        return backend.op("mul", x, x)

    stats = compare(backend, program, [backend.leaf(32, 16, dtype="float32")])
    assert (stats.storages, stats.saved_tensors, stats.exact_duplicates) == (1, 2, 1)
    assert_moved(backend, stats, 32 * 16 * FLOAT)


def test_one_activation_saved_by_three_operations(backend):
    def program(a):
        x = backend.op("add", a, a)
        y = backend.op("add", backend.op("sin", x), backend.op("cos", x))
        return backend.op("add", y, backend.op("mul", x, x))

    stats = compare(backend, program, [backend.leaf(8, 16, dtype="float32")])
    assert (stats.storages, stats.saved_tensors, stats.exact_duplicates) == (1, 4, 3)
    assert_moved(backend, stats, 8 * 16 * FLOAT)


@pytest.mark.parametrize("times", [2, 5])
def test_one_tensor_several_times_in_one_node(backend, times):
    stats, restored = save_and_restore(backend, lambda: [backend.tensor(5, 7)] * times)
    assert stats.exact_duplicates == times - 1
    assert stats.saved_bytes == times * stats.unique_bytes
    assert_moved(backend, stats, 5 * 7 * FLOAT)
    assert backend.same_storage(*restored)
    assert write_shows(backend, restored[0], restored[-1])


def test_equal_contents_in_two_storages_are_not_duplicates(backend):
    def build():
        return [backend.tensor(6, 6, seed=4), backend.tensor(6, 6, seed=4)]

    stats, (x, y) = save_and_restore(backend, build)
    assert (stats.storages, stats.exact_duplicates) == (2, 0)
    assert_moved(backend, stats, 2 * 6 * 6 * FLOAT, copies=2)
    assert not backend.same_storage(x, y)
    assert not write_shows(backend, x, y)


def test_reshape_or_view_sharing_a_storage(backend):
    def build():
        x = backend.tensor(4, 6, 10)
        return [
            x,
            backend.view(x, ("view", 24, 10)),
            backend.view(x, ("view", 240)),
            backend.view(x, ("unsqueeze", 1)),
            backend.view(x, ("view", 2, 2, 60), ("unsqueeze", 0)),
        ]

    stats, restored = save_and_restore(backend, build)
    assert (stats.storages, stats.exact_duplicates) == (1, 0)
    assert_moved(backend, stats, 4 * 6 * 10 * FLOAT)
    assert backend.same_storage(*restored)
    assert write_shows(backend, restored[-1], restored[0])


def test_softmax_output_saved_in_four_and_three_dimensions(backend):
    """Attention: softmax saves its output, the product after it the same as a batch of matrices."""

    def program(scores, values):
        weights = backend.op("softmax", backend.op("add", scores, scores))
        flat = backend.view(weights, ("view", 6, 5, 5))
        return backend.op("matmul", flat, values)

    leaves = [
        backend.leaf(2, 3, 5, 5, dtype="float32"),
        backend.leaf(6, 5, 4, dtype="float32", seed=1),
    ]
    stats = compare(backend, program, leaves)
    backend.require("kernels that save views")
    # `values` is a leaf that the test holds: it is never copied.
    assert stats.d2h_bytes == stats.h2d_bytes == 2 * 3 * 5 * 5 * FLOAT
    assert stats.d2h_copies == stats.h2d_copies == 1


def test_attention_output_before_and_after_reshape(backend):
    def program(a, weight):
        heads = backend.op("sigmoid", a)  # saves its output
        merged = backend.view(heads, ("view", 2, 5, 12))
        return backend.op("linear", merged, weight)

    leaves = [
        backend.leaf(2, 5, 3, 4, dtype="float32"),
        backend.leaf(7, 12, dtype="float32", seed=1),
    ]
    stats = compare(backend, program, leaves)
    backend.require("kernels that save views")
    assert stats.d2h_bytes == stats.h2d_bytes == 2 * 5 * 12 * FLOAT
    assert stats.d2h_copies == stats.h2d_copies == 1


def test_column_and_vector_of_the_same_bytes(backend):
    def build():
        column = backend.tensor(9, 1)
        return [column, backend.view(column, ("squeeze", 1))]

    stats, restored = save_and_restore(backend, build)
    assert_moved(backend, stats, 9 * FLOAT)
    assert backend.same_storage(*restored)
    assert write_shows(backend, *restored)
