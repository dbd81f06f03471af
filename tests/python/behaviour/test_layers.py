"""Twelve layers in a row: addresses come again at every layer, weights stay, what layers share moves once."""

from __future__ import annotations

from checks import assert_moved, assert_same, compare, run
from support import assert_at_rest, assert_loaded

FLOAT = 4
LAYERS = 12


def decoder(backend, addresses):
    """Each layer's results die with it but the residual stream, so the next one gets their memory."""

    def seen(x):
        addresses.append(backend.address(x))
        return x

    def program(x, *weights):
        for weight in weights:
            hidden = seen(backend.op("gelu", seen(backend.op("linear", x, weight))))
            hidden = seen(backend.op("mul", seen(backend.op("softmax", hidden)), x))
            x = backend.op("add", x, seen(backend.op("tanh", hidden)))
        return x

    return program


def leaves_of(backend):
    return [
        backend.leaf(16, 16, dtype="float32"),
        *(backend.leaf(16, 16, dtype="float32", seed=i + 1) for i in range(LAYERS)),
    ]


def test_addresses_that_come_again_in_twelve_layers(backend):
    """Taking an address for a storage gives one layer another one's activations."""
    addresses, leaves = [], leaves_of(backend)
    expected = run(backend, decoder(backend, []), leaves)
    tide = backend.offload()
    assert_same(backend, run(backend, decoder(backend, addresses), leaves, tide), expected)
    assert_loaded(tide)
    assert_at_rest(tide)
    if not backend.packs:  # what is packed lives to the end of the context
        assert len(set(addresses)) < 5 * LAYERS, "no address was reused: the test shows nothing"


def test_addresses_that_come_again_in_saved_tensors(backend):
    """The same with nothing but saved tensors, of which each layer's have one size and other contents."""

    def program(anchor):
        for i in range(LAYERS):
            for j in range(3):
                x = backend.tensor(64, seed=3 * i + j)
                anchor = backend.save(anchor, [x, backend.view(x, ("narrow", 0, j, 32))])
                x = None
        return anchor

    stats = compare(backend, program, [backend.leaf(2)])
    assert (stats.storages, stats.exact_duplicates) == (3 * LAYERS, 0)
    assert_moved(backend, stats, 3 * LAYERS * 64 * FLOAT, copies=3 * LAYERS)


def test_what_all_layers_save_moves_once(backend):
    def program(anchor):
        shared = backend.tensor(40)
        for i in range(LAYERS):
            anchor = backend.save(anchor, [shared, backend.tensor(8, seed=i)])
        return anchor

    stats = compare(backend, program, [backend.leaf(2)])
    assert stats.exact_duplicates == LAYERS - 1
    assert_moved(backend, stats, (40 + 8 * LAYERS) * FLOAT, copies=1 + LAYERS)


def test_weights_never_move(backend):
    """Nor do views of them; the policy is asked about all that is no weight."""
    from ebbtide.policy import CheckpointPolicy

    net = backend.network()
    x = backend.view(backend.leaf(5, 8, dtype="float32"), ("detach",))
    asked = []

    def policy(tensor):
        asked.extend(w for w in net.weights if backend.same_storage(w, tensor))
        return CheckpointPolicy.MUST_SWAP

    tide = backend.offload(net.model, policy=policy)
    stats = compare(backend, lambda *_: net.run(net.run(x)), net.weights, tide=tide)
    assert not asked
    # Of each run: two matrices and what layer normalisation scales by; one matrix where the input needs no gradient.
    assert stats.kept["parameter"] >= 5
