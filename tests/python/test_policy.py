"""A user policy's answer is understood by name, and nothing else passes."""

from __future__ import annotations

import enum

import pytest

from ebbtide import CheckpointPolicy, UsageError
from ebbtide.policy import wants_offload


class TorchPolicy(enum.Enum):
    """As torch.utils.checkpoint.CheckpointPolicy."""

    MUST_SAVE = 0
    PREFER_SAVE = 1
    MUST_RECOMPUTE = 2
    PREFER_RECOMPUTE = 3
    MUST_CPU_OFFLOAD = 4
    PREFER_CPU_OFFLOAD = 5


def test_members() -> None:
    assert [member.name for member in CheckpointPolicy] == [
        "MUST_SAVE",
        "PREFER_SAVE",
        "MUST_RECOMPUTE",
        "PREFER_RECOMPUTE",
        "MUST_SWAP",
    ]


@pytest.mark.parametrize(
    ("answer", "offload"),
    [
        (CheckpointPolicy.MUST_SWAP, True),
        (CheckpointPolicy.MUST_SAVE, False),
        (CheckpointPolicy.PREFER_SAVE, False),
        (TorchPolicy.MUST_CPU_OFFLOAD, True),
        (TorchPolicy.PREFER_CPU_OFFLOAD, True),
        (TorchPolicy.MUST_SAVE, False),
        (TorchPolicy.PREFER_SAVE, False),
    ],
)
def test_answers(answer: object, offload: bool) -> None:
    assert wants_offload(answer) is offload


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        (CheckpointPolicy.MUST_RECOMPUTE, "CheckpointPolicy.MUST_RECOMPUTE"),
        (CheckpointPolicy.PREFER_RECOMPUTE, "CheckpointPolicy.PREFER_RECOMPUTE"),
        (TorchPolicy.PREFER_RECOMPUTE, "TorchPolicy.PREFER_RECOMPUTE"),
        (None, "None"),
        (True, "True"),
        (False, "False"),
        (4, "4"),
        ("MUST_SWAP", "'MUST_SWAP'"),
        (CheckpointPolicy, "CheckpointPolicy"),
    ],
)
def test_other_answers_are_refused(answer: object, shown: str) -> None:
    with pytest.raises(UsageError) as caught:
        wants_offload(answer)
    text = str(caught.value)
    assert text.startswith("[OffloadConfig.policy]")
    assert shown in text
    for allowed in ("MUST_SWAP", "MUST_SAVE", "PREFER_SAVE"):
        assert allowed in text


def test_a_long_answer_is_shortened() -> None:
    with pytest.raises(UsageError) as caught:
        wants_offload("x" * 10_000)
    assert len(str(caught.value)) < 400


def test_torchs_own_enum() -> None:
    checkpoint = pytest.importorskip("torch.utils.checkpoint")
    for member in checkpoint.CheckpointPolicy:
        if "RECOMPUTE" in member.name:
            with pytest.raises(UsageError, match=member.name):
                wants_offload(member)
        else:
            assert wants_offload(member) is ("OFFLOAD" in member.name)
