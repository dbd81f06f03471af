"""What the tests share, whatever the framework: what the process is for, the exact configuration, the at-rest check."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ebbtide.offload import Offload

# What the process tests: one framework on one device.
BACKEND = os.environ.get("EBBTIDE_TEST_BACKEND", "torch-cpu")
BACKENDS = ("torch-cpu", "torch-tide", "mindspore-cpu")
FRAMEWORK, _, DEVICE = BACKEND.partition("-")

disk_first = pytest.mark.skipif(
    DEVICE != "cpu", reason="from an accelerator, host memory comes before the disk"
)

# Nothing is held back: every storage is copied as soon as nobody else holds it, and copies are waited for.
EXACT: dict[str, Any] = {"min_bytes": 0, "keep_last_bytes": 0, "in_flight_bytes": 0}


@contextmanager
def no_garbage_collector() -> Iterator[None]:
    """At rest means at rest without the collector's help."""
    gc.collect()
    gc.freeze()  # modules and what pytest keeps: later collections need not look at them again
    gc.disable()
    yield
    gc.enable()


def assert_at_rest(tide: Offload) -> None:
    """Nothing is held any more; without a garbage collector run."""
    if FRAMEWORK == "torch":
        from torch_support import end_backward

        end_backward()
    else:
        from mindspore_memory import end_backward

        end_backward(tide)
    tide.synchronize()
    stats = tide.stats()
    held = (stats.entries, stats.device_bytes, stats.host_bytes, stats.disk_bytes, stats.parked)
    assert held == (0, 0, 0, 0, 0), stats


def anonymous_bytes() -> int:
    """Memory of this process that is no file's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    pytest.skip("this kernel does not tell a process's anonymous memory")


def assert_loaded(tide: Offload) -> None:
    """The test moved bytes: without this a test of restores could pass on live hits alone."""
    stats = tide.stats()
    assert stats.d2h_bytes > 0, stats
    assert stats.h2d_bytes > 0, stats
