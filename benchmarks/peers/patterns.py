"""Saved tensors that share storages."""

from __future__ import annotations

from functools import partial

import torch

from peers.cases import SIDE, Case, Save, Scenario, activation, simple


def _square(w: torch.Tensor) -> torch.Tensor:
    x = activation(w)
    return x * x


def _three_operations(w: torch.Tensor) -> torch.Tensor:
    x = activation(w)
    return x.sin() + x.cos() + x.abs()


def _softmax(scores: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    p = activation(scores).softmax(-1)
    return torch.matmul(p, values)


def _transposed(w: torch.Tensor) -> torch.Tensor:
    x = activation(w)
    return x @ x.t()


def _narrow(w: torch.Tensor) -> torch.Tensor:
    x = activation(w)
    quarter = SIDE // 4
    parts = (x[:quarter], x[SIDE // 2 - quarter // 2 : SIDE // 2 + quarter // 2], x[-quarter:])
    return torch.cat([part.sin() for part in parts])


def _chunks(w: torch.Tensor) -> torch.Tensor:
    q, k, v = activation(w).chunk(3, -1)
    return q * k * v


def _columns(w: torch.Tensor) -> torch.Tensor:
    x = activation(w)
    return x[:, ::2] * x[:, 1::2]


def _expand(w: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    scale = activation(row).expand(w.shape)
    return activation(w) * scale


def _overlapping(w: torch.Tensor) -> torch.Tensor:
    x = activation(w).detach()
    windows = x.view(-1).unfold(0, 64, 16)
    return Save.apply(w, 1, x, windows)


def _dtypes(w: torch.Tensor) -> torch.Tensor:
    x = activation(w).detach()
    return Save.apply(w, 1, x, x.view(torch.int32), x.view(torch.float16)[:, 64:])


def _late(w: torch.Tensor) -> torch.Tensor:
    x = activation(w)
    y = x.sin()
    rows = x[SIDE // 4 :]
    del x
    for _ in range(8):
        y = activation(y).sin()
    return y[SIDE // 4 :] + rows.cos()


def _conj(w: torch.Tensor) -> torch.Tensor:
    z = activation(w)
    return (z * z.conj()).real


def _make(program, *shapes, **options) -> partial[Scenario]:
    def make(device: str) -> Scenario:
        return simple(program, device, *shapes, **options)

    return make


_KIND = "aliases"
CASES = [
    Case(_KIND, "x * x", "one activation saved twice by one operation", _make(_square)),
    Case(_KIND, "three operations", "one activation saved by three", _make(_three_operations)),
    Case(
        _KIND,
        "4-D and 3-D",
        "attention weights saved by softmax and, reshaped, by the product with the values",
        _make(_softmax, (4, 4, 128, 128), (4, 4, 128, 32)),
    ),
    Case(_KIND, "x and x.t()", "a matrix times its transpose", _make(_transposed)),
    Case(
        _KIND,
        "prefix, middle, suffix",
        "three quarters of the rows, in three slices that do not touch",
        _make(_narrow),
    ),
    Case(
        _KIND,
        "q, k, v of one projection",
        "three chunks that interleave in the last dimension",
        _make(_chunks, (SIDE, 3 * SIDE)),
    ),
    Case(_KIND, "even and odd columns", "two views with steps", _make(_columns)),
    Case(
        _KIND,
        "expand",
        "a row saved as a matrix, with stride 0",
        _make(_expand, (64, 8192), (8192,)),
    ),
    Case(
        _KIND,
        "overlapping windows",
        "an activation and windows of it that show each element four times",
        _make(_overlapping),
    ),
    Case(_KIND, "three dtypes", "one storage read as three types", _make(_dtypes)),
    Case(
        _KIND,
        "late view",
        "the lower rows of an activation saved long after all of it was",
        _make(_late),
    ),
    Case(
        _KIND,
        "conjugate",
        "a complex activation and its lazy conjugate",
        _make(_conj, (SIDE, SIDE // 2), dtype=torch.complex64),
    ),
]
