"""What activation offloaders do to the same cases, on the test device: ``python -m peers``."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# The test device, and the count of what autograd saves that the tests of Ebbtide go by.
for _folder in ("tests/device", "tests/python"):
    if str(ROOT / _folder) not in sys.path:
        sys.path.append(str(ROOT / _folder))
