"""Bits depend on the number of threads: one for every test that loads torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# These tests are about the device of their backend, also on a machine with an accelerator.
on_tide = os.environ.get("EBBTIDE_TEST_BACKEND") == "torch-tide"
os.environ.setdefault("EBBTIDE_DEVICE", "tide" if on_tide else "cpu")

sys.path.insert(0, str(Path(__file__).parent))

try:
    import torch
except ImportError:
    collect_ignore_glob = [
        f"{folder}/*"
        for folder in ("behaviour", "benchmarks", "device", "hyper_parallel", "models", "torch")
    ]
    _left_out = "torch is not installed"
else:
    # A process is for one device. What needs none is run with the CPU's.
    collect_ignore_glob = ["test_*.py", "benchmarks/*"] if on_tide else ["device/*"]
    _left_out = f"with EBBTIDE_TEST_BACKEND={'torch-tide' if on_tide else 'torch-cpu'}"
    torch.set_num_threads(1)


def pytest_report_header() -> str:
    return f"{_left_out}, {', '.join(collect_ignore_glob)} are left out"
