"""Tensors without elements pass through untouched and are never merged."""

from __future__ import annotations

import pytest
from checks import assert_moved, compare, save_and_restore

FLOAT = 4


@pytest.mark.parametrize("sizes", [(0,), (3, 0), (0, 4, 2)])
def test_zero_elements(backend, sizes):
    stats, (restored,) = save_and_restore(backend, lambda: [backend.tensor(*sizes)], loads=False)
    assert stats.storages == stats.d2h_bytes == 0
    assert backend.layout(restored).sizes == sizes


def test_two_empty_tensors_stay_two_tensors(backend):
    def build():
        return [backend.tensor(0), backend.tensor(2, 0), backend.tensor(0, dtype="int64")]

    _, restored = save_and_restore(backend, build, loads=False)
    assert [backend.layout(t).sizes for t in restored] == [(0,), (2, 0), (0,)]


def test_an_empty_view_does_not_keep_a_storage_from_moving(backend):
    def build():
        x = backend.tensor(16, 4)
        return [x, backend.view(x, ("narrow", 0, 0, 0))]

    noted = []

    def program(anchor):
        x, empty = build()
        noted[:] = [backend.layout(empty)]
        restored.clear()
        return backend.save(anchor, [x, empty], restored=restored)

    restored = []
    stats = compare(backend, program, [backend.leaf(1)])
    assert_moved(backend, stats, 64 * FLOAT)
    assert stats.freed_bytes == 64 * FLOAT
    assert (backend.layout(restored[1]).sizes, backend.layout(restored[1]).strides) == (
        noted[0].sizes,
        noted[0].strides,
    )


def test_an_empty_tensor_among_others(backend):
    def build():
        return [backend.tensor(8), backend.tensor(0), backend.tensor(8, seed=1)]

    stats, _ = save_and_restore(backend, build)
    assert_moved(backend, stats, 16 * FLOAT, copies=2)
