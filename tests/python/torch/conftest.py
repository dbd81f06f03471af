"""Everything here must come to rest without the garbage collector, so it is off while a test runs."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def without_garbage_collector() -> Iterator[None]:
    gc.collect()
    gc.freeze()  # modules and what pytest keeps: later collections need not look at them again
    gc.disable()
    yield
    gc.enable()
