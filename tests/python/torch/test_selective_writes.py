"""Selective checkpointing: random operations, and writes to what is saved, swapped or recomputed."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from selective_regions import (
    ROWS,
    SAVE,
    SWAP,
    Function,
    Nth,
    Swaps,
    answering,
    aten,
    check,
    everything,
    run,
)
from training import make_input, raised_text

from ebbtide.errors import InplaceModificationError
from ebbtide.torch.selective import selective_contexts


def noisy(x: torch.Tensor) -> torch.Tensor:
    y = x * torch.rand_like(x)
    y = y.sin() * torch.rand_like(x)
    return torch.dropout(y, 0.5, True) * torch.rand_like(x)


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
