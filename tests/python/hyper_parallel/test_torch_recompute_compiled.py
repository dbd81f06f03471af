"""Recomputed regions in compiled code: as without, or a refusal that names the option."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from harness import Hyper
from recompute_regions import (
    SAVE,
    SWAP,
    aten,
    leaf,
    make,
    products,
)
from support import DEVICE
from torch_support import assert_same_bits

import ebbtide.hyper_parallel as hp


@pytest.mark.parametrize(
    "options",
    [
        {"swap_inputs": True},
        {"group_swap": True},
        {"cpu_pool": object()},
        {"context_fn": torch_checkpoint.noop_context_fn},
        {"use_reentrant": False},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_a_compiler_cannot_take(
    hyper: Hyper, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = leaf(hyper)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(ValueError, match=next(iter(options))):
        hp.checkpoint(torch.exp, x, **options)


on_the_cpu = pytest.mark.skipif(DEVICE != "cpu", reason="nothing is compiled for the test device")


@on_the_cpu
@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize(
    "policy",
    [None, [aten.addmm.default], products(SAVE), products(SWAP)],
    ids=["none", "list", "save", "swap"],
)
@pytest.mark.filterwarnings("ignore")
def test_compiled(hyper: Hyper, policy: Any, fullgraph: bool) -> None:
    block, x = make(hyper, 1)[0], leaf(hyper)

    def function(x: torch.Tensor) -> torch.Tensor:
        return hp.checkpoint(block, x, policy_fn=policy).sin().sum()

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=fullgraph)
    found = torch.autograd.grad(compiled(x), x)
    assert_same_bits(found, torch.autograd.grad(function(x), x))


@on_the_cpu
def test_compiled_with_what_cannot_be(hyper: Hyper) -> None:
    block, x = make(hyper, 1)[0], leaf(hyper)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: hp.checkpoint(block, x, swap_inputs=True).sum(), backend="eager"
    )
    with pytest.raises(ValueError, match="swap_inputs= cannot be compiled"):
        compiled(x)
