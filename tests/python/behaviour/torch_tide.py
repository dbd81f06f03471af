"""PyTorch on the test device as a backend of the behaviour tests."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_cpu import TorchBackend
from torch_support import device_races

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "device"))

from tide_device import control  # noqa: E402

_LACKS = {
    "host memory": "the host cannot describe or write to memory of a device",
    "nested tensors": "the test device has no strided nested tensors",
    "quantized tensors": "the test device has no quantized tensors",
    "sparse tensors": "the test device has no sparse tensors",
}


class TideBackend(TorchBackend):
    """Memory is poisoned when it is allocated and freed, and addresses are handed out again at once."""

    device = "tide"

    def __init__(self, tier: str, **options: Any) -> None:
        super().__init__(tier, **options)
        packed = "-packed" if options.get("group_swap") else ""
        self.name = f"torch-tide-{tier}{packed}"
        self._torn_copies = False

    def begin(self) -> None:
        control.reset()

    def end(self) -> None:
        races = device_races()
        if self._torn_copies:
            races = [race for race in races if "copy D2H" not in race or "free" in race]
        assert not races, races

    def require(self, what: str) -> None:
        if what in _LACKS:
            pytest.skip(_LACKS[what])

    def expect_torn_copies(self) -> None:
        self._torn_copies = True

    def settle(self) -> None:
        for index in range(torch.accelerator.device_count()):
            torch.accelerator.synchronize(index)
