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
    collect_ignore_glob = ["behaviour/*", "models/*", "torch/*"]
else:
    collect_ignore_glob = []
    torch.set_num_threads(1)


def pytest_report_header() -> str | None:
    if not collect_ignore_glob:
        return None
    return f"torch is not installed: {', '.join(collect_ignore_glob)} are left out"
