"""What the demo trains, for every mode the same."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

__all__ = ["DEFAULT_MODES", "MODES", "Settings"]

# Mode and what it does. Ratios are to the first.
MODES = {
    "plain": "autograd as it is",
    "ebbtide": "with ebbtide.torch.offload(model, to=...)",
    "save_on_cpu": "with torch.autograd.graph.save_on_cpu()",
}
DEFAULT_MODES = tuple(MODES)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Sizes of the model and of its training."""

    steps: int = 4
    layers: int = 4
    width: int = 1024
    """Of the hidden states: a multiple of 64, the width of an attention head."""
    sequence: int = 1024
    """Tokens of a sample; a token is a byte."""
    batch: int = 2
    """Samples of a step."""
    to: str = "disk"
    """The tier, as ``ebbtide.torch.offload`` takes it."""
    seed: int = 0
    threads: int = 0
    """Of torch; 0 leaves torch's own choice."""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        return cls(**json.loads(text))
