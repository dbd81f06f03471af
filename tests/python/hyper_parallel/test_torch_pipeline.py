"""1F1B and interleaved 1F1B in one process: several micro-batches in flight in each stage, a group for each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from harness import Hyper
from pipeline import (
    BACKWARD,
    FORWARD,
    LAUNCH_OFFLOAD,
    MIN_SLOTS,
    Action,
    interleaved,
    one_forward_one_backward,
    run,
    with_swaps,
)
from support import DEVICE
from torch import nn
from torch_saved_bytes import count_saved
from torch_support import assert_same_bits
from training import make_input, make_model

import ebbtide.hyper_parallel as hp

MICRO_BATCHES = 8
SCHEDULES: dict[str, tuple[int, Callable[[], list[list[Action]]]]] = {
    "1F1B, 4 ranks": (4, lambda: one_forward_one_backward(4, MICRO_BATCHES)),
    "1F1B, 6 ranks": (6, lambda: one_forward_one_backward(6, MICRO_BATCHES)),
    "interleaved, 2 ranks of 2": (4, lambda: interleaved(2, 2, MICRO_BATCHES)),
    "interleaved, 4 ranks of 2": (8, lambda: interleaved(4, 2, MICRO_BATCHES)),
}

_SMALL = ("1F1B, 4 ranks", "interleaved, 2 ranks of 2")

schedules = pytest.mark.parametrize("schedule", SCHEDULES)
small_schedules = pytest.mark.parametrize(
    "schedule",
    [s if s in _SMALL else pytest.param(s, marks=pytest.mark.slow) for s in SCHEDULES],
)


class Pipeline:
    """Stages, and what is on its way between them."""

    def __init__(self, stages: list[nn.Module], swapped: bool) -> None:
        self.stages = stages
        self.manager = hp.SwapManager() if swapped else None
        self.inputs: dict[tuple[int, int], torch.Tensor] = {}
        self.outputs: dict[tuple[int, int], torch.Tensor] = {}
        self.losses: list[torch.Tensor] = []

    def run(self, ranks: list[list[Action]]) -> list[torch.Tensor | None]:
        """Losses and gradients."""
        if self.manager is not None:
            ranks = [with_swaps(actions) for actions in ranks]
        run(ranks, len(self.stages), self.forward, self.backward, self.manager)
        parameters = [p for stage in self.stages for p in stage.parameters()]
        found = [*self.losses, *(p.grad.clone() for p in parameters)]
        for parameter in parameters:
            parameter.grad = None
        self.losses.clear()
        return found

    def forward(self, action: Action) -> None:
        stage, micro_batch = action.stage, action.micro_batch
        if stage == 0:
            received = make_input(seed=micro_batch)
        else:
            received = self.outputs[stage - 1, micro_batch].detach()
        self.inputs[stage, micro_batch] = received.requires_grad_()
        if self.manager is None:
            output = self.stages[stage](received)
        else:
            with self.manager.group_context(action.group):
                output = self.stages[stage](received)
        if stage == len(self.stages) - 1:
            output = output.square().mean()
            self.losses.append(output.detach())
        self.outputs[stage, micro_batch] = output

    def backward(self, action: Action) -> None:
        key = action.stage, action.micro_batch
        behind = self.inputs.pop((action.stage + 1, action.micro_batch), None)
        self.outputs.pop(key).backward(None if behind is None else behind.grad)
        if action.stage == 0:
            del self.inputs[key]
        if self.manager is not None:
            self.manager.release_group_storage(action.group)


def make_stages(count: int) -> list[nn.Module]:
    blocks = list(make_model(depth=2 * count))
    return [nn.Sequential(*blocks[2 * i : 2 * i + 2]) for i in range(count)]


def wrap(stages: list[nn.Module], hyper: Hyper) -> list[nn.Module]:
    return [hp.swap_wrapper(stage, **hyper.options) for stage in stages]


@schedules
def test_every_rank_does_all_of_its_work_once(schedule: str) -> None:
    stages, make = SCHEDULES[schedule]
    counts = Counter(action for actions in make() for action in actions)
    kinds = [
        (kind, s, m)
        for kind in (FORWARD, BACKWARD)
        for s in range(stages)
        for m in range(MICRO_BATCHES)
    ]
    assert counts == Counter(Action(*kind) for kind in kinds)


@schedules
def test_swaps_are_where_at_least_four_computations_lie_between(schedule: str) -> None:
    for actions in SCHEDULES[schedule][1]():
        swapped = with_swaps(actions)
        launched = {action.group for action in swapped if action.kind == LAUNCH_OFFLOAD}
        for forward in actions:
            if forward.kind == FORWARD:
                between = (
                    actions.index(forward._replace(kind=BACKWARD)) - actions.index(forward) - 1
                )
                assert (forward.group in launched) == (between >= MIN_SLOTS)
        assert [a for a in swapped if a.kind in (FORWARD, BACKWARD)] == actions


def free_bytes(stage: nn.Module) -> int:
    """What one forward saves and nobody else holds; input and output are the pipeline's."""
    received = make_input().requires_grad_()
    saved = count_saved(lambda: stage(received), stage.parameters())
    return sum(storage.wanted_bytes for storage in saved.free)


@small_schedules
def test_equal_and_exactly_the_launched_groups_moved(schedule: str, hyper: Hyper) -> None:
    count, make = SCHEDULES[schedule]
    ranks = make()
    stages = make_stages(count)
    expected = Pipeline(stages, swapped=False).run(ranks)
    pipeline = Pipeline(wrap(stages, hyper), swapped=True)
    launched = Counter(
        action.stage
        for actions in ranks
        for action in with_swaps(actions)
        if action.kind == LAUNCH_OFFLOAD
    )
    assert launched
    nbytes = sum(groups * free_bytes(stages[stage]) for stage, groups in launched.items())
    for steps in (1, 2):
        assert_same_bits(pipeline.run(ranks), expected)
        stats = hyper.stats()
        moved = steps * nbytes
        assert (stats.d2h_bytes, stats.h2d_bytes) == (moved, moved), f"{moved=}\n{hp.report()}"
        hyper.assert_at_rest()


@pytest.mark.skipif(DEVICE == "cpu", reason="the CPU's allocator does not tell its peak")
@small_schedules
def test_the_peak_falls(schedule: str, hyper: Hyper) -> None:
    count, make = SCHEDULES[schedule]
    ranks = make()
    stages = make_stages(count)

    def peak(pipeline: Pipeline) -> int:
        pipeline.run(ranks)
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        pipeline.run(ranks)
        return torch.accelerator.max_memory_allocated() - before

    plain = peak(Pipeline(stages, swapped=False))
    swapped = peak(Pipeline(wrap(stages, hyper), swapped=True))
    # Of 4 ranks only the first two have forwards and backwards that are far enough apart.
    assert swapped < (plain if schedule == "1F1B, 4 ranks" else 0.8 * plain)
