"""Bits depend on the number of threads: one for every test that loads torch."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

try:
    import torch
except ImportError:
    collect_ignore_glob = ["models/*", "torch/*"]
else:
    torch.set_num_threads(1)
