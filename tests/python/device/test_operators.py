"""Operators give the CPU's bits, forward and backward, and find no race with themselves."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bits import assert_as_on_cpu


def floats(*sizes: int, grad: bool = True, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(sizes) + 3 * len(sizes))
    return torch.randn(*sizes, generator=generator).to(dtype).requires_grad_(grad)


def integers(top: int, *sizes: int) -> torch.Tensor:
    return torch.randint(top, sizes, generator=torch.Generator().manual_seed(top))


def doubled_in_place(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y[..., 0].mul_(2)
    y.t()[1].add_(1)
    y[y > 0.5] = 3
    return y


def into_out(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.zeros(4, 12, device=x.device)
    torch.exp(x, out=wide[:, 2:8])
    grown = torch.empty(0, device=x.device)
    torch.mul(x, 2, out=grown)
    return wide, grown


def written_through_views(x: torch.Tensor) -> torch.Tensor:
    x.view(-1)[3:9:2].zero_()
    x.t()[0].copy_(x[:, 1])
    x.diagonal().fill_(5)
    torch.as_strided(x, (3,), (7,), 1).neg_()
    return x


def optimized(kind: str, **options: Any) -> Callable[..., Any]:
    def steps(weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        parameter = torch.nn.Parameter(weight.clone())
        optimizer = getattr(torch.optim, kind)([parameter], lr=0.1, **options)
        for _ in range(3):
            parameter.grad = gradient * parameter.detach()
            optimizer.step()
        return parameter.detach()

    return steps


def second_derivative(x: torch.Tensor) -> torch.Tensor:
    (first,) = torch.autograd.grad((x.tanh() ** 3).sum(), x, create_graph=True)
    return first * x


CASES: dict[str, tuple[Any, ...]] = {
    "add": (torch.add, floats(4, 5), floats(5)),
    "scalar first": (lambda x: 2 - x / 3, floats(4, 5)),
    "cpu scalar tensor": (lambda x: x * torch.tensor(2.5), floats(4, 5)),
    "type promotion": (lambda x, y: x + y, floats(4, 5, grad=False), integers(9, 4, 5)),
    "bfloat16": (lambda x, y: x @ y + x.exp(), *[floats(5, 5, dtype=torch.bfloat16)] * 2),
    "half": (lambda x: F.silu(x) * x, floats(6, 6, dtype=torch.half)),
    "complex": (lambda x: (x.conj() * x.imag @ x.t()).abs(), floats(3, 3).detach().cfloat()),
    "conj matmul": (lambda x: x.conj() @ x.mH, torch.view_as_complex(floats(3, 3, 2, grad=False))),
    "matmul": (torch.matmul, floats(2, 3, 4, 5), floats(5, 6)),
    "bmm of transposed": (lambda x, y: x.transpose(1, 2) @ y, floats(2, 3, 4), floats(2, 3, 5)),
    "linear": (F.linear, floats(3, 4, 5), floats(6, 5), floats(6)),
    "addmm, addr, baddbmm": (
        lambda x, v: (
            torch.addmm(x, x, x),
            torch.addr(x, v, v),
            torch.baddbmm(x[None], x[None], x[None]),
        ),
        floats(4, 4),
        floats(4),
    ),
    "einsum": (lambda x, y: torch.einsum("bij,bkj->bik", x, y), floats(2, 3, 4), floats(2, 5, 4)),
    "exp, log, pow, sqrt": (
        lambda x: x.exp().log() + x.abs().sqrt() + x.abs() ** 1.7,
        floats(5, 5),
    ),
    "sum, mean, var": (lambda x: (x.sum(1), x.mean(), x.var(0), x.std(), x.norm()), floats(5, 7)),
    "max, sort, topk": (lambda x: (*x.max(1), *x.sort(1), *x.topk(2), x.argmin(0)), floats(5, 7)),
    "cumsum, cumprod, flip, roll": (
        lambda x: (x.cumsum(1), x.cumprod(0), x.flip(1), x.roll(2, 0)),
        floats(5, 7),
    ),
    "cat, stack, chunk": (
        lambda x, y: (torch.cat([x, y]), torch.stack([x, y], 1), *torch.cat([x, y], 1).chunk(3, 1)),
        floats(3, 4),
        floats(3, 4),
    ),
    "gather, scatter": (
        lambda x, i: (x.gather(1, i), x.scatter_add(1, i, x), x.scatter(1, i, 2.0)),
        floats(4, 5),
        integers(5, 4, 5),
    ),
    "index": (
        lambda x, i: (x[i], x[:, i], x.index_select(0, i), x[x > 0]),
        floats(6, 6),
        integers(6, 4),
    ),
    "index_put, index_add": (
        lambda x, i: (
            x.clone().index_put((i,), x[i] * 2, accumulate=True),
            x.index_add(0, i, x[: len(i)]),
        ),
        floats(6, 6),
        integers(6, 4),
    ),
    "where, masked_fill, tril": (
        lambda x: (torch.where(x > 0, x, -x), x.masked_fill(x > 1, 0), x.tril(), x.clamp(-1, 1)),
        floats(5, 5),
    ),
    "nonzero, unique": (lambda i: (i.nonzero(), i.unique(), torch.bincount(i)), integers(5, 20)),
    "views": (
        lambda x: (
            x.unfold(1, 3, 2) * 2,
            x.expand(2, 5, 7) * 3,
            x.permute(1, 0) + 1,
            x[1:, ::2] * x[1:, 1::2][:, :1],
        ),
        floats(5, 7),
    ),
    "dtype view": (lambda x: x.view(torch.int32) + 1, floats(4, 4, grad=False)),
    "repeat, pad": (
        lambda x: (x.repeat(2, 1), F.pad(x, (1, 2)), x.repeat_interleave(2, 0)),
        floats(3, 4),
    ),
    "relu, gelu, silu": (
        lambda x: (F.relu(x), F.gelu(x), F.gelu(x, approximate="tanh"), F.silu(x), F.mish(x)),
        floats(5, 7),
    ),
    "sigmoid, tanh, softplus": (
        lambda x: (x.sigmoid(), x.tanh(), F.softplus(x), F.elu(x), F.hardswish(x), F.leaky_relu(x)),
        floats(5, 7),
    ),
    "glu, prelu": (lambda x, w: (F.glu(x, -1), F.prelu(x, w)), floats(5, 8), floats(8)),
    "softmax": (lambda x: (x.softmax(-1), x.log_softmax(0), x.logsumexp(1)), floats(5, 7)),
    "layer_norm": (
        lambda x, w, b: F.layer_norm(x, (8,), w, b),
        floats(4, 6, 8),
        floats(8),
        floats(8),
    ),
    "rms_norm": (lambda x, w: F.rms_norm(x, (8,), w), floats(4, 6, 8), floats(8)),
    "group_norm": (lambda x, w: F.group_norm(x, 2, w, w), floats(2, 4, 5, 5), floats(4)),
    "batch_norm": (
        lambda x, w, m, v: F.batch_norm(x, m, v, w, w, training=True),
        floats(3, 4, 5, 5),
        floats(4),
        torch.zeros(4),
        torch.ones(4),
    ),
    "batch_norm, evaluating": (
        lambda x, m: F.batch_norm(x, m, m.abs() + 1),
        floats(3, 4, 5, 5),
        torch.ones(4),
    ),
    "conv1d": (
        lambda x, w, b: F.conv1d(x, w, b, padding=1),
        floats(2, 3, 9),
        floats(4, 3, 3),
        floats(4),
    ),
    "conv2d": (
        lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1),
        floats(2, 3, 8, 8),
        floats(4, 3, 3, 3),
        floats(4),
    ),
    "conv2d, depthwise": (
        lambda x, w: F.conv2d(x, w, groups=4),
        floats(2, 4, 8, 8),
        floats(4, 1, 3, 3),
    ),
    "conv2d, channels_last": (
        lambda x, w: F.conv2d(x.contiguous(memory_format=torch.channels_last), w),
        floats(2, 4, 8, 8),
        floats(4, 4, 3, 3),
    ),
    "conv3d": (F.conv3d, floats(1, 2, 5, 5, 5), floats(3, 2, 2, 2, 2)),
    "conv_transpose2d": (F.conv_transpose2d, floats(2, 3, 5, 5), floats(3, 4, 3, 3)),
    "pooling": (
        lambda x: (F.max_pool2d(x, 2), F.avg_pool2d(x, 2), F.adaptive_avg_pool2d(x, 3)),
        floats(2, 3, 8, 8),
    ),
    "interpolate": (
        lambda x: (F.interpolate(x, scale_factor=2), F.interpolate(x, size=5, mode="bilinear")),
        floats(2, 3, 4, 4),
    ),
    "embedding": (lambda i, w: F.embedding(i, w, padding_idx=1), integers(9, 4, 5), floats(9, 6)),
    "embedding_bag": (lambda i, w: F.embedding_bag(i, w), integers(9, 4, 5), floats(9, 6)),
    "cross_entropy": (
        lambda x, i: (F.cross_entropy(x, i), F.cross_entropy(x, i, label_smoothing=0.1)),
        floats(8, 5),
        integers(5, 8),
    ),
    "nll, mse, bce, kl, huber": (
        lambda x, y: (
            F.mse_loss(x, y),
            F.l1_loss(x, y),
            F.smooth_l1_loss(x, y),
            F.huber_loss(x, y),
            F.binary_cross_entropy_with_logits(x, y.sigmoid()),
            F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"),
        ),
        floats(6, 5),
        floats(6, 5, grad=False),
    ),
    "attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        *[floats(2, 3, 6, 4)] * 3,
    ),
    "dropout": (lambda x: (F.dropout(x, 0.3), F.dropout1d(x, 0.5)), floats(4, 5, 6)),
    "random numbers": (
        lambda x: (
            torch.rand_like(x),
            torch.randn_like(x),
            x.bernoulli(0.3),
            x.abs().multinomial(2),
        ),
        floats(5, 7, grad=False),
    ),
    "lstm cell": (
        lambda x, h, c, w, u: torch.lstm_cell(x, (h, c), w, u),
        floats(3, 4),
        floats(3, 5),
        floats(3, 5),
        floats(20, 4),
        floats(20, 5),
    ),
    "gru cell": (torch.gru_cell, floats(3, 4), floats(3, 5), floats(15, 4), floats(15, 5)),
    "weight_norm": (lambda v, g: torch._weight_norm(v, g, 0), floats(4, 5), floats(4, 1)),
    "linalg": (
        lambda x: (
            torch.linalg.inv(x + 5 * torch.eye(5, device=x.device)),
            torch.linalg.qr(x)[1],
            torch.det(x),
        ),
        floats(5, 5),
    ),
    "fft": (lambda x: torch.fft.rfft(x).abs(), floats(4, 8)),
    "foreach": (
        lambda x, y: (
            *torch._foreach_add([x, y], [y, x], alpha=2),
            *torch._foreach_norm([x, y]),
            *torch._foreach_lerp([x, y], [y, x], 0.3),
        ),
        floats(4, 5, grad=False),
        floats(4, 5, grad=False).neg(),
    ),
    "clip_grad_norm": (
        lambda x: torch.nn.utils.get_total_norm([x, x * 2], foreach=True),
        floats(4, 5, grad=False),
    ),
    "in place through views": (doubled_in_place, floats(4, 4)),
    "written through views": (written_through_views, floats(5, 5, grad=False)),
    "out=": (into_out, floats(4, 6, grad=False)),
    "second derivative": (second_derivative, floats(4, 5)),
    "SGD": (optimized("SGD", momentum=0.9), floats(4, 5, grad=False), floats(4, 5, grad=False)),
    "AdamW": (optimized("AdamW", foreach=False), *[floats(4, 5, grad=False)] * 2),
    "AdamW, foreach": (optimized("AdamW", foreach=True), *[floats(4, 5, grad=False)] * 2),
    "AdamW, fused": (optimized("AdamW", fused=True), *[floats(4, 5, grad=False)] * 2),
}


@pytest.mark.parametrize("name", CASES)
def test_operator_gives_the_bits_of_the_cpu(name: str, control: ModuleType) -> None:
    function, *inputs = CASES[name]
    # A case that is named twice in the list must still be two tensors.
    inputs = [value.detach().clone().requires_grad_(value.requires_grad) for value in inputs]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert_as_on_cpu(function, *inputs)
    assert control.races() == []


def test_mixed_devices_are_refused() -> None:
    x = torch.ones(3, device="tide")
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(3)
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(3, device="tide:1")


def test_overlapping_outputs_are_refused() -> None:
    x = torch.ones(6, device="tide")
    with pytest.raises(RuntimeError, match="single memory location"):
        torch.add(x[:-1], 1, out=x[1:])


def test_the_comparison_sees_one_bit() -> None:
    def off_by_one(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        if x.device.type == "tide":
            y.view(torch.int32)[0, 0] += 1
        return y

    with pytest.raises(AssertionError, match="differ"):
        assert_as_on_cpu(off_by_one, floats(3, 3, grad=False))
