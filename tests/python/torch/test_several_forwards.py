"""One storage saved in several forwards before a backward: Ebbtide's own references are no holders."""

from __future__ import annotations

import torch
from support import EXACT, assert_at_rest, assert_loaded
from torch_support import assert_same_bits

import ebbtide.torch as ebb


def test_a_storage_saved_in_two_forwards_is_let_go_when_only_ebbtide_holds_it() -> None:
    weights = [torch.randn(64, requires_grad=True) for _ in range(2)]
    tide = ebb.offload(**EXACT, prefetch_bytes=0)
    features = torch.randn(64).mul(2)
    expected = features.clone()
    losses = []
    for weight in weights:
        with tide:
            losses.append((weight * features).sum())
    assert tide.stats().d2h_bytes == 0, "held by this test"
    del features
    with tide:
        pass  # looks at what is parked
    tide.synchronize()
    assert tide.stats().d2h_bytes == 2 * 64 * 4, "one copy for each forward"
    assert tide.stats().device_bytes == 0
    for loss in losses:
        loss.backward()
    assert_loaded(tide)
    assert_same_bits([weight.grad for weight in weights], [expected, expected])
    del loss, losses
    assert_at_rest(tide)
