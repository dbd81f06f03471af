"""Recomputation together with offload: regions whose inputs leave the device, and policies for single operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from ebbtide.errors import UsageError
from ebbtide.hyper_parallel.pool import PinnedMemoryPool
from ebbtide.hyper_parallel.regions import Region
from ebbtide.hyper_parallel.runtime import Scope, modules_for, modules_to_wrap, saving
from ebbtide.hyper_parallel.swap import warn_if_nested
from ebbtide.modules import CheckpointWrapper, Module, Modules

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
ContextFn = Callable[[], Contexts]


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    swap_inputs: bool = False,
    policy_fn: Any = None,
    context_fn: ContextFn | None = None,
    group_swap: bool = False,
    cpu_pool: PinnedMemoryPool | None = None,
    early_stop: bool = True,
    **kwargs: Any,
) -> Any:
    """``function(*args, **kwargs)``, whose activations are not kept but computed again in backward.

    The framework's own non-reentrant checkpoint does it; its options (``preserve_rng_state``, ``determinism_check``,
    ``debug``) may be among ``kwargs``.

    Args:
        function: a module or any callable that does the same each time.
        swap_inputs: the tensors among the arguments, also in lists, tuples and dicts, leave the device until backward;
            those that somebody else holds stay.
        policy_fn: ``policy_fn(ctx, op, *args, **kwargs)`` says for each operation whether its result is saved, offloaded
            (``CheckpointPolicy.MUST_SWAP``) or recomputed, or a list of the operations to save; see
            ``create_selective_checkpoint_contexts``.
        context_fn: gives the contexts that the forward and the recomputation run in; those of ``policy_fn`` are entered
            inside of them.
        group_swap, cpu_pool: as for ``swap``.
        early_stop: the recomputation ends with the last tensor that backward needs.

    Raises ValueError where a compiler traces the call and ``swap_inputs``, ``group_swap``, ``cpu_pool`` or ``context_fn``
    is given; UsageError for ``use_reentrant=True``. ``policy_fn`` becomes torch's own there: MUST_SWAP saves, and a
    RuntimeWarning says so once.
    """
    modules = modules_for(function, args, kwargs)
    reentrant = kwargs.pop("use_reentrant", None)
    if modules.capturing():
        given = {
            "swap_inputs": swap_inputs,
            "context_fn": context_fn is not None,
            "group_swap": group_swap,
            "cpu_pool": cpu_pool is not None,
            "use_reentrant": reentrant is not None,
        }
        for name, is_given in given.items():
            if is_given:
                raise UsageError(
                    f"[checkpoint] {name}= cannot be compiled: leave it out, or call checkpoint outside of the compiled "
                    "function"
                )
        return modules.checkpoint_captured(function, args, kwargs, policy_fn)
    if reentrant:
        raise UsageError(
            "[checkpoint] use_reentrant=True: this checkpoint is the non-reentrant one; leave the argument out"
        )
    options = {name: kwargs.pop(name) for name in modules.checkpoint_options & kwargs.keys()}
    region = Region(modules, function, args, kwargs, flatten=swap_inputs and modules.records())
    swaps: dict[str, Any] = {"group_swap": group_swap, "cpu_pool": cpu_pool}
    if region.nested is None:
        if policy_fn is not None:

            def swapping() -> Scope:
                return saving(function, modules=modules, hooked=False, **swaps)

            context_fn = _with_policy(modules, context_fn, policy_fn, swapping)
        return modules.checkpoint(region, args, kwargs, context_fn, early_stop, options)
    del args, kwargs
    with saving(function, modules=modules, inputs_only=True, **swaps) as scope:
        if policy_fn is not None:
            context_fn = _with_policy(modules, context_fn, policy_fn, lambda: _Inside(scope))
        tensors = region.nested.take_tensors()
        return modules.checkpoint(region, tensors, {}, context_fn, early_stop, options)


class _Inside:
    """Swapping with a scope that is entered already."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope

    def __enter__(self) -> None:
        self.pack = self._scope.pack_inside
        self.unpack = self._scope.unpack

    def __exit__(self, *error: object) -> None:
        del self._scope, self.pack


def _with_policy(
    modules: Modules,
    context_fn: ContextFn | None,
    policy_fn: Any,
    swapping: Callable[[], Any],
) -> ContextFn:
    def selective() -> Contexts:
        return modules.selective_contexts(policy_fn, swapping, False)

    if context_fn is None:
        return selective

    def stacked() -> Contexts:
        outer, inner = context_fn(), selective()
        if modules.is_selective(outer[0]):
            raise UsageError(
                "[checkpoint] context_fn= gives selective contexts of the framework beside policy_fn=: neither would see all "
                "operations; make both with ebbtide.hyper_parallel.create_selective_checkpoint_contexts"
            )
        return _Stack((outer[0], inner[0])), _Stack((outer[1], inner[1]))

    return stacked


class _Stack:
    """Contexts as one, entered in their order. May be entered again and again."""

    def __init__(self, contexts: Iterable[AbstractContextManager[Any]]) -> None:
        self._contexts = tuple(contexts)
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for context in self._contexts:
                stack.enter_context(context)
            self._entered.append(stack.pop_all())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        return self._entered.pop().__exit__(kind, error, traceback)


def create_selective_checkpoint_contexts(
    policy_fn_or_list: Any,
    allow_cache_entry_mutation: bool = False,
    group_swap: bool = False,
    cpu_pool: PinnedMemoryPool | None = None,
) -> Contexts:
    """The contexts of one selectively checkpointed region, for ``context_fn`` (with ``functools.partial``) here or in the
    framework's own checkpoint.

    Args:
        policy_fn_or_list: called for each operation in forward, once, with a context (``is_recompute``, which is False,
            and ``op_output``), the operation and its arguments; answers a member of CheckpointPolicy, or a bool: True
            saves. Members of other enums count by name. Or a list of operations: those are saved.
        allow_cache_entry_mutation: saved results that are written to in place afterwards are handed out as they then
            are, as in torch. Without effect on offloaded ones: there is one copy, of what was saved, so backward raises
            either way. Answer MUST_SAVE for results that are written to.

    Saved results stay on the device, in whatever memory they share; offloaded ones leave it when nobody else holds them,
    each storage once. Operations whose results are kept do not run again, except that random ones do where others are
    recomputed, so that these draw the same numbers. Where a compiler traces the region, offloaded results are saved
    instead, and a RuntimeWarning says so once.

    Raises TypeError and UsageError (a ValueError) for what is no policy. Forward raises UsageError for another answer;
    backward raises RuntimeError where a kept result was written to in place, where the operations changed, and when
    it runs a second time.
    """
    modules = modules_for(policy_fn_or_list)
    swaps: dict[str, Any] = {"group_swap": group_swap, "cpu_pool": cpu_pool}

    def swapping() -> Scope:
        name = "create_selective_checkpoint_contexts"
        return saving(None, modules=modules, hooked=False, name=name, **swaps)

    return modules.selective_contexts(policy_fn_or_list, swapping, allow_cache_entry_mutation)


@dataclass(frozen=True)
class _Checkpointed:
    """What a checkpoint wrapper does in forward."""

    options: dict[str, Any] = field(default_factory=dict)

    def __call__(
        self, wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return checkpoint(wrapped, *args, **self.options, **kwargs)


def checkpoint_wrapper(module: Callable[..., Any], **checkpoint_kwargs: Any) -> Module:
    """The module with every forward under ``checkpoint``, called with ``checkpoint_kwargs``.

    Names of parameters, buffers and state are those of the module. Raises UsageError for ``policy_fn`` and ``context_fn``
    where the framework has no policies for operations.
    """
    modules = modules_to_wrap("checkpoint_wrapper", module)
    if any(checkpoint_kwargs.get(name) is not None for name in ("policy_fn", "context_fn")):
        modules.require_policies()
    warn_if_nested("checkpoint_wrapper", modules, module)
    return modules.wrapper(CheckpointWrapper, module, _Checkpointed(checkpoint_kwargs))
