"""Autocast's casts of weights are weights, whatever view of the weight was cast: they do not move."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from support import EXACT, assert_at_rest, assert_loaded
from torch_saved_bytes import count_saved
from torch_support import assert_same_bits

import ebbtide.torch as ebb

WIDTH = 8

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as_strided": lambda w: w.as_strided((4, WIDTH), (WIDTH, 1), WIDTH),
    "chunk": lambda w: w.chunk(2)[1],
    "diagonal": lambda w: w.view(2, 4, WIDTH).diagonal(),
    "expand": lambda w: w[None].expand(1, WIDTH, WIDTH),
    "itself": lambda w: w,
    "permute": lambda w: w.permute(1, 0),
    "select": lambda w: w.view(2, 4, WIDTH)[1],
    "slice": lambda w: w[2:],
    "split": lambda w: w.split(4)[1],
    "split into sizes": lambda w: w.split([2, 6])[1],
    "squeeze": lambda w: w[None].squeeze(),
    "squeeze one": lambda w: w[None].squeeze(0),
    "squeeze some": lambda w: w[None, None].squeeze((0, 1)),
    "t": lambda w: w.t(),
    "transpose": lambda w: w.transpose(0, 1),
    "unbind": lambda w: w.view(2, 4, WIDTH).unbind()[1],
    "unfold": lambda w: w.unfold(0, 4, 4)[0],
    "view": lambda w: w.view(4, 2 * WIDTH),
}


@pytest.mark.parametrize("given", [True, False], ids=["model", "no model"])
@pytest.mark.parametrize("view", VIEWS)
def test_casts_of_views_of_weights_stay(view: str, given: bool) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    weight = model.weight
    x = torch.randn(3, VIEWS[view](weight).shape[-2], requires_grad=True)

    def forward() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.matmul(x.sin(), VIEWS[view](weight)).exp().sum()

    tide = ebb.offload(model if given else None, to="disk", **EXACT)
    found = []
    for context in (nullcontext(), tide):
        with context:
            loss = forward()
        found.append([loss.detach(), *torch.autograd.grad(loss, (x, weight))])
        del loss
    assert_same_bits(found[1], found[0])

    saved, stats = count_saved(forward, [weight]), tide.stats()
    assert stats.kept["parameter_cast"] == saved.parameter_casts > 0
    assert stats.d2h_bytes == stats.h2d_bytes == sum(s.wanted_bytes for s in saved.free)
    assert_loaded(tide)
    assert_at_rest(tide)
