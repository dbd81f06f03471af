"""Manager calls in any order: when copies happen is a schedule's matter, what backward gets is not."""

from __future__ import annotations

import random
import warnings
from contextlib import nullcontext

import pytest
from checks import assert_same
from support import assert_at_rest

CALLS = (
    "launch_offload",
    "wait_offload",
    "launch_load",
    "wait_load",
    "release_group_storage",
    "abort_group",
)
NAMES = ("encoder", "decoder", "head")
FORWARDS, LAYERS = 4, 5
SEEDS = range(8)
MORE_SEEDS = range(8, 200)


class Programme:
    """What one seed does: layers, the groups they run in, the order of backwards, and the calls in between."""

    def __init__(self, backend, seed):
        self.backend = backend
        self.random = random.Random(seed)
        self.chained = self.random.random() < 0.5
        self.groups = [
            [self.random.choice((*NAMES, None)) for _ in range(LAYERS)] for _ in range(FORWARDS)
        ]
        self.order = self.random.sample(range(FORWARDS), FORWARDS)
        self.saves = [
            [self.random.randrange(1 << 16) for _ in range(LAYERS)] for _ in range(FORWARDS)
        ]
        self.forward = 0

    def layer(self, index):
        """Saves new storages and views of those that this forward and the ones before have made."""

        def layer(x, made):
            choose = random.Random(self.saves[self.forward][index])
            backend = self.backend
            made.append(backend.tensor(choose.randint(1, 9), 8, seed=choose.randrange(99)))
            saved = []
            for storage in choose.sample(made, min(len(made), 3)):
                view = choose.choice(
                    (("narrow", 1, 2, 3), ("t",), ("select", 0, 0), ("view", -1), ("unsqueeze", 0))
                )
                saved.append(choose.choice((storage, backend.view(storage, view))))
            if choose.random() < 0.4:
                made.pop(choose.randrange(len(made)))
            return backend.save(x, saved)

        return layer

    def run(self, layers, manager=None):
        """Outputs and gradients, by forward. ``manager`` gets the groups and the calls."""
        passes, found = [], {}
        for self.forward in range(FORWARDS):

            def program(x):
                made = []
                for index, layer in enumerate(layers):
                    name = self.groups[self.forward][index]
                    known = manager is not None and name is not None
                    with manager.group_context(name) if known else nullcontext():
                        x = layer(x, made)
                    self.calls(manager)
                return x

            passes.append(self.backend.forward(program, [self.backend.leaf(2, seed=self.forward)]))
        for index in self.order:
            self.calls(manager)
            found[index] = [passes[index].output, *passes[index].gradients()]
        return [tensor for index in range(FORWARDS) for tensor in found[index]]

    def calls(self, manager):
        if manager is None:
            return
        for _ in range(self.random.randrange(4)):
            name = self.random.choice(NAMES)
            manager.ensure_group(name)
            # A call at a wrong time says so.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                getattr(manager, self.random.choice(CALLS))(name)


@pytest.mark.parametrize(
    "seed", [*SEEDS, *(pytest.param(seed, marks=pytest.mark.slow) for seed in MORE_SEEDS)]
)
def test_any_order_of_calls(hyper, backend, seed):
    programme = Programme(backend, seed)
    functions = [programme.layer(index) for index in range(LAYERS)]
    expected = programme.run(functions)
    layers = [hyper.swapped(function) for function in functions]
    if programme.chained:
        hyper.chain(*layers)
    for _ in range(3):
        assert_same(backend, programme.run(layers, hyper.manager), expected)
        assert_at_rest(hyper)
    stats = hyper.stats()
    assert stats.unfreed_bytes == 0, stats
    assert stats.d2h_bytes <= stats.unique_bytes, stats


def test_the_schedules_move_bytes(hyper, backend):
    """Over all seeds, so that the test above is not one of tensors that stay."""
    for seed in SEEDS:
        programme = Programme(backend, seed)
        layers = [hyper.swapped(programme.layer(index)) for index in range(LAYERS)]
        programme.run(layers, hyper.manager)
    stats = hyper.stats()
    assert stats.h2d_bytes > 0.1 * stats.unique_bytes > 0, stats
