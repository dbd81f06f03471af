"""Views saved after their storage was copied, small views of large storages, aliases never saved."""

from __future__ import annotations

import pytest
from checks import (
    assert_back,
    assert_moved,
    assert_out,
    assert_same,
    compare,
    note,
    run,
    save_and_restore,
    write_shows,
)
from support import assert_at_rest

FLOAT = 4


def save_one_by_one(backend, base, chains, noted, restored):
    """A program that saves one view per node: each is packed after the one before was dealt with."""

    def program(anchor):
        x = base()
        restored.clear()
        noted.clear()
        for chain in chains:
            view = backend.view(x, chain)
            noted.append(note(backend, view))
            anchor = backend.save(anchor, [view], restored=restored)
        return anchor

    return program


ROWS = [
    # what is saved in turn of ten rows, bytes, copies, copies where the context's end is waited for
    ([("narrow", 0, 0, 4), ("narrow", 0, 2, 6)], 8 * 4 * FLOAT, 2, 1),
    ([("narrow", 0, 2, 6), ("narrow", 0, 0, 4)], 8 * 4 * FLOAT, 2, 1),
    ([("narrow", 0, 2, 3), ("narrow", 0, 0, 10)], 10 * 4 * FLOAT, 3, 1),
    ([("narrow", 0, 0, 10), ("narrow", 0, 3, 2), ("select", 0, 9)], 10 * 4 * FLOAT, 1, 1),
    ([("select", 0, 0), ("select", 0, 9), ("select", 0, 5)], 3 * 4 * FLOAT, 3, 3),
]


@pytest.mark.parametrize(("chains", "nbytes", "copies", "packs"), ROWS)
def test_a_view_saved_after_the_copy_adds_only_what_is_not_covered(
    backend, monkeypatch, chains, nbytes, copies, packs
):
    """Without use counts nothing is parked: every view is copied as it is saved."""
    backend.hide_use_counts(monkeypatch)
    copies = packs if backend.waits else copies
    noted, restored = [], []
    program = save_one_by_one(backend, lambda: backend.tensor(10, 4), chains, noted, restored)
    stats = compare(backend, program, [backend.leaf(2)])
    assert_out(backend, stats, nbytes, copies, packs=packs)
    assert_back(backend, stats, nbytes, copies, packs=packs)
    assert stats.storages == 1
    assert [note(backend, t) for t in restored] == noted[::-1]
    assert backend.same_storage(*restored)


@pytest.mark.parametrize(("chains", "nbytes", "copies", "packs"), ROWS)
def test_a_view_saved_while_its_storage_is_parked_joins_it(backend, chains, nbytes, copies, packs):
    noted, restored = [], []
    program = save_one_by_one(backend, lambda: backend.tensor(10, 4), chains, noted, restored)
    stats = compare(backend, program, [backend.leaf(2)])
    assert (stats.d2h_bytes, stats.h2d_bytes, stats.unique_bytes) == (nbytes,) * 3, stats
    assert stats.storages == 1
    assert [note(backend, t) for t in restored] == noted[::-1]
    assert backend.same_storage(*restored)


def test_a_small_view_of_a_large_storage_is_offloaded_with_it(backend):
    tide = backend.offload(min_bytes=4096)

    def build():
        x = backend.tensor(1024, 2)
        return [x, backend.view(x, ("narrow", 0, 3, 1)), backend.view(x, ("select", 0, 0))]

    stats, restored = save_and_restore(backend, build, tide=tide)
    assert_moved(backend, stats, 1024 * 2 * FLOAT)
    assert stats.kept["small"] == 0
    assert backend.same_storage(*restored)


def test_a_small_view_alone_moves_only_its_bytes_and_frees_the_storage(backend):
    tide = backend.offload(min_bytes=4096)

    def build():
        return [backend.view(backend.tensor(1024, 2), ("narrow", 0, 3, 1))]

    stats, (view,) = save_and_restore(backend, build, tide=tide)
    assert_moved(backend, stats, 2 * FLOAT)
    assert stats.freed_bytes == 1024 * 2 * FLOAT
    # What lies behind the last wanted byte is not brought back.
    assert backend.storage_nbytes(view) < 1024


def test_an_alias_that_is_never_saved_keeps_the_storage_and_its_bytes(backend):
    """The user's alias is the only reason that nothing moves, where it is seen; it stays readable throughout."""
    held, before = [], []

    def program(anchor):
        x = backend.tensor(10, 4)
        held[:] = [backend.view(x, ("narrow", 0, 8, 2))]
        before[:] = [backend.bits(held[0])]
        return backend.save(anchor, [backend.view(x, ("narrow", 0, 0, 5))])

    leaves = [backend.leaf(2)]
    expected = run(backend, program, leaves)
    tide = backend.offload()
    forward = backend.forward(program, leaves, tide)
    nbytes = 0 if backend.counts_holders else 20 * FLOAT
    assert tide.stats().parked == (1 if backend.counts_holders else 0)
    assert_same(backend, [forward.output, *forward.gradients()], expected)
    assert [backend.bits(held[0])] == before
    stats = tide.stats()
    assert (stats.d2h_bytes, stats.h2d_bytes) == (nbytes, nbytes)
    assert stats.live_hits == (1 if backend.counts_holders else 0)
    assert_at_rest(tide)


def test_an_alias_dropped_before_the_next_save_lets_the_storage_move(backend):
    """A parked storage is looked at again at later saves."""
    restored = []
    tide = backend.offload()

    def program(anchor):
        x = backend.tensor(10, 4)
        anchor = backend.save(anchor, [x], restored=restored)
        copied = tide.stats().d2h_bytes
        del x
        anchor = backend.save(anchor, [backend.tensor(3, seed=1)], restored=restored)
        moved.append(tide.stats().d2h_bytes - copied)
        return anchor

    moved = []
    stats = compare(backend, program, [backend.leaf(2)], tide=tide)
    assert moved == [0, 0 if backend.waits else 40 * FLOAT]
    assert_moved(backend, stats, 43 * FLOAT, copies=2)
    assert not write_shows(backend, restored[-1], restored[-2])
