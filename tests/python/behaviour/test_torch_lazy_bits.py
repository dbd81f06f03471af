"""Lazy conj and neg bits of PyTorch among other views of one storage, whichever is saved first."""

from __future__ import annotations

from itertools import permutations

import pytest
from checks import assert_moved, assert_same, compare, save_and_restore, write_shows
from support import assert_at_rest

COMPLEX = ("dtype", "complex64")

# Views of a float32 tensor of (4, 6): where its data type or its bits change, the in-place counter is still one.
CHAINS = {
    "real": [],
    "int32": [("dtype", "int32")],
    "float64": [("dtype", "float64")],
    "half": [("dtype", "float16")],
    "neg": [("neg",)],
    "neg int32": [("dtype", "int32"), ("neg",)],
    "complex": [COMPLEX],
    "conj": [COMPLEX, ("conj",)],
    "conj neg": [COMPLEX, ("conj",), ("neg",)],
    "neg complex": [COMPLEX, ("neg",)],
    "imag of conj": [COMPLEX, ("conj",), ("imag",)],
}


@pytest.mark.parametrize("first", CHAINS)
def test_any_view_may_be_saved_first(torch_backend, first):
    others = [name for name in CHAINS if name != first]
    for order in others, others[::-1]:

        def build(names=(first, *order)):
            x = torch_backend.tensor(4, 6)
            return [torch_backend.view(x, *CHAINS[name]) for name in names]

        stats, restored = save_and_restore(torch_backend, build)
        assert stats.storages == 1
        assert_moved(torch_backend, stats, 4 * 6 * 4)
        assert torch_backend.same_storage(*restored)
        assert write_shows(torch_backend, restored[0], restored[-1])


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_parts_of_a_complex_tensor_in_every_order(torch_backend, dtype):
    for order in permutations([[("real",)], [("imag",)], [("conj",)], []]):

        def build(order=order):
            x = torch_backend.tensor(5, 3, dtype=dtype)
            return [torch_backend.view(x, *chain) for chain in order]

        stats, restored = save_and_restore(torch_backend, build)
        assert_moved(torch_backend, stats, 15 * {"complex64": 8, "complex128": 16}[dtype])
        assert torch_backend.same_storage(*restored), order


def real_then_conjugate(x):
    base = x.sin()
    z = base.view(z_dtype(x))
    return (base * base).sum() + (z.conj() * z * z).real.sum()


def conjugate_then_real(x):
    base = x.sin()
    z = base.view(z_dtype(x))
    return (z.conj() * z * z).real.sum() + (base * base).sum()


def negative_imaginary_parts(x):
    base = x.sin()
    z = base.view(z_dtype(x))
    return (base.exp() * base).sum() + (z.conj().imag * z.real).sum() + (z.conj() * z).imag.sum()


def complex_base_real_view(x):
    import torch

    z = torch.complex(x.sin(), x.cos())
    real = torch.view_as_real(z)
    return (real * real).sum() + (z.conj() * z * z).real.sum() + (z.mH @ z).real.sum()


def z_dtype(x):
    return x.dtype.to_complex()


PROGRAMS = [
    real_then_conjugate,
    conjugate_then_real,
    negative_imaginary_parts,
    complex_base_real_view,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gradients_where_real_and_conjugate_views_are_saved(torch_backend, program, dtype):
    stats = compare(torch_backend, program, [torch_backend.leaf(6, 4, dtype=dtype)])
    assert stats.h2d_copies >= 1


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_second_derivatives_where_real_and_conjugate_views_are_saved(torch_backend, program):
    import torch

    x = torch_backend.leaf(6, 4, dtype="float64")

    def second(y):
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        return torch.autograd.grad((first * first).sum(), x)

    expected = second(program(x))
    tide = torch_backend.offload()
    with tide:
        y = program(x)
    found = second(y)
    assert_same(torch_backend, found, expected)
    assert tide.stats().h2d_copies >= 1
    del y
    assert_at_rest(tide)


def test_a_write_in_place_is_seen_through_every_view(torch_backend):
    import torch

    for order in permutations(["real", "conj", "imag of conj"]):
        written = order[1]
        x = torch_backend.leaf(4, 6, dtype="float32")
        tide = torch_backend.offload()
        with tide:
            base = x.sin()
            saved = [torch_backend.view(base, *CHAINS[name]) for name in order]
            total = sum((view * view).abs().sum() for view in saved)
        with torch.no_grad():
            torch_backend.view(base, *CHAINS[written]).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            total.backward()
        del base, saved, total
        assert_at_rest(tide)
