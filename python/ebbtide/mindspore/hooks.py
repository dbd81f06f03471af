"""The context of MindSpore's saved-tensor hooks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import mindspore
from mindspore import Tensor, saved_tensors_hooks

from ebbtide.errors import UsageError
from ebbtide.mindspore import counters, passes


class SavedTensorHooks(AbstractContextManager[None]):
    """Runs what autograd saves on this thread through ``pack`` and ``unpack``. Raises UsageError in graph mode."""

    def __init__(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        self._hooks = saved_tensors_hooks(pack, unpack)

    def __enter__(self) -> None:
        if mindspore.get_context("mode") == mindspore.GRAPH_MODE:
            raise UsageError(
                "[offload] MindSpore is in graph mode, where nothing is saved tensor by tensor: call "
                "mindspore.set_context(mode=mindspore.PYNATIVE_MODE)"
            )
        passes.end_left_over()
        counters.drop_moved()
        counters.enter()
        self._hooks.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._hooks.__exit__(kind, error, traceback)
        finally:
            counters.leave()
