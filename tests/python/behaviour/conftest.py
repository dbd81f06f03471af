"""The backends that the behaviour tests run for."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

try:
    from torch_cpu import TorchBackend
except ImportError:
    collect_ignore_glob = ["test_*.py"]

# Prefetching must change no byte count: every test runs with and without.
_PREFETCH = {"prefetch": {}, "no-prefetch": {"prefetch_bytes": 0}}
_PARAMS = [(tier, prefetch) for tier in ("disk", "host") for prefetch in _PREFETCH]


@pytest.fixture(params=_PARAMS, ids=[f"torch-cpu-{tier}-{prefetch}" for tier, prefetch in _PARAMS])
def backend(request):
    """Every framework, device and tier."""
    tier, prefetch = request.param
    return TorchBackend(tier, **_PREFETCH[prefetch])


@pytest.fixture(params=_PARAMS, ids=[f"torch-cpu-{tier}-{prefetch}" for tier, prefetch in _PARAMS])
def torch_backend(request):
    """For what only PyTorch has; the same tests for each of its devices and tiers."""
    tier, prefetch = request.param
    return TorchBackend(tier, **_PREFETCH[prefetch])


@pytest.fixture(autouse=True)
def without_garbage_collection():
    """At rest means at rest without the collector's help."""
    gc.disable()
    yield
    gc.enable()
