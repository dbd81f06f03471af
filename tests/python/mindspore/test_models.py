"""Models of `nn` cells train with the same bits, and move exactly what an independent count says."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import mindspore as ms
import mindspore_memory as memory
import pytest
from cells import KINDS, Size, loss_of, make_model
from mindspore import nn
from mindspore_saved_bytes import count_saved
from saved_bytes import SavedBytes
from support import EXACT, assert_at_rest

import ebbtide.mindspore as ebb
from ebbtide.report import Stats

STEPS = 3
LARGE = Size(layers=12, width=64, sequence=64, samples=2)
KIB = 1 << 10

models = pytest.mark.parametrize("name", KINDS)
_WAYS = {
    "disk": {"to": "disk"},
    "host, group_swap": {"to": "host", "group_swap": True},
    "host": {"to": "host"},
    "disk, group_swap": {"to": "disk", "group_swap": True},
}
all_ways = pytest.mark.parametrize("way", _WAYS.values(), ids=_WAYS)
two_ways = pytest.mark.parametrize("way", list(_WAYS.values())[:2], ids=list(_WAYS)[:2])
swapped = pytest.mark.parametrize("group_swap", [False, True], ids=["one by one", "group_swap"])


@dataclass(frozen=True)
class Step:
    loss: bytes
    gradients: list[bytes]
    parameters: list[bytes]
    """Moving averages among them, after the optimizer."""
    saved: SavedBytes | None
    stats: Stats | None


def train(name: str, size: Size, tide: Any = None, *, count: bool = False) -> list[Step]:
    """Three steps of momentum. ``count`` also counts what each forward saves; ``tide(model)`` makes the context."""
    model = make_model(name, size)
    weights = model.trainable_params()
    optimizer = nn.Momentum(weights, learning_rate=0.05, momentum=0.9)
    tide = tide(model) if tide is not None else None
    steps = []
    for number in range(STEPS):
        batch = KINDS[name].batch(size, number)

        def forward(batch: Any = batch) -> Any:
            with tide or nullcontext():
                return loss_of(model, batch)

        found: list[Any] = []
        differentiate = ms.value_and_grad(forward, None, weights)
        saved = None
        if count:
            weights_and_buffers = model.get_parameters()
            saved = count_saved(
                lambda run=differentiate, found=found: found.extend(run()),
                weights_and_buffers,
                batch,
            )
        else:
            if tide is not None:
                tide.reset_stats()
            found.extend(differentiate())
        stats = None if tide is None else tide.stats()
        loss, gradients = found
        optimizer(gradients)
        step = Step(
            _bits(loss),
            [_bits(gradient) for gradient in gradients],
            [_bits(parameter) for parameter in model.get_parameters()],
            saved,
            stats,
        )
        steps.append(step)
        if tide is not None:
            del loss, gradients, differentiate, forward
            found.clear()
            assert_at_rest(tide)
    return steps


def _bits(tensor: ms.Tensor) -> bytes:
    return memory.elements(tensor).tobytes()


@cache
def plain(name: str, size: Size) -> list[Step]:
    return train(name, size)


@cache
def counted(name: str, size: Size) -> list[Step]:
    return train(name, size, count=True)


def train_and_compare(name: str, size: Size, **options: Any) -> list[Step]:
    expected = plain(name, size)
    found = train(name, size, lambda model: ebb.offload(model, **options))
    assert len({step.loss for step in found}) == STEPS  # it does train
    for a, b in zip(found, expected, strict=True):
        assert a.loss == b.loss
        assert a.gradients == b.gradients
        assert a.parameters == b.parameters
    return found


def assert_exact(saved: SavedBytes, stats: Stats) -> None:
    """Each byte that nobody is known to hold went out once and came back once."""
    nbytes = sum(storage.wanted_bytes for storage in saved.free)
    assert {reason: n for reason, n in stats.kept.items() if n} == {"parameter": saved.parameters}
    assert stats.saved_tensors == saved.tensors
    assert stats.storages == len(saved.storages)
    assert stats.exact_duplicates == sum(s.tensors - s.views for s in saved.storages)
    assert stats.unique_bytes == saved.unique_bytes
    assert (stats.d2h_bytes, stats.h2d_bytes) == (nbytes, nbytes)
    assert stats.live_hits == sum(storage.tensors for storage in saved.held)
    assert nbytes > 0


@two_ways
@models
def test_all_that_can_be_freed_moves(name: str, way: dict[str, Any]) -> None:
    size = Size()
    steps = train_and_compare(name, size, **way, **EXACT)
    for step, expected in zip(steps, counted(name, size), strict=True):
        assert_exact(expected.saved, step.stats)


@swapped
@models
def test_defaults(name: str, group_swap: bool) -> None:
    """The default window holds all of a small model; a small one lets most of it go."""
    size = Size()
    # What is in flight when backward begins would stay for it.
    small = {"min_bytes": 0, "keep_last_bytes": 16 * KIB, "in_flight_bytes": 0}
    for window in ({}, small):
        steps = train_and_compare(name, size, group_swap=group_swap, **window)
        for step, expected in zip(steps, counted(name, size), strict=True):
            free = sum(storage.wanted_bytes for storage in expected.saved.free)
            assert step.stats.d2h_bytes == step.stats.h2d_bytes
            if window:
                # The newest stays, however large.
                most = max(storage.nbytes for storage in expected.saved.storages)
                assert free - max(most, 16 * KIB) <= step.stats.d2h_bytes < free
            else:
                assert step.stats.d2h_bytes == 0


@pytest.mark.slow
@all_ways
@models
def test_larger(name: str, way: dict[str, Any]) -> None:
    steps = train_and_compare(name, LARGE, **way, **EXACT)
    for step, expected in zip(steps, counted(name, LARGE), strict=True):
        assert_exact(expected.saved, step.stats)
