"""As in the other tests, no garbage collector: what is let go of is let go of at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from mindspore_memory import drop_unfinished_graphs
from support import no_garbage_collector


@pytest.fixture(autouse=True)
def without_garbage_collector() -> Iterator[None]:
    with no_garbage_collector():
        yield
    drop_unfinished_graphs()
