"""Selective checkpointing: each result saved, swapped or recomputed, on a plain session; equal to no checkpoint at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from support import DEVICE, assert_at_rest, assert_loaded
from torch.utils.checkpoint import checkpoint
from torch_support import assert_same_bits
from training import WIDTH, gradients, make_input, make_model, offload, raised_text, step

from ebbtide import CheckpointPolicy, UsageError
from ebbtide.errors import InplaceModificationError
from ebbtide.saved import Saving
from ebbtide.torch.selective import selective_contexts

aten = torch.ops.aten
ROWS = 16
HIDDEN_BYTES = ROWS * WIDTH * 4

SAVE, SWAP, RECOMPUTE = (
    CheckpointPolicy.MUST_SAVE,
    CheckpointPolicy.MUST_SWAP,
    CheckpointPolicy.MUST_RECOMPUTE,
)


class Swaps:
    """A session, and the epoch of each region's forward."""

    def __init__(self, **options: Any) -> None:
        self.tide = offload(to="host", **options)
        self.session = self.tide._session
        self.weights = self.tide._weights

    def __call__(self) -> _Region:
        return _Region(self)

    def stats(self) -> Any:
        return self.tide.stats()


class _Region:
    def __init__(self, swaps: Swaps) -> None:
        self.session = swaps.session
        self.saving = Saving(0, swaps.weights)
        self.unpack = swaps.session.unpack

    def __enter__(self) -> _Region:
        self.saving.epoch = self.session.begin_epoch()
        return self

    def __exit__(self, *error: object) -> None:
        self.session.end_epoch(self.saving.epoch)

    def pack(self, tensor: torch.Tensor) -> Any:
        return self.session.pack(tensor, self.saving)


@pytest.fixture
def swaps() -> Iterator[Swaps]:
    found = Swaps()
    yield found
    assert_at_rest(found.tide)


def answering(answers: dict[Any, Any], others: Any = RECOMPUTE) -> Callable[..., Any]:
    return lambda ctx, op, *args, **kwargs: answers.get(op, others)


def everything(answer: Any) -> Callable[..., Any]:
    return lambda ctx, op, *args, **kwargs: answer


Function = Callable[..., torch.Tensor]


def run(function: Function, *inputs: torch.Tensor, contexts: Any = None) -> list[torch.Tensor]:
    """The result and the gradients; checkpointed where contexts are given."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    torch.manual_seed(5)
    if contexts is None:
        out = function(*leaves)
    else:
        out = checkpoint(function, *leaves, use_reentrant=False, context_fn=contexts)
    out.square().sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def check(
    swaps: Swaps, function: Function, policy: Any, *inputs: torch.Tensor, **options: Any
) -> None:
    inputs = inputs or (make_input(ROWS),)
    expected = run(function, *inputs)
    contexts = partial(selective_contexts, policy, swaps, **options)
    assert_same_bits(run(function, *inputs, contexts=contexts), expected)


def mlp(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return ((x @ weight).tanh() @ weight.t()).exp() * ((x * 2).sigmoid() @ weight).sin()


MATRIX = partial(make_input, WIDTH, seed=2)


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

    class SameEpoch(_Region):
        def __enter__(self) -> _Region:
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


class _Grouped(_Region):
    """The region as a group of its own."""

    def __enter__(self) -> _Region:
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


# --- random operations


def noisy(x: torch.Tensor) -> torch.Tensor:
    y = x * torch.rand_like(x)
    y = y.sin() * torch.rand_like(x)
    return torch.dropout(y, 0.5, True) * torch.rand_like(x)


class Nth:
    """Answers one call of an operator otherwise than the rest."""

    def __init__(self, op: Any, nth: int, answer: Any) -> None:
        self.op, self.left, self.answer = op, nth, answer

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        if op is self.op:
            self.left -= 1
            if self.left == 0:
                return self.answer
        return RECOMPUTE


@pytest.mark.parametrize("answer", [SAVE, SWAP])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_one_random_result_kept_others_recomputed(nth: int, answer: Any, swaps: Swaps) -> None:
    """What is recomputed draws what it drew in forward, although the kept one is not computed again."""
    check(swaps, noisy, Nth(aten.rand_like.default, nth, answer))


@pytest.mark.parametrize("answer", [SAVE, SWAP])
def test_all_random_results_kept(answer: Any, swaps: Swaps) -> None:
    check(swaps, noisy, answering({aten.rand_like.default: answer}))


# --- in place


def in_place(x: torch.Tensor) -> torch.Tensor:
    return (x.sin().add_(1) * x).sin()


def view_of_written(x: torch.Tensor) -> torch.Tensor:
    base = x.sin()
    view = base.t()
    out = view * 2
    base.mul_(3)
    return (out * base.t()).sin() * view.exp()


def written_view(x: torch.Tensor) -> torch.Tensor:
    base = x.sin()
    view = base.t()
    view.mul_(3)
    return (x * base).sin() * view.t().exp()


@pytest.mark.parametrize("answer", [SAVE, SWAP])
@pytest.mark.parametrize(
    ("function", "op"),
    [
        (in_place, aten.sin.default),
        (in_place, aten.add_.Tensor),
        (view_of_written, aten.t.default),
        (view_of_written, aten.sin.default),
        (written_view, aten.t.default),
        (written_view, aten.sin.default),
    ],
)
def test_a_result_that_is_written_to(
    function: Function, op: Any, answer: Any, swaps: Swaps
) -> None:
    """torch's own error, also where the write goes through a view and torch does not see it."""
    with raised_text(InplaceModificationError) as text:
        run(
            function,
            make_input(ROWS),
            contexts=partial(selective_contexts, answering({op: answer}), swaps),
        )
    assert text[0].startswith(
        "Tensor cached during selective activation checkpoint has been mutated"
    )


@pytest.mark.parametrize("function", [in_place, view_of_written, written_view])
def test_writes_to_what_is_recomputed(function: Function, swaps: Swaps) -> None:
    check(swaps, function, answering({aten.exp.default: SWAP, aten.mul.Tensor: SAVE}))


@pytest.mark.parametrize(
    ("function", "policy"),
    [
        (in_place, everything(SAVE)),
        (in_place, answering({aten.add_.Tensor: SAVE})),
        (written_view, everything(SAVE)),
        (noisy, everything(SAVE)),
    ],
)
def test_writes_that_the_caller_allows(function: Function, policy: Any, swaps: Swaps) -> None:
    check(swaps, function, policy, allow_cache_entry_mutation=True)


def test_a_swapped_result_cannot_be_written_to_even_so(swaps: Swaps) -> None:
    contexts = partial(selective_contexts, everything(SWAP), swaps, allow_cache_entry_mutation=True)
    with raised_text(InplaceModificationError) as text:
        run(in_place, make_input(ROWS), contexts=contexts)
    assert "offloaded" in text[0]
    assert "answer MUST_SAVE for it with allow_cache_entry_mutation=True" in text[0]


# --- regions


def test_a_second_backward(swaps: Swaps) -> None:
    x = make_input().requires_grad_()
    contexts = partial(selective_contexts, everything(SWAP), swaps)
    out = checkpoint(mlp_of_one, x, use_reentrant=False, context_fn=contexts)
    out.sum().backward(retain_graph=True)
    with raised_text(RuntimeError) as text:
        out.sum().backward()
    assert text[0].startswith("Trying to backward an extra time")
    del out


def mlp_of_one(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * 2).exp()


def test_a_region_that_changes(swaps: Swaps) -> None:
    x = make_input().requires_grad_()
    flips: list[int] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        flips.append(1)
        return x.sin().exp() if len(flips) == 1 else x.cos().exp()

    contexts = partial(selective_contexts, everything(SAVE), swaps)
    out = checkpoint(function, x, use_reentrant=False, context_fn=contexts)
    with raised_text(RuntimeError) as text:
        out.sum().backward()
    assert "aten.cos.default" in text[0] and "changed between forward and backward" in text[0]
    del out


def test_no_backward_and_errors_leave_nothing(swaps: Swaps) -> None:
    x = make_input().requires_grad_()

    def failing(x: torch.Tensor) -> torch.Tensor:
        x.sin()
        raise KeyError("user")

    contexts = partial(selective_contexts, everything(SWAP), swaps)
    with raised_text(KeyError):
        checkpoint(failing, x, use_reentrant=False, context_fn=contexts)
    out = checkpoint(mlp_of_one, x, use_reentrant=False, context_fn=contexts)
    assert swaps.stats().entries > 0
    del out


@pytest.mark.parametrize(("inner", "outer"), [(SAVE, SWAP), (SWAP, SAVE), (SWAP, SWAP)])
def test_two_policies_on_one_region(inner: Any, outer: Any, swaps: Swaps) -> None:
    """Each keeps what it was told to; calls are numbered alike for both."""

    def stacked() -> tuple[Any, Any]:
        pairs = [
            selective_contexts(Nth(aten.mm.default, 2, outer), swaps),
            selective_contexts(Nth(aten.mm.default, 1, inner), swaps),
        ]
        stacks = ExitStack(), ExitStack()

        class Both:
            def __init__(self, index: int) -> None:
                self.index = index

            def __enter__(self) -> None:
                for pair in pairs:
                    stacks[self.index].enter_context(pair[self.index])

            def __exit__(self, *error: object) -> None:
                stacks[self.index].__exit__(*error)

        return Both(0), Both(1)

    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = (x @ weight).sin()
        return x

    inputs = make_input(ROWS), MATRIX()
    assert_same_bits(run(function, *inputs, contexts=stacked), run(function, *inputs))


@pytest.mark.parametrize("answer", [SAVE, SWAP])
def test_nested_regions(answer: Any, swaps: Swaps) -> None:
    contexts = partial(selective_contexts, answering({aten.mm.default: answer}), swaps)

    def inner(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (x @ weight).tanh() @ weight

    def outer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = checkpoint(inner, x.sin(), weight, use_reentrant=False, context_fn=contexts)
        return checkpoint(inner, y * x, weight, use_reentrant=False, context_fn=contexts)

    check(swaps, outer, answering({aten.mm.default: answer}), make_input(ROWS), MATRIX())


def test_weights_and_their_casts_stay(swaps: Swaps) -> None:
    model = make_model()
    x = make_input(ROWS)
    contexts = partial(selective_contexts, everything(SWAP), swaps)

    class Regions(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.model:
                x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
            return x

    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=dtype is torch.bfloat16):
            expected = step(model, x)
            assert_same_bits(step(Regions(), x), expected)
    assert all(gradient is not None for gradient in gradients(model))
    assert_loaded(swaps.tide)
    assert swaps.stats().unfreed_bytes == 0
