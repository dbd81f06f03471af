"""PyTorch's modules for the HyperParallel layer: wrappers that hide themselves, hooks around forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from ebbtide.config import OffloadConfig
from ebbtide.framework import DeviceMemory, Framework
from ebbtide.hyper_parallel import runtime
from ebbtide.modules import (
    Call,
    CheckpointExcludeWrapper,
    CheckpointWrapper,
    HiddenWrapper,
    SwapWrapper,
    renamed,
    tensors_in,
)
from ebbtide.resolved import Resolved
from ebbtide.torch import recompute, resolve
from ebbtide.torch.blocks import graph_task_id
from ebbtide.torch.compiler import leave_alone
from ebbtide.torch.framework import is_functorch_wrapped
from ebbtide.torch.memory import ACCELERATOR_MEMORY

# torch's own tools (distributed checkpoints, FSDP) leave this name out of what they call things.
_WRAPPED = "_checkpoint_wrapped_module"


class Wrapper(HiddenWrapper, nn.Module):
    """Runs ``call`` around a module or function, and answers to the names of what it wraps."""

    _modules_dict = "_modules"
    _wrapped_name = _WRAPPED
    _owned_dicts = ("_parameters", "_buffers", "_modules")

    def __init__(self, wrapped: Callable[..., Any], call: Call) -> None:
        super().__init__()
        if isinstance(wrapped, nn.Module):
            self.add_module(_WRAPPED, wrapped)
            self.training = wrapped.training
        else:
            self._function = wrapped
        self._call = call
        self.register_load_state_dict_post_hook(_name_without_wrapper)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self.wrapped, args, kwargs)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        # What is below is named as if the wrapper were not there, also by those above.
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        inner = self._modules.get(_WRAPPED)
        if inner is not None:
            yield from inner.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        renamed(state, f"{prefix}{_WRAPPED}.", prefix)
        metadata = getattr(state, "_metadata", None)
        if metadata is not None:
            inner = metadata.pop(f"{prefix}{_WRAPPED}", None)
            if inner is not None:
                metadata[prefix[:-1]] = inner
            renamed(metadata, f"{prefix}{_WRAPPED}.", prefix)
        return state

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        # What is below is loaded from this dictionary next, by its full name.
        if _WRAPPED in self._modules:
            renamed(state_dict, prefix, f"{prefix}{_WRAPPED}.")


def _name_without_wrapper(module: nn.Module, incompatible: Any) -> None:
    for names in (incompatible.missing_keys, incompatible.unexpected_keys):
        names[:] = [name.replace(f"{_WRAPPED}.", "") for name in names]


class TorchSwapWrapper(SwapWrapper, Wrapper):
    pass


class TorchCheckpointWrapper(CheckpointWrapper, Wrapper):
    pass


class TorchCheckpointExcludeWrapper(CheckpointExcludeWrapper, Wrapper):
    pass


_KINDS: dict[type, type[Wrapper]] = {
    SwapWrapper: TorchSwapWrapper,
    CheckpointWrapper: TorchCheckpointWrapper,
    CheckpointExcludeWrapper: TorchCheckpointExcludeWrapper,
}


class TorchModules:
    """See :class:`ebbtide.modules.Modules`."""

    memory: DeviceMemory | None = ACCELERATOR_MEMORY

    def resolve(self, config: OffloadConfig) -> tuple[Framework, Resolved]:
        return resolve(config)

    def is_module(self, thing: object) -> bool:
        return isinstance(thing, nn.Module)

    def is_tensor(self, thing: object) -> bool:
        return isinstance(thing, torch.Tensor)

    def wrapper(self, kind: type[Any], wrapped: Callable[..., Any], call: Call) -> nn.Module:
        return _KINDS[kind](wrapped, call)

    def wrapped(self, module: nn.Module) -> Callable[..., Any] | None:
        return module.wrapped if isinstance(module, Wrapper) else None

    def submodules(self, module: nn.Module) -> Iterator[nn.Module]:
        return module.modules()

    def watch_forward(
        self, module: nn.Module, before: Callable[[], None], after: Callable[[Any], None]
    ) -> Callable[[], None]:
        handles = (
            module.register_forward_pre_hook(_Before(before), prepend=True),
            module.register_forward_hook(_After(after), always_call=True),
        )

        def remove() -> None:
            for handle in handles:
                handle.remove()

        return remove

    def require_policies(self) -> None:
        pass

    checkpoint_options = recompute.OPTIONS
    checkpoint = staticmethod(recompute.checkpoint)
    checkpoint_captured = staticmethod(recompute.checkpoint_captured)
    selective_contexts = staticmethod(recompute.selective_contexts)
    is_selective = staticmethod(recompute.is_selective)
    current_hooks = staticmethod(recompute.current_hooks)
    excluded = staticmethod(recompute.excluded)
    same_random_state = staticmethod(recompute.same_random_state)
    set_random_state = staticmethod(recompute.set_random_state)
    as_result = staticmethod(recompute.as_result)
    requires_grad = staticmethod(attrgetter("requires_grad"))

    def random_state(self, arguments: object) -> recompute.RandomState:
        return recompute.random_state(tuple(tensors_in(arguments, self)))

    def before_backward(self, output: torch.Tensor, callback: Callable[[], None]) -> None:
        # A leaf lives on, and would call for every later graph.
        if output.requires_grad and not output.is_leaf and not is_functorch_wrapped(output):
            output.register_hook(_ignoring_gradient(callback))

    def in_backward(self) -> bool:
        return graph_task_id() != -1

    def records(self) -> bool:
        return torch.is_grad_enabled()

    def capturing(self) -> bool:
        return torch.compiler.is_compiling()

    def break_graph(self, place: str) -> None:
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break(
                f"[{place}] hooks on saved tensors cannot be part of a compiled graph: leave out fullgraph=True, or call the "
                "compiled function inside instead"
            )

    def host_memory(self, nbytes: int) -> torch.Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        except RuntimeError as error:
            raise MemoryError(str(error)) from error


def _ignoring_gradient(callback: Callable[[], None]) -> Callable[[torch.Tensor], None]:
    def hook(_: torch.Tensor) -> None:
        callback()

    return hook


class _Before:
    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            self._callback()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _Before, (_nothing,)


class _After:
    def __init__(self, callback: Callable[[Any], None]) -> None:
        self._callback = callback

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self._callback(output)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _After, (_nothing,)


def _nothing(*args: Any) -> None:
    pass


leave_alone(
    (
        runtime.Scope.__enter__,
        runtime.Scope.__exit__,
        runtime.Scope.pack,
        runtime.Unpack.__call__,
    )
)
