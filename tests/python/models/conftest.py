"""Models come from configurations: nothing is downloaded. As in the other tests, no garbage collector."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported


@pytest.fixture(autouse=True)
def without_garbage_collector() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()
