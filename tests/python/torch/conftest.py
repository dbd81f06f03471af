"""Everything here must come to rest without the garbage collector, so it is off while a test runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from support import DEVICE, assert_at_rest, no_garbage_collector
from torch_support import assert_no_races, load_test_device

# What is the same on every device. The others are about memory of the CPU, files under it, compilers and processes.
_ON_ANY_DEVICE = {
    f"test_{name}.py"
    for name in (
        "checkpoint",
        "context",
        "exceptions",
        "interrupts",
        "selective",
        "selective_regions",
        "selective_writes",
        "several_forwards",
        "threads",
        "transforms",
        "unobserved",
        "weights",
    )
}
_ALL = {path.name for path in Path(__file__).parent.glob("test_*.py")}
collect_ignore = [] if DEVICE == "cpu" else sorted(_ALL - _ON_ANY_DEVICE)


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tensors and modules are made on the device of ``EBBTIDE_TEST_BACKEND``; what it has seen fails the test."""
    if DEVICE == "cpu":
        yield
        return
    load_test_device()
    with nullcontext() if hasattr(request.module, "NAMES_ITS_DEVICE") else torch.device(DEVICE):
        yield
    assert_no_races()


@pytest.fixture(autouse=True)
def without_garbage_collector() -> Iterator[None]:
    with no_garbage_collector():
        yield


@pytest.fixture
def swaps() -> Iterator[Any]:
    """Where selective checkpointing sends results to; it must be at rest at the end."""
    from selective_regions import Swaps

    found = Swaps()
    yield found
    assert_at_rest(found.tide)
