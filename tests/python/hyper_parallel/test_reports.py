"""What users of the original interface reported, and what is right: each row a test by name.

Outputs and gradients are compared bit for bit with the layers alone, and copies are counted exactly. A gradient of
these layers depends on every bit of every tensor that was saved.
"""

from __future__ import annotations

import pytest
from checks import assert_same, note
from harness import compare, run
from reused_memory import ReusedMemory

from ebbtide.errors import InplaceModificationError

FLOAT = 4
ROWS, COLUMNS = 6, 16
NBYTES = ROWS * COLUMNS * FLOAT
ORDERS = {"forward": lambda items: items, "backward": lambda items: items[::-1]}

both_orders = pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)


def saving(backend, views_of, seed=0, restored=None):
    """A layer that makes a storage, saves views of it, and keeps nothing."""

    def layer(x, *others):
        made = backend.tensor(ROWS, COLUMNS, seed=seed)
        return backend.save(x, views_of(made), restored=restored)

    return layer


def whole(made):
    return [made]


# --- duplicates and views


def test_duplicates_are_copied_once(hyper, backend):
    """An exact duplicate takes one look-up, whether one operation saves it or several do."""

    def layer(x):
        made = backend.tensor(ROWS, COLUMNS)
        x = backend.save(x, [made, made, backend.view(made, ("view", ROWS, COLUMNS))])
        return backend.save(x, [made])

    compare(hyper, layer, layer)
    hyper.assert_moved(2 * NBYTES, copies=2, packs=2)
    assert hyper.stats().exact_duplicates == 6


@both_orders
def test_qkv_and_its_leading_part_are_different_tensors(hyper, backend, order):
    """Equal address, other shape: each comes back with its own metadata, in whichever order they were saved."""
    restored, noted = [], []

    def views_of(made):
        views = order([made, backend.view(made, ("narrow", 1, 0, 4))])
        noted[:] = [note(backend, view) for view in views]
        restored.clear()
        return views

    compare(hyper, saving(backend, views_of, restored=restored))
    assert [note(backend, tensor) for tensor in restored] == noted
    hyper.assert_moved(NBYTES, copies=1, packs=1)


@both_orders
def test_one_address_with_two_dtypes_is_two_tensors(hyper, backend, order):
    restored, noted = [], []

    def views_of(made):
        views = order([made, backend.view(made, ("dtype", "int32"))])
        noted[:] = [note(backend, view) for view in views]
        restored.clear()
        return views

    compare(hyper, saving(backend, views_of, restored=restored))
    assert [note(backend, tensor) for tensor in restored] == noted
    hyper.assert_moved(NBYTES, copies=1, packs=1)


VIEWS = {
    "reshape": [[("view", ROWS * COLUMNS)], [("view", COLUMNS, ROWS)]],
    "transpose": [[("t",)], [("transpose", 0, 1), ("narrow", 0, 3, 5)]],
    "offset": [
        [("narrow", 0, 1, 4)],
        [("narrow", 0, 2, 4)],
        [("select", 0, 0)],
        [("select", 0, 5)],
    ],
    "strided": [[("chunk", 4, 1, i)] for i in range(4)],
    "inflated": [[("unsqueeze", 0), ("expand", 50, ROWS, COLUMNS)], [("unfold", 1, 8, 1)]],
}


@pytest.mark.parametrize("views", VIEWS.values(), ids=VIEWS)
@both_orders
def test_views_cost_the_union_of_their_bytes(hyper, backend, order, views):
    def views_of(made):
        return order([backend.view(made, *steps) for steps in views])

    compare(hyper, saving(backend, views_of), saving(backend, views_of, seed=1))
    hyper.assert_moved(2 * NBYTES, copies=2, packs=2)


def test_aliases_alias_again_also_when_packed(hyper, backend):
    """Ranges of storages are packed: two views of one come back as two views of one."""
    restored = []

    def layer(x):
        first, second = backend.tensor(ROWS, COLUMNS, seed=1), backend.tensor(ROWS, seed=2)
        restored.clear()
        views = [
            first,
            second,
            backend.view(first, ("t",)),
            backend.view(first, ("narrow", 1, 3, 4)),
        ]
        return backend.save(x, views, restored=restored)

    compare(hyper, layer)
    first, second, transposed, narrow = restored
    assert backend.same_storage(first, transposed, narrow)
    assert not backend.same_storage(first, second)
    hyper.assert_moved(NBYTES + ROWS * FLOAT, copies=2, packs=1)


def test_a_view_that_is_saved_late_finds_the_rest_of_its_storage(hyper, backend):
    """Another layer saves more of a storage after its first part was launched."""
    made = []

    def first(x):
        made[:] = [backend.tensor(ROWS, COLUMNS)]
        return backend.save(x, [backend.view(made[0], ("narrow", 0, 0, 2))])

    def second(x):
        return backend.save(x, [backend.view(made.pop(), ("narrow", 0, 1, 5))])

    compare(hyper, first, second)
    stats = hyper.stats()
    expected = NBYTES if hyper.knows_storages else 7 * COLUMNS * FLOAT
    assert (stats.d2h_bytes, stats.h2d_bytes, stats.unique_bytes) == (expected,) * 3, stats


# --- what others hold


def test_a_slice_does_not_free_the_rest_of_its_storage(hyper, backend):
    """The user holds the storage and saves a slice: it is not copied, and readable at every moment."""
    held = backend.tensor(ROWS, COLUMNS)
    bits = backend.bits(held)

    def layer(x):
        x = backend.save(x, [backend.view(held, ("narrow", 0, 1, 2))])
        return backend.save(x, [backend.tensor(3, seed=5)])

    def look(x):
        assert backend.bits(held) == bits
        return x

    compare(hyper, layer, look, layer, look, steps=3)
    assert backend.bits(held) == bits
    stats = hyper.stats()
    left = 3 * FLOAT if hyper.knows_storages else (2 * COLUMNS + 3) * FLOAT
    assert (stats.d2h_bytes, stats.h2d_bytes) == (3 * 2 * left,) * 2, stats
    assert stats.unfreed_bytes == 0


def test_a_slice_that_nobody_else_holds_costs_its_own_bytes(hyper, backend):
    def views_of(made):
        return [backend.view(made, ("narrow", 0, 1, 2))]

    compare(hyper, saving(backend, views_of), saving(backend, views_of, seed=1))
    nbytes = 2 * COLUMNS * FLOAT
    hyper.assert_moved(2 * nbytes, copies=2, packs=2)


def test_rotary_tables_that_all_layers_get_stay_where_they_are(hyper, backend):
    cos, sin = backend.tensor(ROWS, COLUMNS, seed=1), backend.tensor(ROWS, COLUMNS, seed=2)
    bits = backend.bits(cos), backend.bits(sin)

    def layer(x, cos, sin):
        assert (backend.bits(cos), backend.bits(sin)) == bits
        return backend.save(x, [cos, sin, backend.tensor(5, seed=3), backend.view(cos, ("t",))])

    compare(hyper, *[layer] * 4, others=[cos, sin], steps=2)
    assert (backend.bits(cos), backend.bits(sin)) == bits
    stats = hyper.stats()
    assert (stats.d2h_bytes, stats.h2d_bytes) == (2 * 4 * 5 * FLOAT,) * 2, stats
    assert (stats.unfreed_bytes, stats.parked) == (0, 0)


def test_rotary_tables_that_die_with_the_forward_cross_once(hyper, backend):
    """Made in the model, saved by every layer: one entry, which leaves when the last layer is done with it."""

    def layer(x, tables):
        return backend.save(x, [tables[0]])

    def program(network):
        def forward(x):
            return network(x, [backend.tensor(ROWS, COLUMNS, seed=1)])

        return forward

    def outcome(network):
        forward = backend.forward(program(network), [backend.leaf(2)])
        return [forward.output, *forward.gradients()]

    expected = outcome(hyper.plain(*[layer] * 4))
    assert_same(backend, outcome(hyper.network(*[layer] * 4)), expected)
    stats = hyper.stats()
    assert stats.unique_bytes == NBYTES
    assert (stats.d2h_bytes, stats.h2d_bytes) in ((NBYTES, NBYTES), (0, 0)), stats
    hyper.assert_at_rest()


# --- one storage, several groups


def test_a_storage_of_two_groups_is_one_entry(hyper, backend):
    """A residual: saved by the layer that makes it and by the next. Copied once, loaded once, freed at the last."""
    residual = []

    def first(x):
        residual[:] = [backend.tensor(ROWS, COLUMNS)]
        return backend.save(x, [residual[0]])

    def second(x):
        return backend.save(x, [backend.view(residual.pop(), ("t",))])

    compare(hyper, first, second)
    hyper.assert_moved(NBYTES, copies=1, packs=1)


def test_groups_that_share_a_storage_do_not_free_it_under_each_other(hyper, backend):
    """Groups that are not adjacent, a different view in each."""
    shared = []

    def first(x):
        shared[:] = [backend.tensor(ROWS, COLUMNS)]
        return backend.save(x, [backend.view(shared[0], ("narrow", 0, 0, 4))])

    def between(x):
        return backend.save(x, [backend.tensor(7, seed=4)])

    def last(x):
        return backend.save(x, [backend.view(shared.pop(), ("narrow", 0, 2, 4))])

    compare(hyper, first, between, between, last)
    stats = hyper.stats()
    shared = NBYTES if hyper.knows_storages else 8 * COLUMNS * FLOAT
    expected = shared + 2 * 7 * FLOAT
    assert (stats.d2h_bytes, stats.h2d_bytes, stats.unique_bytes) == (expected,) * 3, stats


def test_an_address_that_is_reused_within_a_step_is_no_duplicate(hyper, backend):
    """What is freed after its offload gives its address to the next layer's storage, of other content."""
    memory = ReusedMemory(backend, 64 * 64)

    def layer_of(seed):
        def layer(x):
            backend.settle()  # copies are out: what was let go of is free
            return backend.save(x, [memory.tensor(64, 64, seed=seed)])

        return layer

    functions = [layer_of(seed) for seed in range(12)]
    expected = run(hyper, hyper.plain(*functions))
    memory.addresses.clear()
    assert_same(backend, run(hyper, hyper.network(*functions)), expected)
    assert memory.is_reused(), "no address was reused: this tests nothing"
    hyper.assert_moved(12 * 64 * 64 * FLOAT, copies=12, packs=12)
    hyper.assert_at_rest()


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]], ids=str)
def test_launches_before_the_first_load_do_not_overwrite_each_other(hyper, backend, order):
    """Micro-batches: every forward has its own copies, whichever backward comes first."""
    micro_batch = [0]

    def layer_of(index):
        def layer(x):
            seed = 10 * micro_batch[0] + index
            made = backend.tensor(ROWS, COLUMNS, seed=seed), backend.tensor(ROWS, seed=seed)
            return backend.save(x, made)

        return layer

    functions = [layer_of(index) for index in range(3)]

    def outcome(network):
        passes = []
        for micro_batch[0] in range(3):
            passes.append(backend.forward(network, [backend.leaf(2, seed=micro_batch[0])]))
        found = {i: [passes[i].output, *passes[i].gradients()] for i in order}
        return [tensor for i in range(3) for tensor in found[i]]

    expected = outcome(hyper.plain(*functions))
    assert_same(backend, outcome(hyper.network(*functions)), expected)
    hyper.assert_moved(9 * (NBYTES + ROWS * FLOAT), copies=18, packs=9)
    hyper.assert_at_rest()


# --- in-place changes


def in_the_layer(backend, moment):
    """Layers that save a tensor and change it at the moment named."""
    kept = []

    def layer(x):
        made = backend.tensor(ROWS, COLUMNS)
        x = backend.save(x, [made, backend.tensor(3, seed=8)])
        if moment == "before the launch":
            backend.write(made)
        else:
            kept[:] = [made]
        return x

    def write(x):
        if moment == "after the launch":
            backend.write(kept.pop())
        return x

    return [layer, write], kept


@pytest.mark.parametrize("moment", ["before the launch", "after the launch", "after the forward"])
def test_a_change_in_place_is_never_silent(hyper, backend, moment):
    """As without offload, the backward raises; and the next step is right."""
    functions, kept = in_the_layer(backend, moment)

    def raised(network, kind):
        forward = backend.forward(network, [backend.leaf(2)])
        if kept:
            backend.write(kept.pop())
        try:
            forward.gradients()
        except kind as error:
            return str(error)
        raise AssertionError("nothing was raised")

    expected = raised(hyper.plain(*functions), RuntimeError)
    found = raised(hyper.network(*functions), InplaceModificationError)
    assert "modified by an inplace operation" in found
    assert "modified by an inplace operation" in expected
    hyper.assert_at_rest()
    compare(hyper, saving(backend, whole), saving(backend, whole, seed=1))


def test_a_changed_tensor_that_backward_does_not_ask_for_is_no_error(hyper, backend):
    """What plain autograd allows stays allowed: the branch of the changed tensor has no backward."""
    branch = []

    def layer(x):
        made = backend.tensor(ROWS, COLUMNS)
        branch[:] = [backend.save(x, [made])]
        backend.write(made)
        return backend.save(x, [backend.tensor(3, seed=8)])

    expected = run(hyper, hyper.plain(layer))
    assert_same(backend, run(hyper, hyper.network(layer)), expected)
    branch.clear()
    hyper.assert_at_rest()
    hyper.assert_moved(3 * FLOAT, copies=1, packs=1, unmoved=NBYTES)


# --- trouble on the way


def test_a_pool_that_runs_out_in_the_middle_of_a_group(hyper, backend):
    """The rest stays on the device and is counted; the next step, with what fits, is right too."""

    def layer_of(seed, count):
        def layer(x):
            return backend.save(x, [backend.tensor(1024, seed=seed + i) for i in range(count)])

        return layer

    big, small = layer_of(0, 5), layer_of(50, 2)
    nbytes = 1024 * FLOAT
    hyper.use_pool(3 * nbytes)
    with pytest.warns(RuntimeWarning, match="room"):
        compare(hyper, big)
    stats = hyper.stats()
    assert stats.kept["host_full"] >= 2, stats
    assert stats.d2h_bytes == stats.h2d_bytes <= 3 * nbytes, stats
    assert stats.peak_host_bytes <= 3 * nbytes, stats
    before = stats.d2h_bytes
    compare(hyper, small)
    stats = hyper.stats()
    assert stats.d2h_bytes - before == 2 * nbytes
    assert stats.h2d_bytes == stats.d2h_bytes


def test_a_backward_hook_that_never_fires_is_no_zero_size_storage(hyper, backend):
    """Backward reaches into a layer by another way than its output: unpack loads on demand."""
    inner = []

    def layer_of(seed):
        def layer(x):
            made = backend.save(x, [backend.tensor(ROWS, COLUMNS, seed=seed)])
            inner.append(made)
            return backend.op("clone", made)

        return layer

    functions = [layer_of(seed) for seed in range(3)]

    def outcome(network):
        def program(x):
            inner.clear()
            network(x)
            return inner[1]

        forward = backend.forward(program, [backend.leaf(2)])
        inner.clear()
        return [forward.output, *forward.gradients()]

    expected = outcome(hyper.plain(*functions))
    assert_same(backend, outcome(hyper.network(*functions)), expected)
    stats = hyper.stats()
    assert stats.h2d_bytes >= 2 * NBYTES, stats
    hyper.assert_at_rest()


def test_hooks_that_are_taken_away_between_forward_and_backward(hyper, backend):
    functions = [saving(backend, whole, seed=seed) for seed in range(3)]
    expected = run(hyper, hyper.plain(*functions))
    network = hyper.network(*functions)
    forward = backend.forward(network, [backend.leaf(2)])
    for layer in network.layers:
        hyper.manager.unregister_forward_prefetch_layer(layer)
    assert_same(backend, [forward.output, *forward.gradients()], expected)
    hyper.assert_moved(3 * NBYTES, copies=3, packs=3)
    hyper.assert_at_rest()


def test_a_forward_that_has_no_backward_leaves_nothing(hyper, backend):
    functions = [saving(backend, whole, seed=seed) for seed in range(3)]
    expected = run(hyper, hyper.plain(*functions))
    network = hyper.network(*functions)
    for _ in range(5):
        backend.forward(network, [backend.leaf(2)])
    assert hyper.stats().d2h_bytes > 0
    assert_same(backend, run(hyper, network), expected)
    hyper.assert_at_rest()


def test_nothing_grows_over_many_steps(hyper, backend):
    functions = [saving(backend, whole, seed=seed) for seed in range(3)]
    compare(hyper, *functions, steps=50)
    hyper.assert_moved(50 * 3 * NBYTES, copies=150, packs=150)
