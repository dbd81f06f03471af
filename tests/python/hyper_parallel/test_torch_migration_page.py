"""What docs/hyper_parallel.md shows is what runs, and its links lead somewhere."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide.hyper_parallel as hp

PAGE = Path(__file__).resolve().parents[3] / "docs" / "hyper_parallel.md"
TEXT = PAGE.read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
WIDTH = 32


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.perceptron = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        return x + self.perceptron(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_the_page_runs_from_top_to_bottom() -> None:
    """With a model, a batch, and nothing else that it does not show."""
    torch.manual_seed(0)
    given: dict[str, Any] = {
        "torch": torch,
        "model": Model(),
        "block": Layer().perceptron,
        "x": torch.randn(64, WIDTH),
        "y": torch.randn(64, WIDTH),
        "loss_fn": nn.functional.mse_loss,
        "micro_batches": torch.randn(5, 8, WIDTH).unbind(),
    }
    assert len(BLOCKS) >= 4
    for number, block in enumerate(BLOCKS):
        exec(compile(block, f"{PAGE.name}, block {number + 1}", "exec"), given)
    # The page's last forwards have no backward: they end with its variables, and are no other test's.
    given.clear()
    gc.collect()
    hp.synchronize()
    assert hp.stats().entries == 0


def test_every_name_in_the_table_exists() -> None:
    rows = TEXT.partition("## Names")[2].partition("\n\n`policy_fn`")[0].splitlines()
    left = [row.split("|")[1] for row in rows if row.startswith("|") and "not here" not in row]
    names = {
        name
        for cell in left
        for code in re.findall(r"`([^`]+)`", cell)
        for name in re.findall(r"^([A-Za-z_]\w*)\b(?!=)", code)
    }
    assert len(names) > 20
    places = (hp, hp.SwapManager(), hp.PinnedMemoryPool)
    assert not sorted(name for name in names if not any(hasattr(p, name) for p in places))


def test_every_public_name_is_on_the_page() -> None:
    own = {"synchronize"}  # HyperParallel has no such thing, and `report` waits for nothing
    assert not sorted(name for name in hp.__all__ if name not in TEXT and name not in own)


@pytest.mark.parametrize("target", re.findall(r"\]\((?!https?:)([^)#]+)\)", TEXT))
def test_every_link_leads_somewhere(target: str) -> None:
    assert (PAGE.parent / target).exists()
