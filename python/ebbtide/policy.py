"""What a user's policy may answer for one saved tensor, or for one operation of a checkpointed region."""

from __future__ import annotations

import enum
from typing import Any

from ebbtide.errors import UsageError
from ebbtide.sizes import SHOWN

__all__ = ["CheckpointPolicy", "OpPlan", "plan_of", "shown_answer", "wants_offload"]


class CheckpointPolicy(enum.Enum):
    """What becomes of a tensor or of an operation's result until backward.

    A policy for **tensors** (``OffloadConfig.policy``) answers a SAVE or a SWAP member. The
    RECOMPUTE members are for policies for **operations**, which activation checkpointing takes.
    """

    MUST_SAVE = "must_save"
    """Stays on the device."""
    PREFER_SAVE = "prefer_save"
    """Stays on the device, unless an enclosing policy decides otherwise."""
    MUST_RECOMPUTE = "must_recompute"
    """Is dropped and computed again in backward."""
    PREFER_RECOMPUTE = "prefer_recompute"
    """Is dropped and computed again, unless an enclosing policy decides otherwise."""
    MUST_SWAP = "must_swap"
    """Is offloaded and brought back for backward."""


# By name: torch's own enum is understood without importing torch.
_OFFLOADED = frozenset({"MUST_SWAP", "MUST_CPU_OFFLOAD", "PREFER_CPU_OFFLOAD"})
_KEPT = frozenset({"MUST_SAVE", "PREFER_SAVE"})
_RECOMPUTED = frozenset({"MUST_RECOMPUTE", "PREFER_RECOMPUTE"})


def wants_offload(answer: object) -> bool:
    """Whether ``answer``, returned by a user's ``policy(tensor)``, asks for offload.

    Members of any enum count by their name, so torch's ``CheckpointPolicy`` may be answered too.

    Raises:
        UsageError: ``answer`` is anything but a SAVE, SWAP or CPU_OFFLOAD member.
    """
    name = answer.name if isinstance(answer, enum.Enum) else None
    if name in _OFFLOADED:
        return True
    if name in _KEPT:
        return False
    raise UsageError(
        f"[OffloadConfig.policy] the policy answered {shown_answer(answer)} for a tensor: return "
        "CheckpointPolicy.MUST_SWAP to offload it, or MUST_SAVE or PREFER_SAVE to keep it"
    )


class OpPlan(enum.Enum):
    """What becomes of an operation's result until the recomputation of its region."""

    SAVE = enum.auto()
    SWAP = enum.auto()
    RECOMPUTE = enum.auto()


def plan_of(answer: object, op: Any) -> OpPlan:
    """What ``answer``, returned by a user's ``policy(ctx, op, ...)``, asks for; ``True`` saves, ``False`` recomputes.

    Members of any enum count by their name.

    Raises:
        UsageError: ``answer`` is anything else.
    """
    if answer is True:
        return OpPlan.SAVE
    if answer is False:
        return OpPlan.RECOMPUTE
    name = answer.name if isinstance(answer, enum.Enum) else None
    if name in _RECOMPUTED:
        return OpPlan.RECOMPUTE
    if name in _KEPT:
        return OpPlan.SAVE
    if name in _OFFLOADED:
        return OpPlan.SWAP
    raise UsageError(
        f"[policy_fn] the policy answered {shown_answer(answer)} for {op}: return a member of CheckpointPolicy, or a bool: "
        "True saves the operation's result, False recomputes it"
    )


def shown_answer(answer: object) -> str:
    """An answer of a policy, for texts of errors."""
    return (
        f"{type(answer).__name__}.{answer.name}"
        if isinstance(answer, enum.Enum)
        else SHOWN.repr(answer)
    )
