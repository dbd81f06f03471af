"""Random alias graphs against a model of what must be copied, restored and aliased."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis
import hypothesis.strategies as st
from checks import note
from hypothesis import HealthCheck, given, settings
from support import assert_at_rest

ELEMENTS = 24
FLOAT = 4

SETTINGS = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@dataclass(frozen=True)
class View:
    """An as_strided view of one storage; elements."""

    storage: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def extent(self) -> set[int]:
        """The elements from the first to the last it can touch."""
        last = sum((n - 1) * s for n, s in zip(self.sizes, self.strides, strict=True))
        return set(range(self.offset, self.offset + last + 1)) if 0 not in self.sizes else set()


@dataclass(frozen=True)
class Node:
    """One node saves these views; `reads` is how often its backward asks for them."""

    views: tuple[View, ...]
    reads: int


@dataclass(frozen=True)
class Graph:
    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class Case:
    storages: int
    graphs: tuple[Graph, ...]
    held: frozenset[int]  # storages that the user holds
    order: tuple[int, ...]  # in which the graphs run backward
    dropped: frozenset[int]  # graphs that never do
    retained: frozenset[int]  # graphs that do twice
    one_context: bool


@st.composite
def views(draw, storages):
    dims = draw(st.integers(0, 3))
    sizes, strides, room = [], [], ELEMENTS - 1
    offset = draw(st.integers(0, room))
    room -= offset
    for _ in range(dims):
        stride = draw(st.integers(0, 6))
        most = 4 if stride == 0 else 1 + room // stride
        size = draw(st.integers(0 if draw(st.integers(0, 9)) == 0 else 1, min(most, 5)))
        room -= max(0, size - 1) * stride
        sizes.append(size)
        strides.append(stride)
    return View(draw(st.integers(0, storages - 1)), tuple(sizes), tuple(strides), offset)


@st.composite
def cases(draw):
    storages = draw(st.integers(1, 4))
    pool = draw(st.lists(views(storages), min_size=1, max_size=6))
    node = st.builds(
        Node,
        st.lists(st.sampled_from(pool), min_size=1, max_size=4).map(tuple),
        st.integers(1, 2),
    )
    graphs = draw(st.lists(st.lists(node, min_size=1, max_size=4), min_size=1, max_size=3))
    every = range(len(graphs))
    some = st.sets(st.sampled_from(every)).map(frozenset)
    return Case(
        storages,
        tuple(Graph(tuple(nodes)) for nodes in graphs),
        draw(st.sets(st.integers(0, storages - 1)).map(frozenset)),
        tuple(draw(st.permutations(every))),
        draw(some),
        draw(some),
        draw(st.booleans()),
    )


def expected_bytes(case: Case, counts_holders: bool) -> tuple[int, int]:
    """Bytes that go out, and that come back when nothing is loaded on a guess.

    The union of the saved extents of each storage that nobody is known to hold, once a context; and once for
    each backward that reads of it.
    """
    out = back = 0
    contexts = [case.graphs] if case.one_context else [(graph,) for graph in case.graphs]
    runs = {
        i: 0 if i in case.dropped else 2 if i in case.retained else 1
        for i in range(len(case.graphs))
    }
    number = {id(graph): i for i, graph in enumerate(case.graphs)}
    for graphs in contexts:
        held = case.held if counts_holders else frozenset()
        for storage in set(range(case.storages)) - held:
            extents = [extent_of(graph, storage) for graph in graphs]
            nbytes = FLOAT * len(set().union(*extents))
            out += nbytes
            back += nbytes * sum(
                runs[number[id(g)]] for g, e in zip(graphs, extents, strict=True) if e
            )
    return out, back


def extent_of(graph: Graph, storage: int) -> set[int]:
    views = (view for node in graph.nodes for view in node.views if view.storage == storage)
    return set().union(*(view.extent for view in views))


class Program:
    """Runs a case; notes what is saved and what comes back, graph by graph and node by node."""

    def __init__(self, backend, case: Case) -> None:
        self.backend = backend
        self.case = case
        self.leaf = backend.leaf(2)
        self.restored = [[[] for _ in graph.nodes] for graph in case.graphs]
        self.noted = [[[] for _ in graph.nodes] for graph in case.graphs]

    def run(self, tide) -> list[bytes]:
        backend, case = self.backend, self.case
        storages = [backend.tensor(ELEMENTS, seed=i) for i in range(case.storages)]
        held = {i: storages[i] for i in case.held}
        before = {i: backend.bits(storage) for i, storage in held.items()}
        passes = self.forwards(storages, tide)
        found = []
        for i in case.order:
            if i in case.dropped:
                passes[i] = None
                continue
            if i in case.retained:
                found.append(backend.bits(passes[i].gradients(retain=True)[0]))
                self.check(i, held)
            found.append(backend.bits(passes[i].gradients()[0]))
            self.check(i, held)
            passes[i] = None
        assert {i: backend.bits(storage) for i, storage in held.items()} == before
        return found

    def forwards(self, storages, tide):
        """Every graph; the storages that nobody holds are let go inside the last context."""
        backend, case = self.backend, self.case

        def program(i):
            def forward(anchor):
                for j, node in enumerate(case.graphs[i].nodes):
                    tensors = [self.make(storages, view) for view in node.views]
                    self.noted[i][j] = [note(backend, tensor) for tensor in tensors]
                    restored = self.restored[i][j]
                    anchor = backend.save(anchor, tensors, restored=restored, reads=node.reads)
                    tensors = None
                return anchor

            return forward

        count = len(case.graphs)
        if case.one_context or tide is None:

            def everything():
                passes = [backend.forward(program(i), [self.leaf]) for i in range(count)]
                storages.clear()
                return passes

            if tide is None:
                return everything()
            with tide:
                return everything()
        passes = []
        for i in range(count):
            with tide:
                passes.append(backend.forward(program(i), [self.leaf]))
                # The next context has storages of its own, with the same bits.
                storages[:] = [
                    storage
                    if k in case.held
                    else (backend.tensor(ELEMENTS, seed=k) if i + 1 < count else None)
                    for k, storage in enumerate(storages)
                ]
        storages.clear()
        return passes

    def make(self, storages, view: View):
        step = ("as_strided", view.sizes, view.strides, view.offset)
        return self.backend.view(storages[view.storage], step)

    def check(self, graph: int, held) -> None:
        """Bits, layouts, addresses; one storage for the views of one, another for those of another."""
        backend = self.backend
        by_storage: dict[int, list] = {}
        for node, noted, restored in zip(
            self.case.graphs[graph].nodes, self.noted[graph], self.restored[graph], strict=True
        ):
            for view, expected, tensor in zip(
                node.views * node.reads, noted * node.reads, restored, strict=True
            ):
                if not view.extent:
                    assert backend.layout(tensor).sizes == view.sizes
                    continue
                assert note(backend, tensor) == expected
                by_storage.setdefault(view.storage, []).append(tensor)
            restored.clear()
        for storage, tensors in by_storage.items():
            assert backend.same_storage(*tensors)
            if storage in held and backend.counts_holders:
                assert backend.same_storage(tensors[0], held[storage])
        firsts = [tensors[0] for tensors in by_storage.values()]
        for i, first in enumerate(firsts):
            assert not any(backend.same_storage(first, other) for other in firsts[:i])


@SETTINGS
@given(case=cases())
def test_random_alias_graphs(backend, case):
    expected = Program(backend, case).run(None)
    tide = backend.offload()
    assert Program(backend, case).run(tide) == expected
    assert_at_rest(tide)
    stats = tide.stats()
    out, back = expected_bytes(case, backend.counts_holders)
    assert stats.d2h_bytes == out, stats
    # What lies packed with a graph's storages comes along: those of other graphs of the context too.
    more = backend.prefetches or (backend.packs and case.one_context)
    assert (stats.h2d_bytes >= back) if more else (stats.h2d_bytes == back), stats
    assert stats.saved_tensors == sum(len(n.views) for g in case.graphs for n in g.nodes)
    hypothesis.event(f"bytes were loaded: {back > 0}")


@SETTINGS
@given(
    case=cases(),
    options=st.fixed_dictionaries(
        {
            "min_bytes": st.sampled_from([0, 1, ELEMENTS * FLOAT + 1]),
            "keep_last_bytes": st.sampled_from([0, 40, 150, 1 << 20]),
            "in_flight_bytes": st.sampled_from([0, 100, 1 << 20]),
            "prefetch_bytes": st.sampled_from([0, 100, 200, 1 << 20]),
        }
    ),
)
def test_random_alias_graphs_under_any_options(backend, case, options):
    """Bits, layouts and aliases do not depend on what is held back, small, in flight or guessed."""
    expected = Program(backend, case).run(None)
    tide = backend.offload(**options)
    assert Program(backend, case).run(tide) == expected
    assert_at_rest(tide)
    out, _ = expected_bytes(case, backend.counts_holders)
    assert tide.stats().d2h_bytes <= out


def test_the_random_cases_load_something(backend):
    """One case of each feature: the random test must not pass on live hits alone."""
    x, y = View(0, (4, 3), (5, 1), 2), View(0, (6,), (2,), 11)
    case = Case(
        storages=2,
        graphs=(Graph((Node((x, y), 2), Node((View(1, (), (), 23),), 1))), Graph((Node((y,), 1),))),
        held=frozenset(),
        order=(0, 1),
        dropped=frozenset(),
        retained=frozenset({1}),
        one_context=False,
    )
    out, back = expected_bytes(case, backend.counts_holders)
    assert (out, back) == ((20 + 1 + 11) * FLOAT, (20 + 1 + 2 * 11) * FLOAT)
    expected = Program(backend, case).run(None)
    tide = backend.offload()
    assert Program(backend, case).run(tide) == expected
    assert (tide.stats().d2h_bytes, tide.stats().h2d_bytes) == (out, back)
    assert_at_rest(tide)
