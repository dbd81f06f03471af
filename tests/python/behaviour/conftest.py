"""The backends that the behaviour tests run for: those of one framework and device, since a process is for one of them.

``EBBTIDE_TEST_BACKEND`` names it; default: "torch-cpu".
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest
from outcomes import note_unavailable
from support import BACKEND, FRAMEWORK

sys.path.insert(0, str(Path(__file__).parent))

# Prefetching must change no byte count: every test runs with and without.
_PREFETCH = {"prefetch": {}, "no-prefetch": {"prefetch_bytes": 0}}
_PACKED = {"": {}, "packed-": {"group_swap": True}}


def _backends():
    """Names and what makes the backend."""
    tiers = ("disk", "host")
    if BACKEND == "torch-cpu":
        from torch_cpu import TorchBackend as Backend
    elif BACKEND == "torch-tide":
        from torch_tide import TideBackend as Backend

        tiers = ("host",)
    else:
        from mindspore_cpu import MindSporeBackend as Backend
    for tier in tiers:
        for swap, swap_options in _PACKED.items():
            for prefetch, prefetch_options in _PREFETCH.items():
                options = swap_options | prefetch_options
                if swap and len(tiers) > 1 and (tier == "host") == bool(prefetch_options):
                    continue  # each tier packed once, and each way to prefetch
                yield (
                    f"{BACKEND}-{tier}-{swap}{prefetch}",
                    lambda t=tier, o=options: Backend(t, **o),
                )


try:
    _BACKENDS = dict(_backends())
except ImportError as error:
    print(f"BEHAVIOUR TESTS FOR {BACKEND} ARE SKIPPED, nothing of it was tested: {error}")
    note_unavailable(f"SKIPPED, nothing of it was tested: {error}")
    _BACKENDS = {}
    collect_ignore_glob = ["test_*.py"]

if FRAMEWORK != "torch":
    collect_ignore_glob = ["test_torch_*.py"]


@pytest.fixture(params=_BACKENDS)
def backend(request):
    """Every framework, device and tier."""
    backend = _BACKENDS[request.param]()
    backend.begin()
    yield backend
    backend.end()


@pytest.fixture
def torch_backend(request, backend):
    """For what only PyTorch has; tensors and modules are made on the backend's device."""
    if FRAMEWORK != "torch":
        from mindspore_lacks import TESTS

        pytest.skip(TESTS[request.node.originalname])
    import torch

    with torch.device(backend.device):
        yield backend


@pytest.fixture(autouse=True)
def without_garbage_collection():
    """At rest means at rest without the collector's help."""
    gc.disable()
    yield
    gc.enable()
