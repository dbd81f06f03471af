"""MindSpore's cells for the HyperParallel layer: wrappers that hide themselves, calls around construct and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, nn
from mindspore.common.api import _pynative_executor

from ebbtide.config import OffloadConfig
from ebbtide.errors import UsageError
from ebbtide.framework import DeviceMemory, Framework
from ebbtide.mindspore import passes, resolve
from ebbtide.mindspore.compiling import compiled_as
from ebbtide.mindspore.watching import watch_construct
from ebbtide.modules import (
    Call,
    CheckpointWrapper,
    HiddenWrapper,
    SwapWrapper,
    renamed,
)
from ebbtide.resolved import Resolved

_WRAPPED = "_wrapped_cell"


def _plain_construct(self: Any, *args: Any, **kwargs: Any) -> Any:
    if self._function is None:
        return self._wrapped_cell(*args, **kwargs)
    return self._function(*args, **kwargs)


class Wrapper(HiddenWrapper, nn.Cell):
    """Runs ``call`` around a cell or function, and answers to the names of what it wraps. MindSpore compiles what it wraps
    alone."""

    _modules_dict = "_cells"
    _wrapped_name = _WRAPPED
    _owned_dicts = ("_params", "_buffers", "_cells")

    def __init__(self, wrapped: Callable[..., Any], call: Call) -> None:
        super().__init__(auto_prefix=False)
        self._function: Any = None
        if isinstance(wrapped, nn.Cell):
            self._cells[_WRAPPED] = wrapped  # parameters keep their own names
            self.set_train(wrapped.training)
        else:
            self._function = wrapped
        self._call = call

    @compiled_as(_plain_construct)
    def construct(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self.wrapped, args, kwargs)

    def update_parameters_name(self, prefix: str = "", recurse: bool = True) -> None:
        # Called when a cell becomes an attribute. In a model that was built before, the names are longer already: there
        # MindSpore would cut them, and so have many parameters of one name.
        before = [(weight, weight.name) for weight in self.get_parameters(expand=recurse)]
        super().update_parameters_name(prefix, recurse)
        for weight, name in before:
            if name.endswith(f".{weight.name}"):
                weight.name = name

    def cells_and_names(
        self, cells: set[nn.Cell] | None = None, name_prefix: str = ""
    ) -> Iterator[tuple[str, nn.Cell]]:
        # What is below is named as if the wrapper were not there, also by those above.
        cells = cells or set()
        if self in cells:
            return
        cells.add(self)
        yield name_prefix, self
        inner = self._cells.get(_WRAPPED)
        if inner is not None:
            yield from inner.cells_and_names(cells, name_prefix)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        renamed(state, f"{prefix}{_WRAPPED}.", prefix)
        return state

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        # What is below is loaded from this dictionary next, by its full name.
        if _WRAPPED in self._cells:
            renamed(state_dict, prefix, f"{prefix}{_WRAPPED}.")


class MindSporeSwapWrapper(SwapWrapper, Wrapper):
    pass


class MindSporeCheckpointWrapper(CheckpointWrapper, Wrapper):
    pass


_KINDS: dict[type, type[Wrapper]] = {
    SwapWrapper: MindSporeSwapWrapper,
    CheckpointWrapper: MindSporeCheckpointWrapper,
}


class MindSporeModules:
    """See :class:`ebbtide.modules.Modules`. In PyNative mode; policies for operations are not available."""

    memory: DeviceMemory | None = None

    def resolve(self, config: OffloadConfig) -> tuple[Framework, Resolved]:
        return resolve(config)

    def is_module(self, thing: object) -> bool:
        return isinstance(thing, nn.Cell)

    def is_tensor(self, thing: object) -> bool:
        return isinstance(thing, Tensor)

    def wrapper(self, kind: type[Any], wrapped: Callable[..., Any], call: Call) -> nn.Cell:
        if kind not in _KINDS:
            raise _no_exclusion()
        return _KINDS[kind](wrapped, call)

    def wrapped(self, module: nn.Cell) -> Callable[..., Any] | None:
        return module.wrapped if isinstance(module, Wrapper) else None

    def submodules(self, module: nn.Cell) -> Iterator[nn.Cell]:
        return (cell for _, cell in module.cells_and_names())

    def watch_forward(
        self, module: nn.Cell, before: Callable[[], None], after: Callable[[Any], None]
    ) -> Callable[[], None]:
        return watch_construct(module, before, after)

    def before_backward(self, output: Tensor, callback: Callable[[], None]) -> None:
        # A leaf lives on, and would call for every later graph.
        if not output._is_leaf and self.records():

            def hook(_: Tensor) -> None:
                callback()

            output.register_hook(hook)

    def in_backward(self) -> bool:
        return passes.is_running()

    def records(self) -> bool:
        return bool(_pynative_executor.grad_flag() and _pynative_executor.enable_grad())

    def capturing(self) -> bool:
        return bool(mindspore.get_context("mode") == mindspore.GRAPH_MODE)

    def break_graph(self, place: str) -> None:
        pass  # hooks say so themselves

    # --- recomputation

    checkpoint_options: frozenset[str] = frozenset()

    def checkpoint(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context_fn: Callable[[], Any] | None,
        early_stop: bool,
        options: dict[str, Any],
    ) -> Any:
        if context_fn is not None:
            self.require_policies()
        return mindspore.recompute(function, *args, use_reentrant=False, **kwargs)

    def checkpoint_captured(
        self, function: Callable[..., Any], args: Any, kwargs: Any, policy: Any
    ) -> Any:
        raise UsageError(
            "[checkpoint] MindSpore is in graph mode: call mindspore.set_context(mode=mindspore.PYNATIVE_MODE)"
        )

    def require_policies(self) -> None:
        raise _no_policies()

    def selective_contexts(
        self, policy: Any, swapping: Callable[[], Any], allow_cache_entry_mutation: bool
    ) -> tuple[Any, Any]:
        raise _no_policies()

    def is_selective(self, context: object) -> bool:
        return False

    def current_hooks(self) -> None:
        return None

    def excluded(
        self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
    ) -> AbstractContextManager[Any]:
        raise _no_exclusion()

    def random_state(self, arguments: object) -> Any:
        return mindspore.get_rng_state()

    def same_random_state(self, one: Any, other: Any) -> bool:
        return bool(np.array_equal(one.asnumpy(), other.asnumpy()))

    def set_random_state(self, state: Any) -> None:
        mindspore.set_rng_state(state)

    def requires_grad(self, tensor: Tensor) -> bool:
        return self.records()

    def as_result(self, tensor: Tensor, requires_grad: bool) -> Tensor:
        raise _no_policies()

    def host_memory(self, nbytes: int) -> Tensor:
        return Tensor.from_numpy(np.empty(nbytes, np.uint8))


def _no_exclusion() -> UsageError:
    return UsageError(
        "[checkpoint_exclude_wrapper] not available with MindSpore: wrap what is around it instead"
    )


def _no_policies() -> UsageError:
    return UsageError(
        "[checkpoint] policies for operations and context_fn= are not available with MindSpore: it has no hook around single "
        "operations; leave them out, or swap what is around them"
    )
