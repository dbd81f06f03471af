"""Models come from configurations: nothing is downloaded. As in the other tests, no garbage collector."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from support import BACKEND, no_garbage_collector
from torch_support import assert_no_races, load_test_device

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported

# About CPU autocast, and about resident memory.
collect_ignore = (
    ["test_weight_casts.py", "test_resident_memory.py"] if BACKEND != "torch-cpu" else []
)


@pytest.fixture(autouse=True, scope="session")
def device() -> None:
    if BACKEND == "torch-tide":
        load_test_device()


@pytest.fixture(autouse=True)
def without_races() -> Iterator[None]:
    yield
    if BACKEND == "torch-tide":
        assert_no_races()


@pytest.fixture(autouse=True)
def without_garbage_collector() -> Iterator[None]:
    with no_garbage_collector():
        yield
