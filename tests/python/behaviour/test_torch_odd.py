"""Tensors without bytes or without a storage, and those inside transforms, are left to PyTorch; never merged."""

from __future__ import annotations

import pytest
import torch
from checks import assert_moved, assert_same, compare, run
from support import assert_at_rest

FLOAT = 4


class Holder(torch.autograd.Function):
    """Saves one tensor of any kind and hands what comes back to `seen`."""

    @staticmethod
    def forward(ctx, anchor, tensor, seen):
        ctx.save_for_backward(tensor)
        ctx.seen = seen
        return anchor.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.seen.append(ctx.saved_tensors[0])
        return grad * 3, None, None


def pass_through(backend, make):
    """What comes back for `make()`; nothing is copied and the reason is counted."""
    anchor, seen = backend.leaf(2), []
    tide = backend.offload()
    with tide:
        output = Holder.apply(anchor, make(), seen)
    (grad,) = torch.autograd.grad(output, anchor, torch.ones_like(output))
    assert grad.tolist() == [3, 3]
    assert tide.stats().d2h_bytes == 0
    output = None
    assert_at_rest(tide)
    return seen.pop(), tide.stats()


def test_meta_tensors(torch_backend):
    found, stats = pass_through(torch_backend, lambda: torch.empty(5, 3, device="meta").t())
    assert (found.device.type, found.shape, found.stride()) == ("meta", (3, 5), (1, 3))
    assert stats.kept["device"] == 1


def test_fake_tensors(torch_backend):
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(5, 3)
    found, stats = pass_through(torch_backend, lambda: fake)
    assert isinstance(found, FakeTensor)
    assert found.shape == (5, 3)
    assert stats.kept["unsupported"] == 1


@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr"])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_sparse_tensors(torch_backend, layout):
    torch_backend.require("sparse tensors")
    dense = torch.eye(4)[:, :3].contiguous()
    make = dense.to_sparse if layout == "sparse_coo" else dense.to_sparse_csr
    found, stats = pass_through(torch_backend, make)
    assert found.layout == getattr(torch, layout)
    assert torch.equal(found.to_dense(), dense)
    assert stats.kept["unsupported"] == 1


def test_sparse_matrix_product(torch_backend):
    torch_backend.require("sparse tensors")
    sparse = torch.eye(4).to_sparse()

    def program(a):
        return torch.sparse.mm(sparse, a.exp()).exp()

    compare(torch_backend, program, [torch_backend.leaf(4, 3, dtype="float32")])


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors(torch_backend, layout):
    if layout is torch.strided:
        torch_backend.require("nested tensors")
    rows = [torch.arange(6.0).view(2, 3), torch.arange(12.0).view(4, 3)]
    nested = torch.nested.nested_tensor(rows, layout=layout, requires_grad=True)

    def gradients():
        padded = torch.nested.to_padded_tensor(nested.relu().relu(), 0.0)
        return torch.autograd.grad(padded.square().sum(), nested)[0].unbind()

    expected = gradients()
    tide = torch_backend.offload()
    with tide:
        found = gradients()
    assert_same(torch_backend, found, expected)
    assert tide.stats().kept["unsupported"] == 3
    assert_at_rest(tide)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized_tensors(torch_backend):
    torch_backend.require("quantized tensors")

    def make():
        return torch.quantize_per_tensor(torch.arange(4.0), 0.5, 0, torch.quint8)

    found, stats = pass_through(torch_backend, make)
    assert found.is_quantized
    assert found.dequantize().tolist() == [0, 1, 2, 3]
    assert stats.kept["unsupported"] == 1


class Named(torch.Tensor):
    pass


def test_subclasses(torch_backend):
    def make():
        return torch.arange(4.0).as_subclass(Named)

    found, stats = pass_through(torch_backend, make)
    assert type(found) is Named
    assert found.tolist() == [0, 1, 2, 3]
    assert stats.kept["unsupported"] == 1


class Wrapper(torch.Tensor):
    """Has no memory of its own: `data_ptr()` raises."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def unwrap(x):
            return x.inner if isinstance(x, cls) else x

        result = func(*(unwrap(a) for a in args), **(kwargs or {}))
        return cls(result) if isinstance(result, torch.Tensor) else result


def test_wrappers_without_memory(torch_backend):
    found, stats = pass_through(torch_backend, lambda: Wrapper(torch.arange(4.0)))
    assert type(found) is Wrapper
    assert found.inner.tolist() == [0, 1, 2, 3]
    assert stats.kept["unsupported"] == 1


@pytest.mark.parametrize("view", [(), ("t",), ("narrow", 0, 1, 2)], ids=str)
def test_zeros_without_memory(torch_backend, view):
    """What forward-mode derivatives have for tangents of zero."""

    def make():
        return torch_backend.view(torch._efficientzerotensor((5, 3)), *([view] if view else []))

    found, stats = pass_through(torch_backend, make)
    assert found._is_zerotensor()
    assert found.shape == make().shape
    assert stats.kept["unsupported"] == 1


def test_storages_that_were_emptied(torch_backend):
    """A view of a storage that somebody has resized to nothing, as sharded training does."""

    def make():
        x = torch.arange(4.0)
        x.untyped_storage().resize_(0)
        return x

    found, stats = pass_through(torch_backend, make)
    assert found.shape == (4,)
    assert found.untyped_storage().nbytes() == 0
    assert stats.kept["unsupported"] == 1


def test_two_emptied_storages_are_not_merged(torch_backend):
    anchor, seen = torch_backend.leaf(1), []
    first, second = torch.zeros(4), torch.ones(4)
    for tensor in (first, second):
        tensor.untyped_storage().resize_(0)
    tide = torch_backend.offload()
    with tide:
        output = Holder.apply(Holder.apply(anchor, first, seen), second, seen)
    second.untyped_storage().resize_(16)
    second.data.fill_(5)  # seen by no in-place counter
    output.sum().backward()
    assert seen[0].tolist() == [5, 5, 5, 5]
    assert seen[1].untyped_storage().nbytes() == 0
    seen.clear()
    output = None
    assert_at_rest(tide)


def test_a_zero_byte_storage_on_the_address_of_another(torch_backend):
    anchor = torch_backend.leaf(2)

    def program(anchor):
        x = torch_backend.tensor(8)
        empty = torch.empty(0).set_(x.untyped_storage(), 0, (0,), (1,))
        restored.clear()
        return torch_backend.save(anchor, [empty, x], restored=restored)

    restored = []
    stats = compare(torch_backend, program, [anchor])
    assert_moved(torch_backend, stats, 8 * FLOAT)
    assert [t.shape for t in restored] == [(0,), (8,)]


# --- functional transforms: PyTorch's own answer


def test_vmap_inside_the_context(torch_backend):
    def program(a):
        x = a.exp()
        return torch.vmap(lambda row: (row * row).sum())(x)

    compare(torch_backend, program, [torch_backend.leaf(4, 3)], loads=False)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev])
def test_function_transforms_answer_as_under_any_hooks(torch_backend, transform):
    def attempt():
        try:
            return transform(lambda x: (x.exp() * x).sum())(torch.arange(3.0))
        except RuntimeError as error:
            return str(error)

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        expected = attempt()
    tide = torch_backend.offload()
    with tide:
        found = attempt()
    if isinstance(expected, str):
        assert found == expected
    else:
        assert torch.equal(found, expected)
    assert_at_rest(tide)


def test_a_program_after_a_refused_transform(torch_backend):
    leaves = [torch_backend.leaf(3)]

    def program(a):
        return a.exp().exp()

    tide = torch_backend.offload()
    expected = run(torch_backend, program, leaves)
    with tide, pytest.raises(RuntimeError):
        torch.func.grad(lambda x: x.exp().sum())(torch.arange(3.0))
    assert_same(torch_backend, run(torch_backend, program, leaves, tide), expected)
    assert_at_rest(tide)
