"""What stays because it is small, and what a tensor that comes back looks like."""

from __future__ import annotations

import pytest
from checks import assert_back, assert_moved, assert_out, compare, save_and_restore
from support import assert_at_rest, assert_loaded

FLOAT = 4


@pytest.mark.parametrize(("elements", "offloaded"), [(255, False), (256, True), (257, True)])
def test_the_threshold_is_on_the_bytes_of_the_storage(backend, elements, offloaded):
    tide = backend.offload(min_bytes=256 * FLOAT)
    stats, _ = save_and_restore(
        backend, lambda: [backend.tensor(elements)], tide=tide, loads=offloaded
    )
    assert stats.kept["small"] == (0 if offloaded else 1)
    if offloaded:
        assert_moved(backend, stats, elements * FLOAT)
    else:
        assert (stats.d2h_bytes, stats.storages) == (0, 0)


def test_the_threshold_does_not_look_at_the_view(backend):
    """A small view of a large storage would keep all of it; a large view of a small one keeps little."""
    tide = backend.offload(min_bytes=1024)

    def build():
        large = backend.tensor(1024)
        small = backend.tensor(1)
        return [
            backend.view(large, ("narrow", 0, 7, 2)),
            backend.view(small, ("expand", 1024)),
        ]

    stats, _ = save_and_restore(backend, build, tide=tide)
    assert stats.kept["small"] == 1
    assert_moved(backend, stats, 2 * FLOAT)
    assert stats.freed_bytes == 1024 * FLOAT


def test_small_tensors_among_large_ones(backend):
    tide = backend.offload(min_bytes=128)

    def build():
        return [backend.tensor(size, seed=size) for size in (1, 64, 2, 32, 31)]

    stats, _ = save_and_restore(backend, build, tide=tide)
    assert stats.kept["small"] == 3
    assert stats.saved_bytes == (1 + 64 + 2 + 32 + 31) * FLOAT
    assert_moved(backend, stats, (64 + 32) * FLOAT, copies=2)


def test_the_default_threshold(backend):
    """64 KiB to disk, and in packs; 256 KiB to host memory."""
    small = backend.packs or backend.tier == "disk"
    threshold = 64 << 10 if small else 256 << 10
    tide = backend.offload(min_bytes=None)

    def build():
        return [
            backend.tensor(threshold - 1, dtype="uint8"),
            backend.tensor(threshold, dtype="uint8"),
        ]

    stats, _ = save_and_restore(backend, build, tide=tide)
    assert stats.kept["small"] == 1
    assert_moved(backend, stats, threshold)


def test_the_last_bytes_stay(backend):
    """What leaves the window last is what backward needs first: it is never copied."""
    tide = backend.offload(keep_last_bytes=64 * FLOAT)

    def program(anchor):
        for i in range(8):
            anchor = backend.save(anchor, [backend.tensor(32, seed=i)])
        return anchor

    stats = compare(backend, program, [backend.leaf(2)], tide=tide)
    assert stats.kept["last"] == 2
    assert stats.live_hits == 2
    assert_out(backend, stats, 6 * 32 * FLOAT, copies=6)
    assert_back(backend, stats, 6 * 32 * FLOAT, copies=6)


def test_a_policy_decides_tensor_by_tensor(backend):
    """A tensor that the policy wants moved is moved whatever its size."""
    from ebbtide.policy import CheckpointPolicy

    def policy(tensor):
        wanted = tensor.numel() % 2 == 0
        return CheckpointPolicy.MUST_SWAP if wanted else CheckpointPolicy.MUST_SAVE

    tide = backend.offload(min_bytes="1MiB", policy=policy)

    def build():
        return [backend.tensor(size, seed=size) for size in (3, 4, 5, 6)]

    stats, _ = save_and_restore(backend, build, tide=tide)
    assert stats.kept["policy"] == 2
    assert_moved(backend, stats, 10 * FLOAT, copies=2)


# --- requires_grad, is_leaf, grad_fn: as a saved tensor has them without hooks


def seen_in_backward(backend, tide, make):
    import contextlib

    import torch

    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, anchor, *tensors):
            ctx.save_for_backward(*tensors)
            ctx.count = len(tensors)
            return anchor.clone()

        @staticmethod
        def backward(ctx, grad):
            for tensor in ctx.saved_tensors:
                seen.append(
                    (
                        tensor.requires_grad,
                        tensor.is_leaf,
                        type(tensor.grad_fn).__name__,
                        tensor.dtype,
                        tensor.device,
                        tensor.shape,
                        tensor.stride(),
                        tensor.storage_offset(),
                        tensor._version,
                        tensor.is_inference(),
                    )
                )
            return grad, *(None for _ in range(ctx.count))

    anchor = backend.leaf(2)
    with tide or contextlib.nullcontext():
        output = Look.apply(anchor, *make())
    output.sum().backward()
    return seen


def plain_tensors(backend):
    x = backend.tensor(4, 6)
    return [x, x.t(), x[1:, 2:]]


def results(backend):
    x = backend.leaf(4, 6).exp()
    return [x, x.t(), x.detach(), x[0].detach()]


def leaves(backend):
    return [backend.leaf(4), backend.leaf(3).detach()]


def parameters(backend):
    import torch

    return [torch.nn.Parameter(backend.tensor(3)), torch.nn.Parameter(backend.tensor(3), False)]


@pytest.mark.parametrize("make", [plain_tensors, results, leaves, parameters])
@pytest.mark.parametrize("options", [{}, {"min_bytes": "1MiB"}], ids=["offloaded", "kept"])
def test_requires_grad_is_leaf_and_grad_fn(torch_backend, make, options):
    expected = seen_in_backward(torch_backend, None, lambda: make(torch_backend))
    tide = torch_backend.offload(**options)
    assert seen_in_backward(torch_backend, tide, lambda: make(torch_backend)) == expected
    if not options and make is not parameters:
        assert_loaded(tide)
    assert_at_rest(tide)


def test_a_result_saved_by_its_own_node(torch_backend):
    """The saved output is connected to its node again: second derivatives go through it."""
    import torch

    tide = torch_backend.offload()
    leaf = torch_backend.leaf(5)
    with tide:
        y = leaf.exp().exp()
        inner = y.grad_fn.next_functions[0][0]
        saved = inner._saved_result
    assert saved.grad_fn is inner
    assert saved.requires_grad and not saved.is_leaf
    (grad,) = torch.autograd.grad(saved.sum(), leaf, retain_graph=True)
    assert torch.equal(grad, leaf.exp())
    saved = inner = y = grad = None
    assert_at_rest(tide)


def test_python_attributes_survive_only_on_the_tensor_itself(backend):
    """An offloaded tensor is a new object: attributes that were set on it do not come back."""
    seen = []
    tide = backend.offload()

    def program(a):
        x = backend.tensor(4)
        x.mark = "here"
        return backend.save(a, [x], restored=seen)

    backend.forward(program, [backend.leaf(1)], tide).gradients()
    assert not hasattr(seen.pop(), "mark")
    assert_loaded(tide)
    assert_at_rest(tide)
