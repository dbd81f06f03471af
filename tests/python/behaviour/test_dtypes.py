"""Every dtype, dtype views, lazy conj and neg bits, and the address modulo 512 that kernels choose by."""

from __future__ import annotations

import pytest
from checks import assert_moved, assert_same, compare, save_and_restore, write_shows
from support import assert_at_rest

ITEMSIZE = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}


@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_every_dtype_comes_back_with_its_bits(backend, dtype):
    def build():
        x = backend.tensor(7, 6, dtype=dtype)
        return [x, backend.view(x, ("t",)), backend.view(x, ("narrow", 0, 2, 3))]

    stats, restored = save_and_restore(backend, build)
    assert_moved(backend, stats, 42 * ITEMSIZE[dtype])
    assert backend.same_storage(*restored)


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64", "float8_e5m2fnuz"])
def test_dtypes_that_few_know(backend, dtype):
    stats, _ = save_and_restore(backend, lambda: [backend.tensor(6, dtype=dtype)])
    assert stats.d2h_copies == stats.h2d_copies == 1


def test_all_dtypes_in_one_node(backend):
    def build():
        return [backend.tensor(5, dtype=dtype, seed=i) for i, dtype in enumerate(ITEMSIZE)]

    stats, _ = save_and_restore(backend, build)
    assert_moved(backend, stats, 5 * sum(ITEMSIZE.values()), copies=len(ITEMSIZE))


def test_dtype_views_of_one_storage(backend):
    def build():
        x = backend.tensor(8, 4)
        names = ["int32", "float16", "uint8", "complex64", "bfloat16"]
        return [x, *(backend.view(x, ("dtype", name)) for name in names)]

    stats, restored = save_and_restore(backend, build)
    assert (stats.storages, stats.exact_duplicates) == (1, 0)
    assert_moved(backend, stats, 8 * 4 * 4)
    assert backend.same_storage(*restored)
    assert write_shows(backend, restored[3], restored[0])


def test_dtypes_of_one_size_are_not_exact_duplicates(backend):
    def build():
        x = backend.tensor(8, dtype="float16")
        return [x, backend.view(x, ("dtype", "bfloat16")), backend.view(x, ("dtype", "int16"))]

    stats, _ = save_and_restore(backend, build)
    assert stats.exact_duplicates == 0
    assert_moved(backend, stats, 8 * 2)


def test_the_parts_of_a_complex_tensor(backend):
    def build():
        x = backend.tensor(6, 3, dtype="complex64")
        return [x, backend.view(x, ("real",)), backend.view(x, ("imag",))]

    stats, restored = save_and_restore(backend, build)
    assert_moved(backend, stats, 18 * 8)
    assert backend.same_storage(*restored)
    assert write_shows(backend, restored[2], restored[0])


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@pytest.mark.parametrize(
    "chain",
    [
        [("conj",)],
        [("neg",)],
        [("conj",), ("neg",)],
        [("conj",), ("imag",)],  # a real tensor with the neg bit
        [("conj",), ("t",), ("narrow", 0, 1, 2)],
    ],
    ids=str,
)
def test_lazy_bits(backend, dtype, chain):
    def build():
        x = backend.tensor(4, 3, dtype=dtype)
        return [backend.view(x, *chain), x]

    stats, (lazy, plain) = save_and_restore(backend, build)
    assert stats.exact_duplicates == 0
    assert_moved(backend, stats, 12 * ITEMSIZE[dtype])
    assert backend.same_storage(lazy, plain)
    assert backend.layout(lazy).conj or backend.layout(lazy).neg
    assert not (backend.layout(plain).conj or backend.layout(plain).neg)


def test_a_lazy_view_alone_does_not_keep_its_storage(backend):
    def build():
        return [backend.view(backend.tensor(64, dtype="complex64"), ("conj",))]

    stats, _ = save_and_restore(backend, build)
    assert_moved(backend, stats, 64 * 8)
    assert stats.freed_bytes == 64 * 8


def test_complex_gradients_through_conjugates(torch_backend):
    def program(a):
        x = a.exp()
        return (x.conj() * x).sin() @ x.mH

    stats = compare(torch_backend, program, [torch_backend.leaf(5, 5, dtype="complex64")])
    assert stats.storages >= 2


# --- where the restored bytes lie


@pytest.mark.parametrize("offset", [0, 1, 2, 3, 5, 16, 31, 127, 128, 129])
def test_a_view_keeps_its_address_modulo_512(backend, offset):
    """`save_and_restore` compares addresses."""

    def build():
        x = backend.tensor(400)
        return [backend.view(x, ("narrow", 0, offset, 200)), backend.view(x, ("select", 0, 399))]

    stats, _ = save_and_restore(backend, build)
    assert stats.d2h_bytes == stats.h2d_bytes == 201 * 4


@pytest.mark.parametrize("dtype", ["bool", "float16", "float64", "complex128"])
def test_storages_of_odd_sizes_keep_their_addresses_modulo_512(backend, dtype):
    def build():
        sizes = [1, 3, 17, 255, 256, 513]
        return [backend.tensor(size, dtype=dtype, seed=size) for size in sizes]

    save_and_restore(backend, build)


def test_an_attention_mask_that_is_a_narrow_view_of_wider_rows(backend):
    """Rows of 361 in an allocation of rows of 368: kernels want the alignment of the wider row."""

    def build():
        rows = backend.tensor(2, 1, 19, 368, dtype="float16")
        mask = backend.view(rows, ("narrow", 3, 0, 361))
        return [mask, backend.view(mask, ("expand", 2, 4, 19, 361))]

    stats, restored = save_and_restore(backend, build)
    assert [backend.layout(t).strides[2] for t in restored] == [368, 368]
    assert_moved(backend, stats, (2 * 19 * 368 - 7) * 2)


def test_attention_with_a_padded_mask(torch_backend):
    import torch

    def program(q, bias):
        x = q.exp()
        rows = torch.zeros(2, 1, 19, 368)
        mask = rows[..., :361].copy_(bias.detach())
        keys = torch.cat([x] * 19, dim=2)
        return torch.nn.functional.scaled_dot_product_attention(x, keys, keys, attn_mask=mask)

    leaves = [
        torch_backend.leaf(2, 2, 19, 8, dtype="float32"),
        torch_backend.leaf(2, 1, 19, 361, dtype="float32", seed=1),
    ]
    leaves[1] = leaves[1].detach()
    expected = torch.autograd.grad(program(*leaves).sum(), leaves[:1])
    tide = torch_backend.offload()
    with tide:
        output = program(*leaves)
    found = torch.autograd.grad(output.sum(), leaves[:1])
    assert_same(torch_backend, found, expected)
    assert tide.stats().h2d_bytes > 0
    del output
    assert_at_rest(tide)
