"""HyperParallel's interface on one backend: layers wrapped and chained, run with and without, compared by bits.

Neutral: a backend is one of the behaviour tests', and the only other thing needed of a framework is a module that runs
a function, which `layers` gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from checks import assert_same
from layers import make_layer

import ebbtide.hyper_parallel as hp

Tensor = Any
Function = Callable[..., Tensor]


class Hyper:
    """What a test wraps and counts with. A pool of its own gives it sessions of its own."""

    def __init__(self, backend: Any, group_swap: bool) -> None:
        self.backend = backend
        self.group_swap = group_swap
        # Where it is not told who holds a storage, one that has left is not known again, and a slice of what others hold
        # is copied.
        self.knows_storages = getattr(backend, "counts_holders", True)
        self.use_pool("1GiB")
        self.manager = hp.SwapManager()

    def use_pool(self, max_host_bytes: int | str) -> None:
        self.options = {
            "group_swap": self.group_swap,
            "cpu_pool": hp.PinnedMemoryPool(max_host_bytes),
        }
        hp.reset_stats()

    def swapped(self, function: Function, policy_fn: Any = None) -> Any:
        """The function as a layer whose saved tensors are swapped."""
        return hp.swap_wrapper(make_layer(function), policy_fn=policy_fn, **self.options)

    def chain(self, *layers: Any) -> None:
        for first, second in zip(layers, layers[1:], strict=False):
            self.manager.set_forward_prefetch_layer(first, second)

    def network(self, *functions: Function, policy_fn: Any = None) -> Network:
        """The functions as a chain of swapped layers, and one behind them that saves nothing: all of them leave."""
        layers = [self.swapped(function, policy_fn) for function in (*functions, self.end)]
        self.chain(*layers)
        return Network(layers)

    def end(self, x: Tensor) -> Tensor:
        return self.backend.op("clone", x)

    def plain(self, *functions: Function) -> Network:
        return Network([*functions, self.end])

    # --- counts, under the names that the at-rest check asks for
    def stats(self) -> Any:
        return hp.stats()

    def synchronize(self) -> None:
        hp.synchronize()

    def assert_moved(self, nbytes: int, copies: int, packs: int, unmoved: int = 0) -> None:
        """Exactly this much went out and came back, in ``packs`` with group_swap, else in ``copies``; and of what was
        saved so much did not."""
        stats = self.stats()
        expected = (packs if self.group_swap else copies, nbytes)
        assert (stats.d2h_copies, stats.d2h_bytes) == expected, stats
        assert (stats.h2d_copies, stats.h2d_bytes) == expected, stats
        assert stats.unique_bytes == nbytes + unmoved, stats
        assert (stats.unfreed_bytes, stats.live_hits) == (0, 0), stats

    def assert_at_rest(self) -> None:
        from support import assert_at_rest

        assert_at_rest(self)
        assert self.manager.active_group_count() == 0


class Network:
    """Layers one after the other; what else they are given is the same for each."""

    def __init__(self, layers: Sequence[Callable[..., Tensor]]) -> None:
        self.layers = layers

    def __call__(self, x: Tensor, *others: Any) -> Tensor:
        for layer in self.layers[:-1]:
            x = layer(x, *others)
        return self.layers[-1](x)


def run(hyper: Hyper, network: Network, *others: Any) -> list[Tensor | None]:
    """Output and gradient of one forward and backward."""
    forward = hyper.backend.forward(lambda x: network(x, *others), [hyper.backend.leaf(2)])
    return [forward.output, *forward.gradients()]


def compare(hyper: Hyper, *functions: Function, others: Sequence[Any] = (), steps: int = 1) -> None:
    """Bits as without, for each of the steps, and nothing held afterwards."""
    expected = run(hyper, hyper.plain(*functions), *others)
    network = hyper.network(*functions)
    for _ in range(steps):
        assert_same(hyper.backend, run(hyper, network, *others), expected)
        hyper.assert_at_rest()
