"""Forwards and backwards in every arrangement; afterwards nothing is held, without a garbage collection."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from contextlib import nullcontext

import pytest
from checks import assert_moved, assert_same, compare, run, save_and_restore
from support import assert_at_rest, assert_loaded

from ebbtide import UsageError

FLOAT = 4
DOUBLE = 8


def network(backend):
    def program(a, w):
        x = backend.op("linear", backend.op("exp", a), w)
        return backend.op("gelu", backend.op("add", x, backend.op("tanh", x)))

    return program


def leaves_of(backend, rows=3, seed=0):
    return [backend.leaf(rows, 4, seed=seed), backend.leaf(5, 4, seed=99)]


@pytest.mark.parametrize("order", ["first in first out", "last in first out"])
@pytest.mark.parametrize("count", [2, 7])
def test_many_forwards_before_their_backwards(backend, count, order):
    inputs = [leaves_of(backend, rows=2 + i, seed=i) for i in range(count)]
    expected = [run(backend, network(backend), leaves) for leaves in inputs]
    tide = backend.offload()
    passes = [backend.forward(network(backend), leaves, tide) for leaves in inputs]
    indices = list(range(count))
    if order == "last in first out":
        indices.reverse()
    for i in indices:
        assert_same(backend, [passes[i].output, *passes[i].gradients()], expected[i])
        passes[i] = None
    assert_loaded(tide)
    assert_at_rest(tide)


def test_accumulation_over_ragged_batches(backend):
    def accumulate(tide):
        net = backend.network()
        found = []
        for i, rows in enumerate((3, 1, 7, 2)):
            x = backend.view(backend.leaf(rows, 8, dtype="float32", seed=i), ("detach",))
            forward = backend.forward(lambda *_, x=x: net.run(x), net.weights, tide)
            found += forward.gradients()
        return found

    expected = accumulate(None)
    tide = backend.offload()
    assert_same(backend, accumulate(tide), expected)
    assert_loaded(tide)
    assert_at_rest(tide)


def test_no_grad_and_eval_between_forward_and_backward(torch_backend):
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Dropout(0.5)
    )
    x = torch.randn(6, 4)

    def step(tide):
        torch.manual_seed(1)
        with tide or torch.enable_grad():
            loss = model(x).sum()
            with torch.no_grad():
                model.eval()(x)
                model.train()
        model.eval()
        with torch.no_grad():
            evaluated = model(x)
        with tide or torch.enable_grad(), torch.inference_mode():
            assert torch.equal(model(x), evaluated)
        model.train()
        return [evaluated, *torch.autograd.grad(loss, list(model.parameters()))]

    state = {k: v.clone() for k, v in model.state_dict().items()}
    expected = step(None)
    model.load_state_dict(state)
    tide = torch_backend.offload(model)
    assert_same(torch_backend, step(tide), expected)
    assert_loaded(tide)
    assert_at_rest(tide)


def test_no_grad_between_forward_and_backward(backend):
    """A forward for evaluation saves nothing and disturbs nothing of the one before it."""

    def step(net, x, tide):
        forward = backend.forward(lambda *_: net.run(x), net.weights, tide)
        with tide or nullcontext(), backend.no_grad():
            evaluated = net.run(x)
        return [forward.output, evaluated, *forward.gradients()]

    x = backend.view(backend.leaf(3, 8, dtype="float32"), ("detach",))
    expected = step(backend.network(), x, None)
    tide = backend.offload()
    compared = step(backend.network(), x, tide)
    assert_same(backend, compared, expected)
    assert_same(backend, compared[:1], compared[1:2])
    assert_loaded(tide)
    assert_at_rest(tide)


def test_a_forward_under_no_grad_saves_nothing(backend):
    tide = backend.offload()
    with tide, backend.no_grad():
        backend.op("sin", backend.op("exp", backend.leaf(4)))
    assert tide.stats().saved_tensors == 0
    assert_at_rest(tide)


@pytest.mark.parametrize("where", ["same", "other", "none"])
def test_a_forward_and_backward_inside_a_backward(torch_backend, where):
    """As a reentrant recomputation: `where` says which tide the inner forward runs under."""
    import contextlib

    import torch

    class Recomputed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, around):
            ctx.save_for_backward(x)
            ctx.around = around
            return x.exp().sin()

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            inner = x.detach().requires_grad_()
            with torch.enable_grad(), ctx.around:
                y = inner.exp().sin()
            return torch.autograd.grad(y, inner, grad)[0], None

    def attempt(tide, around):
        a = torch_backend.leaf(3, 4)
        with tide:
            x = a.exp()
            for _ in range(3):
                x = Recomputed.apply(x, around).cos()
            loss = x.sum()
            x = None
        return torch.autograd.grad(loss, a)

    plain = contextlib.nullcontext()
    expected = attempt(plain, plain)
    tide, other = torch_backend.offload(), torch_backend.offload()
    found = attempt(tide, {"same": tide, "other": other, "none": plain}[where])
    assert_same(torch_backend, found, expected)
    assert_loaded(tide)
    if where == "other":
        assert_loaded(other)
    assert_at_rest(tide)
    assert_at_rest(other)


def test_backward_inside_the_context(backend):
    def program(a):
        return backend.op("exp", backend.op("exp", a))

    tide = backend.offload()
    leaf = backend.leaf(5)
    expected = run(backend, program, [leaf])[1:]
    with tide:
        found = backend.forward(program, [leaf]).gradients()
    assert_same(backend, found, expected)
    assert_at_rest(tide)


@pytest.mark.parametrize("when", ["inside", "after"])
def test_a_graph_dropped_without_a_backward(backend, when):
    tide = backend.offload()
    leaves = leaves_of(backend)
    if when == "inside":
        with tide:
            forward = backend.forward(network(backend), leaves)
            forward = None
    else:
        forward = backend.forward(network(backend), leaves, tide)
        assert tide.stats().entries > 0
        forward = None
    assert forward is None
    stats = tide.stats()
    # What waits for company until the context is left is not copied where nobody asks for it any more.
    assert (stats.d2h_bytes > 0) == (when == "after" or not backend.waits)
    assert stats.h2d_bytes == 0
    assert_at_rest(tide)


def test_branches_whose_outputs_are_unused(backend):
    """A mixture of experts: most experts run, few are used."""
    used = [0]

    def program(a):
        gate = backend.op("exp", a)
        experts = [backend.op("tanh", backend.op("sin", gate)) for _ in range(4)]
        return experts[used[0] % 4]

    tide = backend.offload()
    leaf = backend.leaf(6)
    for step in range(8):
        used[0] = step
        expected = run(backend, program, [leaf])
        assert_same(backend, run(backend, program, [leaf], tide), expected)
        assert_at_rest(tide)
    assert_loaded(tide)


def test_part_of_a_node_is_never_asked_for(backend):
    """Only one input's gradient is wanted: what serves the other one is dropped unread."""

    def program(a, b):
        return backend.op("mul", backend.op("exp", a), backend.op("exp", b))

    tide = backend.offload(prefetch_bytes=0)
    leaves = [backend.leaf(5), backend.leaf(5, seed=1)]
    expected = run(backend, program, leaves)[1]
    output = backend.forward(program, leaves, tide).output
    assert_same(backend, backend.gradients(output, leaves[:1]), [expected])
    output = None
    assert_at_rest(tide)


def test_flat_over_two_hundred_steps(backend):
    """Every step leaves all that is counted as it was; every fifth drops its graph."""
    tide = backend.offload()
    leaves = leaves_of(backend)
    expected = run(backend, network(backend), leaves)
    for step in range(200):
        forward = backend.forward(network(backend), leaves, tide)
        if step % 5:
            assert_same(backend, forward.gradients(), expected[1:])
        forward = None
        if step % 20 == 19:
            assert_at_rest(tide)
    stats = tide.stats()
    assert stats.storages % 200 == 0
    assert stats.d2h_bytes % 200 == 0
    # Every fifth backward did not happen.
    assert stats.h2d_bytes * 5 == stats.d2h_bytes * 4


@pytest.mark.parametrize("options", [{"min_bytes": "1MiB"}, {"keep_last_bytes": "1MiB"}, {}])
def test_outputs_do_not_leak(torch_backend, options):
    """A pack hook that returned a node's own output would keep the node alive for ever."""
    import torch

    class Marker:
        pass

    tide = torch_backend.offload(**options)
    marks = []
    for backward in (True, False):
        leaf = torch_backend.leaf(8)
        with tide:
            y = leaf
            for operation in (torch.exp, torch.tanh, torch.sigmoid, torch.relu):
                y = operation(y)  # each saves its output
                mark = Marker()
                marks.append(weakref.ref(mark))
                y.grad_fn.metadata["mark"] = mark
            mark = None
        if backward:
            y.sum().backward()
        y = leaf = None
    assert not gc.isenabled()
    assert [mark() for mark in marks] == [None] * 8
    assert_at_rest(tide)


def test_saved_tensors_read_twice_load_once(backend):
    stats, restored = save_and_restore(
        backend, lambda: [backend.tensor(5, 5), backend.tensor(3, seed=1)], reads=2
    )
    assert_moved(backend, stats, 28 * FLOAT, copies=2)
    assert backend.same_storage(restored[0], restored[2])


def test_a_saved_tensor_read_without_a_backward(torch_backend):
    """`grad_fn._saved_result`: unpacked in no backward, as often as asked, kept for nobody."""
    tide = torch_backend.offload()
    leaf = torch_backend.leaf(6)
    with tide:
        y = leaf.exp().exp()
    node = y.grad_fn.next_functions[0][0]
    for _ in range(3):
        assert_same(torch_backend, [node._saved_result], [leaf.exp()])
        assert tide.stats().device_bytes == y.untyped_storage().nbytes()  # parked: held here
    y.sum().backward()
    assert_loaded(tide)
    y = node = None
    assert_at_rest(tide)


def test_a_read_tensor_saved_again_in_a_forward(torch_backend):
    """Something restored outside a backward goes through the hooks like any other tensor."""
    backend = torch_backend
    tide = backend.offload()
    leaf = backend.leaf(6)

    def program(a):
        first = backend.op("exp", backend.op("exp", a))
        again = first.grad_fn.next_functions[0][0]._saved_result
        return backend.op("mul", first, backend.op("exp", again.detach()))

    compare(backend, program, [leaf], tide=tide)


@pytest.mark.parametrize("drop", ["graph", "tide"])
def test_the_session_outlives_the_object_that_made_it(backend, drop):
    leaves = leaves_of(backend)
    expected = run(backend, network(backend), leaves)
    tide = backend.offload()
    forward = backend.forward(network(backend), leaves, tide)
    if drop == "tide":
        tide = None
        assert_same(backend, forward.gradients(), expected[1:])
    else:
        forward = None
        assert_at_rest(tide)


def test_totals_add_up_over_passes(backend):
    tide = backend.offload()
    leaves = leaves_of(backend)
    compare(backend, network(backend), leaves, tide=tide)
    first = tide.stats()
    compare(backend, network(backend), leaves, tide=tide)
    second = tide.stats()
    for name in ("saved_tensors", "storages", "d2h_bytes", "h2d_bytes", "freed_bytes"):
        assert getattr(second, name) == 2 * getattr(first, name), name


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, pickle.dumps], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("trained", [False, True])
def test_an_object_refuses_to_be_copied_and_stays_usable(backend, duplicate, trained):
    """Also what holds it: a settings object, a trainer, a model with it as an attribute."""
    tide = backend.offload()
    program, leaves = network(backend), leaves_of(backend)
    if trained:
        run(backend, program, leaves, tide)
    for _ in range(3):
        with pytest.raises(UsageError, match="cannot be copied or pickled"):
            duplicate({"tide": [tide]} if duplicate is not copy.copy else tide)
    expected = run(backend, program, leaves, nullcontext())
    assert_same(backend, run(backend, program, leaves, tide), expected)
    assert_at_rest(tide)
