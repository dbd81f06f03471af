"""Results of operations end with their graph: a pack hook that returned a node's own output would keep it for ever."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import mindspore as ms
import mindspore_memory as memory
import pytest
from mindspore import Tensor, mint, ops
from mindspore.graph.api import _pynative_executor as executor
from support import EXACT

import ebbtide.mindspore as ebb

# Each saves its output.
OPERATIONS: list[Callable[[Tensor], Tensor]] = [mint.exp, mint.tanh, mint.sigmoid, ops.relu]


class Mark:
    """User data of a tensor: ends with it."""


@pytest.mark.parametrize("options", [{"min_bytes": "1MiB"}, {"keep_last_bytes": "1MiB"}, {}])
@pytest.mark.parametrize("backward", [True, False])
def test_outputs_do_not_leak(backward: bool, options: dict[str, Any]) -> None:
    tide = ebb.offload(to="disk", **{**EXACT, **options})
    marks: list[weakref.ref[Mark]] = []

    def forward(x: Tensor) -> Tensor:
        with tide:
            for operation in OPERATIONS:
                x = operation(x)
                mark = Mark()
                marks.append(weakref.ref(mark))
                x._set_user_data("mark", mark)
        return x.sum()

    if backward:
        ms.grad(forward)(ops.ones((8,)))
    else:
        ms.vjp(forward, ops.ones((8,)))
        assert all(mark() is not None for mark in marks)
        executor.clear_res()  # MindSpore keeps the graph
    memory.end_backward(tide)
    assert [mark() for mark in marks] == [None] * len(OPERATIONS)
