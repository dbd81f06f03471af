"""What the HyperParallel layer needs from a framework's modules: one protocol, implemented once per framework.

"Module" stands for torch's ``nn.Module`` and MindSpore's ``Cell``; both are opaque here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from ebbtide.config import OffloadConfig
from ebbtide.framework import Bytes, DeviceMemory, Framework, Tensor
from ebbtide.resolved import Resolved

Module = Any
# What a wrapper does: called with what is wrapped, and the arguments. Copied and pickled with the wrapper.
Call = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class SwapWrapper:
    """A module whose saved tensors are offloaded; made by ``swap_wrapper``."""


class CheckpointWrapper:
    """A module that is recomputed in backward; made by ``checkpoint_wrapper``."""


class CheckpointExcludeWrapper:
    """A module that is not recomputed with what is around it; made by ``checkpoint_exclude_wrapper``."""


Wrapper = SwapWrapper | CheckpointWrapper | CheckpointExcludeWrapper


class HiddenWrapper:
    """A wrapper, in front of the framework's module class: answers to the names of the module that it wraps."""

    # Where the class keeps modules by name, the wrapped one's name among them, and all that a module owns by name.
    _modules_dict: str
    _wrapped_name: str
    _owned_dicts: tuple[str, ...]

    _function: Callable[..., Any]  # what is wrapped where it is no module

    def _inner(self) -> Module | None:
        return self.__dict__.get(self._modules_dict, {}).get(self._wrapped_name)

    @property
    def wrapped(self) -> Callable[..., Any]:
        inner: Any = self._inner()
        return self._function if inner is None else inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)  # type: ignore[misc]
        except AttributeError:
            inner = self._inner()
            if inner is None:
                raise
            return getattr(inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # A weight that is tied or replaced by its name is the inner module's.
        inner = self._inner()
        if inner is not None and any(name in getattr(inner, owned) for owned in self._owned_dicts):
            setattr(inner, name, value)
        else:
            super().__setattr__(name, value)

    def __getitem__(self, index: Any) -> Any:
        inner: Any = self.wrapped
        return inner[index]


class Modules(Protocol):
    """Modules of one framework. Any thread may call; nothing here blocks."""

    memory: DeviceMemory | None  # None: memory that nobody counts

    def resolve(self, config: OffloadConfig) -> tuple[Framework, Resolved]:
        """The framework for the configured device, and the options on this machine. Raises as ``offload`` does."""

    def is_module(self, thing: object) -> bool: ...

    def is_tensor(self, thing: object) -> bool: ...

    def wrapper(self, kind: type[Wrapper], wrapped: Callable[..., Any], call: Call) -> Module:
        """A module of this kind that runs ``call(wrapped, args, kwargs)`` and otherwise looks like what it wraps: the
        same names of parameters, buffers and state, the same attributes. A plain callable becomes a module too. Raises
        UsageError for a kind that the framework does not have."""

    def wrapped(self, module: Module) -> Callable[..., Any] | None:
        """What a wrapper wraps; None for every other module."""

    def submodules(self, module: Module) -> Iterator[Module]:
        """The module and all below it."""

    def watch_forward(
        self, module: Module, before: Callable[[], None], after: Callable[[Any], None]
    ) -> Callable[[], None]:
        """Calls ``before()`` in front of each forward of the module and ``after(output)`` behind it, with None where it
        raised, until the returned function is called. Nothing is called for what a compiler traces. A copied or
        pickled module is not watched."""

    def before_backward(self, output: Tensor, callback: Callable[[], None]) -> None:
        """Calls back, on the thread of backward, when the gradient of this result of a forward is known: before any node
        behind it runs. Never for a tensor that no graph ends in. The graph holds the callback."""

    def in_backward(self) -> bool:
        """Whether a backward runs on this thread."""

    def records(self) -> bool:
        """Whether autograd records what this thread computes."""

    def capturing(self) -> bool:
        """Whether a compiler traces this call."""

    def break_graph(self, place: str) -> None:
        """Where a compiler traces the call, ends its graph here: what comes next runs as plain Python. Where it may not
        end, the compiler's error names ``place`` and what to do."""

    # --- recomputation

    @property
    def checkpoint_options(self) -> frozenset[str]:
        """Names of the framework's own options, which its checkpoint takes beside the function's arguments."""

    def checkpoint(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context_fn: Callable[[], Any] | None,
        early_stop: bool,
        options: dict[str, Any],
    ) -> Any:
        """Runs the function now and, in the contexts' second one, again in backward; nothing it saves is kept. Hooks that
        are entered here are offered the tensors among ``args``."""

    def checkpoint_captured(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        policy: Any,
    ) -> Any:
        """The same where a compiler traces the call."""

    def require_policies(self) -> None:
        """Raises UsageError where the framework has no policies for operations."""

    def selective_contexts(
        self, policy: Any, swapping: Callable[[], Any], allow_cache_entry_mutation: bool
    ) -> tuple[Any, Any]:
        """The contexts of a region with a policy for operations. ``swapping()`` gives a context that is entered around the
        region's forward, with ``pack`` and ``unpack``. Raises UsageError where the framework has no such policies."""

    def is_selective(self, context: object) -> bool:
        """Whether this is the framework's own context of this kind."""

    def current_hooks(self) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
        """The pair of saved-tensor hooks that is entered on this thread, the innermost."""

    def excluded(
        self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
    ) -> AbstractContextManager[Any]:
        """A context inside a region: what autograd saves goes through these hooks, and policies for operations are not
        asked. Raises UsageError where the framework's own policies are, which cannot be kept from counting."""

    def random_state(self, arguments: object) -> Any:
        """Of the generators of the host and of the devices that tensors among these arguments are on."""

    def same_random_state(self, one: Any, other: Any) -> bool: ...

    def set_random_state(self, state: Any) -> None: ...

    def requires_grad(self, tensor: Tensor) -> bool: ...

    def as_result(self, tensor: Tensor, requires_grad: bool) -> Tensor:
        """The tensor as if an operation had computed it: without a graph, and recorded from here on if it is to be."""

    def host_memory(self, nbytes: int) -> Bytes:
        """Memory of the host that is not page-locked. Raises MemoryError."""


def tensors_in(tree: object, modules: Modules) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists, sets, mappings and dataclasses, each as often as it occurs."""
    if modules.is_tensor(tree):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors_in(value, modules)
    elif isinstance(tree, (tuple, list, set, frozenset)):
        for value in tree:
            yield from tensors_in(value, modules)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from tensors_in(getattr(tree, field.name, None), modules)


def name_of(function: object, modules: Modules) -> str:
    """What a module, or the module of a bound method, or another callable goes by in reports and errors."""
    owner = getattr(function, "__self__", function)
    if modules.is_module(owner):
        return type(owner).__name__
    return str(getattr(function, "__qualname__", type(function).__name__))


def renamed(names: dict[str, Any], prefix: str, new_prefix: str) -> None:
    """Gives what begins with ``prefix`` another beginning, in place and in the same order."""
    for name in list(names):
        if name.startswith(prefix):
            names[new_prefix + name[len(prefix) :]] = names.pop(name)
