"""What the demo trains, for every mode the same."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

__all__ = ["FRAMEWORKS", "MODES", "Settings"]

# Mode and what it does. Ratios are to the first.
MODES = {
    "plain": "autograd as it is",
    "ebbtide": "with offload(model, to=...) of ebbtide.torch or ebbtide.mindspore",
    "save_on_cpu": "with torch.autograd.graph.save_on_cpu(); torch only",
}

FRAMEWORKS = {"torch": tuple(MODES), "mindspore": ("plain", "ebbtide")}
"""The modes of each."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Sizes of the model and of its training."""

    framework: str = "torch"
    steps: int = 4
    layers: int = 4
    width: int = 1024
    """Of the hidden states: a multiple of 64, the width of an attention head."""
    sequence: int = 1024
    """Tokens of a sample; a token is a byte."""
    batch: int = 2
    """Samples of a step."""
    to: str = "disk"
    """The tier, as ``offload`` takes it."""
    seed: int = 0
    threads: int = 0
    """Of the framework; 0 leaves its own choice."""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        return cls(**json.loads(text))
