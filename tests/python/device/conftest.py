"""The test device, built at first use; without a compiler that takes torch's headers these tests are skipped."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "device"))


@pytest.fixture(scope="session")
def tide_control() -> ModuleType:
    try:
        from tide_device import control
    except ImportError as error:
        pytest.skip(f"THE TEST DEVICE CANNOT BE BUILT HERE, nothing of it was tested: {error}")
    return control


@pytest.fixture(autouse=True)
def control(tide_control: ModuleType) -> Iterator[ModuleType]:
    """A device without faults, limits, races or queued work, before and after."""
    before = tide_control.options()
    tide_control.reset()
    yield tide_control
    tide_control.reset()
    tide_control.restore(before)
    for index in range(torch.accelerator.device_count()):
        torch.accelerator.synchronize(index)
