"""Pipeline schedules run in one process: what each rank computes in which order, and where its swaps go.

A rank is a list of actions. `run` takes an action of each rank in turn, as soon as what it needs is there, so several
micro-batches are in flight in every stage. Neutral: forward and backward are the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

FORWARD, BACKWARD = "forward", "backward"
LAUNCH_OFFLOAD, WAIT_OFFLOAD = "launch_offload", "wait_offload"
LAUNCH_LOAD, WAIT_LOAD = "launch_load", "wait_load"

MIN_SLOTS = 4  # compute slots between forward and backward that make a swap worth while


class Action(NamedTuple):
    kind: str
    stage: int
    micro_batch: int

    @property
    def group(self) -> str:
        return f"stage {self.stage}, micro-batch {self.micro_batch}"


def one_forward_one_backward(ranks: int, micro_batches: int) -> list[list[Action]]:
    """1F1B, one stage per rank."""
    return [
        _interleave(
            [Action(FORWARD, rank, i) for i in range(micro_batches)],
            [Action(BACKWARD, rank, i) for i in range(micro_batches)],
            warm_up=ranks - rank - 1,
        )
        for rank in range(ranks)
    ]


def interleaved(ranks: int, chunks: int, micro_batches: int) -> list[list[Action]]:
    """Interleaved 1F1B (Megatron-LM, arXiv:2104.04473): stage ``chunk * ranks + rank`` is on ``rank``.

    ``micro_batches`` is a multiple of ``ranks``.
    """

    def actions(kind: str, rank: int) -> list[Action]:
        found = []
        for i in range(micro_batches * chunks):
            chunk = i // ranks % chunks
            if kind == BACKWARD:
                chunk = chunks - 1 - chunk
            micro_batch = i // (ranks * chunks) * ranks + i % ranks
            found.append(Action(kind, chunk * ranks + rank, micro_batch))
        return found

    return [
        _interleave(
            actions(FORWARD, rank),
            actions(BACKWARD, rank),
            warm_up=2 * (ranks - rank - 1) + (chunks - 1) * ranks,
        )
        for rank in range(ranks)
    ]


def _interleave(
    forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int
) -> list[Action]:
    warm_up = min(warm_up, len(forwards))
    steady = zip(forwards[warm_up:], backwards, strict=False)
    order = [*forwards[:warm_up], *(action for pair in steady for action in pair)]
    return [*order, *backwards[len(forwards) - warm_up :]]


def with_swaps(actions: Sequence[Action]) -> list[Action]:
    """A rank's actions with its swaps: where at least ``MIN_SLOTS`` computations lie between forward and backward.

    The copy out runs beside the computation after the forward, the one back beside that before the backward.
    """
    slots = {action: slot for slot, action in enumerate(actions)}
    before: list[list[Action]] = [[] for _ in actions]
    after: list[list[Action]] = [[] for _ in actions]
    for forward, slot in slots.items():
        backward = slots[forward._replace(kind=BACKWARD)]
        if forward.kind != FORWARD or backward - slot - 1 < MIN_SLOTS:
            continue
        after[slot].append(forward._replace(kind=LAUNCH_OFFLOAD))
        after[slot + 1].append(forward._replace(kind=WAIT_OFFLOAD))
        before[backward - 1].append(forward._replace(kind=LAUNCH_LOAD))
        before[backward].append(forward._replace(kind=WAIT_LOAD))
    return [
        step
        for slot, action in enumerate(actions)
        for step in (*before[slot], action, *after[slot])
    ]


def run(
    ranks: Sequence[Sequence[Action]],
    stages: int,
    forward: Callable[[Action], None],
    backward: Callable[[Action], None],
    manager: Any = None,
) -> None:
    """Runs every action once; swaps are calls of ``manager``."""
    waiting = [list(actions) for actions in ranks]
    done: set[Action] = set()

    def ready(action: Action) -> bool:
        if action.kind == FORWARD:
            return action.stage == 0 or action._replace(stage=action.stage - 1) in done
        if action.kind == BACKWARD:
            last = action.stage == stages - 1
            return last or action._replace(stage=action.stage + 1) in done
        return True

    while any(waiting):
        taken = [actions.pop(0) for actions in waiting if actions and ready(actions[0])]
        if not taken:
            raise RuntimeError(f"no rank can go on: {[actions[:1] for actions in waiting]}")
        for action in taken:
            if action.kind == FORWARD:
                forward(action)
            elif action.kind == BACKWARD:
                backward(action)
            else:
                getattr(manager, action.kind)(action.group)
        done.update(taken)
