"""Selective checkpointing: each result saved, swapped or recomputed, on a plain session; equal to no checkpoint at all."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from selective_regions import (
    HIDDEN_BYTES,
    MATRIX,
    RECOMPUTE,
    ROWS,
    SAVE,
    SWAP,
    Region,
    Swaps,
    answering,
    aten,
    check,
    everything,
    mlp,
    run,
)
from support import assert_at_rest, assert_loaded
from torch.utils.checkpoint import checkpoint
from torch_support import assert_same_bits
from training import WIDTH, make_input, offload, raised_text

from ebbtide import UsageError
from ebbtide.torch.selective import selective_contexts


@pytest.mark.parametrize("answer", [SAVE, SWAP, RECOMPUTE, True, False])
@pytest.mark.parametrize("group_swap", [False, True])
def test_everything_alike(answer: Any, group_swap: bool) -> None:
    swaps = Swaps(group_swap=group_swap)
    check(swaps, mlp, everything(answer), make_input(ROWS), MATRIX())
    assert (swaps.stats().d2h_bytes > 0) == (answer is SWAP)
    assert_at_rest(swaps.tide)


def test_swapped_results_cross_once(swaps: Swaps) -> None:
    """Three products leave, each of them once, and nothing else does."""
    check(swaps, mlp, answering({aten.mm.default: SWAP}), make_input(ROWS), MATRIX())
    stats = swaps.stats()
    assert stats.d2h_bytes == stats.h2d_bytes == 3 * HIDDEN_BYTES
    assert (stats.d2h_copies, stats.h2d_copies, stats.storages) == (3, 3, 3)


def test_what_is_neither_recomputed_nor_run_again(swaps: Swaps) -> None:
    """Saved and swapped operations run once, recomputed ones twice."""
    calls: dict[Any, int] = {}

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            calls[func] = calls.get(func, 0) + 1
            return func(*args, **(kwargs or {}))

    def function(x: torch.Tensor) -> torch.Tensor:
        with Counting():
            return (x.sin() * x.cos()).tanh().exp()

    policy = answering({aten.sin.default: SWAP, aten.cos.default: SAVE})
    contexts = partial(selective_contexts, policy, swaps)
    x = make_input().requires_grad_()
    out = checkpoint(function, x, use_reentrant=False, context_fn=contexts, early_stop=False)
    out.sum().backward()
    ran = [calls[op] for op in (aten.tanh.default, aten.exp.default, aten.mul.Tensor)]
    assert ran == [2, 2, 2]
    del out


def test_aliases_of_one_storage_cross_once(swaps: Swaps) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        parts = y.t().chunk(2)
        return (parts[0] * 3).sin() + (parts[1].view(-1, ROWS) * y.t()[: WIDTH // 2]).cos()

    views = (aten.t.default, aten.split.Tensor, aten.view.default, aten.slice.Tensor)
    check(swaps, function, answering(dict.fromkeys((aten.exp.default, *views), SWAP)))
    stats = swaps.stats()
    assert stats.d2h_bytes == stats.h2d_bytes == HIDDEN_BYTES
    assert (stats.d2h_copies, stats.storages) == (1, 1)


def test_a_result_saved_by_hooks_too_is_one_entry() -> None:
    """The region's output is swapped in it, and saved behind it by an operation under the context."""
    tide = offload(to="host")
    x = make_input(ROWS).requires_grad_()

    class SameEpoch(Region):
        def __enter__(self) -> Region:
            self.saving = tide._entered.scopes[-1]._saving
            return self

        def __exit__(self, *error: object) -> None:
            pass

    swaps = Swaps()
    swaps.tide, swaps.session = tide, tide._session
    policy = answering({aten.exp.default: SWAP})
    contexts = partial(selective_contexts, policy, partial(SameEpoch, swaps))
    with tide:
        y = checkpoint(lambda x: x.sin().exp(), x, use_reentrant=False, context_fn=contexts)
        out = (y * 2).tanh().mul(y).sum()
        del y
    reference = torch.autograd.grad(_reference(x), x)
    out.backward()
    assert_same_bits([x.grad], reference)
    stats = tide.stats()
    assert stats.exact_duplicates >= 1
    assert stats.storages == 3  # the input, exp's result, tanh's result
    assert stats.d2h_bytes == stats.h2d_bytes == 2 * HIDDEN_BYTES  # the input is the caller's
    del out
    assert_at_rest(tide)


def _reference(x: torch.Tensor) -> torch.Tensor:
    y = x.sin().exp()
    return (y * 2).tanh().mul(y).sum()


def test_small_storages_cross_in_one_copy() -> None:
    swaps = Swaps(group_swap=True)
    tide = swaps.tide
    x = make_input(ROWS).requires_grad_()
    contexts = partial(selective_contexts, everything(SWAP), lambda: _Grouped(swaps))

    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            x = x.sin()
        return x

    out = checkpoint(function, x, use_reentrant=False, context_fn=contexts)
    out = out.clone()
    tide.synchronize()
    stats = tide.stats()
    assert stats.d2h_bytes == 4 * HIDDEN_BYTES  # the last result is held when the region ends
    assert stats.d2h_copies == 1
    out.sum().backward()
    expected = x.detach().clone().requires_grad_()
    function(expected).sum().backward()
    assert_same_bits([x.grad], [expected.grad])
    del out
    assert_at_rest(tide)


class _Grouped(Region):
    """The region as a group of its own."""

    def __enter__(self) -> Region:
        super().__enter__()
        self.saving.label = self.session.begin_group(self.saving.epoch, "region")
        return self

    def __exit__(self, *error: object) -> None:
        self.session.end_group()
        super().__exit__()


def test_a_list_names_what_is_saved(swaps: Swaps) -> None:
    check(swaps, mlp, [aten.mm.default], make_input(ROWS), MATRIX())
    assert swaps.stats().saved_tensors == 0


@pytest.mark.parametrize(
    ("policy", "kind", "text"),
    [
        ([aten.mm], UsageError, "aten.mm.default"),
        (["mm"], UsageError, "OpOverload"),
        (3, TypeError, "either a function or a list of ops"),
    ],
)
def test_policies_that_are_none(
    policy: Any, kind: type[Exception], text: str, swaps: Swaps
) -> None:
    with pytest.raises(kind, match=text):
        selective_contexts(policy, swaps)


@pytest.mark.parametrize("answer", [None, 1, "MUST_SAVE"])
def test_answers_that_are_none(answer: object, swaps: Swaps) -> None:
    contexts = partial(selective_contexts, everything(answer), swaps)
    x = make_input()
    with raised_text(UsageError) as text:
        run(torch.exp, x, contexts=contexts)
    assert "aten.exp.default" in text[0] and repr(answer) in text[0]


@pytest.mark.parametrize("name", ["MUST_CPU_OFFLOAD", "PREFER_CPU_OFFLOAD"])
def test_torchs_own_members_count_by_name(name: str, swaps: Swaps) -> None:
    answer = getattr(torch_checkpoint.CheckpointPolicy, name, None)
    if answer is None:
        pytest.skip("this torch has no such member")
    check(swaps, mlp, everything(answer), make_input(ROWS), MATRIX())
    assert_loaded(swaps.tide)


def test_what_a_policy_is_told(swaps: Swaps) -> None:
    told: list[Any] = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        told.append((ctx.is_recompute, op, ctx.op_output.shape, [a.shape for a in args]))
        return False

    check(swaps, torch.exp, policy)
    shape = (ROWS, WIDTH)
    assert told == [(False, aten.exp.default, shape, [shape])]
