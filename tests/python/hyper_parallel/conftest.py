"""HyperParallel's interface, for the backend that ``EBBTIDE_TEST_BACKEND`` names, with group_swap off and on.

What need not be PyTorch is written against the behaviour tests' backends; `test_torch_*.py` is about PyTorch alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import BACKEND, no_garbage_collector

_HERE = Path(__file__).parent

sys.path.insert(0, str(_HERE))
sys.path.insert(1, str(_HERE.parent / "behaviour"))
sys.path.insert(2, str(_HERE.parent / "torch"))

collect_ignore_glob = (
    ["test_mindspore_*.py"] if BACKEND.startswith("torch") else ["test_torch_*.py"]
)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Counts are exact: nothing is held back, no copy is left running, nothing is loaded on a guess."""
    for name, value in {"KEEP_LAST_BYTES": 0, "IN_FLIGHT_BYTES": 0, "PREFETCH_BYTES": 0}.items():
        monkeypatch.setenv(f"EBBTIDE_{name}", str(value))
    backend = _make_backend()
    backend.begin()
    yield backend
    backend.end()


def _make_backend() -> Any:
    if BACKEND == "torch-cpu":
        from torch_cpu import TorchBackend as Backend
    elif BACKEND == "torch-tide":
        from torch_tide import TideBackend as Backend
    else:
        from mindspore_cpu import MindSporeBackend as Backend
    return Backend("host")


@pytest.fixture(params=[False, True], ids=["group_swap=off", "group_swap=on"])
def group_swap(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture
def hyper(backend: Any, group_swap: bool) -> Any:
    from harness import Hyper

    return Hyper(backend, group_swap)


@pytest.fixture(autouse=True)
def on_the_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """What is about PyTorch makes its tensors and modules on the backend's device."""
    if BACKEND != "torch-tide" or not request.path.name.startswith("test_torch_"):
        yield
        return
    import torch
    from torch_support import load_test_device

    load_test_device()
    with torch.device("tide"):
        yield


@pytest.fixture(autouse=True)
def without_garbage_collector() -> Iterator[None]:
    with no_garbage_collector():
        yield
