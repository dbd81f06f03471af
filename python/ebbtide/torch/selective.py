"""Selective activation checkpointing: of each operation's result, whether it is saved, offloaded or computed again.

Two dispatch modes, one around the forward of a checkpointed region, one around its recomputation. Both see the
region's operations in the same order, and count them by operator: a result is found again by its number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_map_only

from ebbtide.errors import InplaceModificationError, UsageError
from ebbtide.policy import OpPlan, plan_of
from ebbtide.torch.weights import is_weight

Unpack = Callable[[Any], torch.Tensor]


class Swapping(AbstractContextManager[Any], Protocol):
    """Entered around the forward of a region, on its thread; takes what is offloaded and gives it back.

    ``unpack`` is read inside, and held as long as what ``pack`` returned.
    """

    @property
    def unpack(self) -> Unpack: ...

    def pack(self, tensor: torch.Tensor) -> Any: ...


# The checkpoint itself detaches what it saves, and asks about it, in forward more often than in recomputation.
_METADATA = (
    "dim",
    "is_contiguous",
    "is_non_overlapping_and_dense",
    "is_strides_like_format",
    "numel",
    "size",
    "storage_offset",
    "stride",
    "sym_numel",
    "sym_size",
    "sym_storage_offset",
    "sym_stride",
)
_IGNORED = frozenset(
    {torch.ops.aten.detach.default, torch.ops.prim.device.default}
    | {
        getattr(packet, overload)
        for packet in (getattr(torch.ops.aten, name, None) for name in _METADATA)
        if packet is not None
        for overload in ("default", "memory_format")
        if overload in packet.overloads()
    }
)

_MUTATED = (
    "Tensor cached during selective activation checkpoint has been mutated: a result of {op} was written to in place "
    "after it was {how}; {remedy}"
)
_DO_NOT_WRITE = "recompute the operation, or do not write to its result"
_SAVE_IT = "answer MUST_SAVE for it with allow_cache_entry_mutation=True"
_DIFFERENT = (
    "{op} was met in the recomputation of a checkpointed region {times} times, in its forward {known}: the region's "
    "operations depend on something that changed between forward and backward"
)
_TWICE = (
    "Trying to backward an extra time. You are only allowed to backward once on any region computed under selective "
    "activation checkpoint."
)


class OpContext:
    """What a policy is told besides the operation: its result, and that it is asked in forward, once."""

    def __init__(self, op_output: Any) -> None:
        self.is_recompute = False
        self.op_output = op_output


class _Saved:
    """A result that stays on the device."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.version = tensor._version

    def get(self, op: Any, allow_mutation: bool) -> torch.Tensor:
        if not allow_mutation and self.tensor._version != self.version:
            raise InplaceModificationError(
                _MUTATED.format(op=op, how="saved", remedy=_DO_NOT_WRITE)
            )
        return self.tensor


class _Swapped:
    """A result that is offloaded."""

    __slots__ = ("ticket", "unpack")

    def __init__(self, ticket: Any, unpack: Unpack) -> None:
        self.ticket = ticket
        self.unpack = unpack

    def get(self, op: Any, allow_mutation: bool) -> torch.Tensor:
        try:
            with _counters_shared():
                return self.unpack(self.ticket)
        except InplaceModificationError as error:
            raise InplaceModificationError(
                _MUTATED.format(op=op, how="offloaded", remedy=f"{_DO_NOT_WRITE}, or {_SAVE_IT}")
            ) from error


_RECOMPUTE = object()
_CONSUMED = object()


@dataclass
class _Results:
    """Of one region: by operator, in the order of the calls."""

    of: defaultdict[Any, list[Any]] = field(default_factory=lambda: defaultdict(list))
    # Some random operation runs again: those that do not must leave the generator where they left it in forward.
    draws_again: bool = False


class _Policy(TorchDispatchMode):
    """Passes on what runs while it is ``paused``."""

    def __init__(self) -> None:
        super().__init__()
        self.paused = False


class _Forward(_Policy):
    """Around the forward of a region."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, policy: Any, results: _Results, swapping: Callable[[], Swapping]) -> None:
        super().__init__()
        self._policy = policy
        self._results = results
        self._make_swapping = swapping
        self._swapping: Swapping | None = None

    def __enter__(self) -> _Forward:
        swapping = self._make_swapping()
        swapping.__enter__()
        self._swapping = swapping
        super().__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        swapping, self._swapping = self._swapping, None
        try:
            super().__exit__(kind, error, traceback)
        finally:
            if swapping is not None:
                swapping.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self.paused or _is_uncounted(func, args):
            return out
        plan = plan_of(self._policy(OpContext(out), func, *args, **kwargs), func)
        entry = _RECOMPUTE
        if plan is not OpPlan.RECOMPUTE:
            swaps = plan is OpPlan.SWAP
            source = _aliased(func, args)

            def keep(tensor: torch.Tensor) -> Any:
                alias = _alias(tensor, source)
                if not swaps or type(tensor) is not torch.Tensor:
                    return _Saved(alias)
                swapping = self._swapping
                assert swapping is not None
                with _counters_shared():
                    return _Swapped(swapping.pack(alias), swapping.unpack)

            entry = tree_map_only(torch.Tensor, keep, out)
        elif _is_random(func):
            self._results.draws_again = True
        self._results.of[func].append(entry)
        return out


class _Recomputation(_Policy):
    """Around the recomputation of a region."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, results: _Results, allow_mutation: bool) -> None:
        super().__init__()
        self._results = results
        self._allow_mutation = allow_mutation
        self._calls: defaultdict[Any, int] = defaultdict(int)
        self._outer: list[_Recomputation] = []

    def __enter__(self) -> _Recomputation:
        self._calls.clear()
        self._outer = [
            mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, _Recomputation)
        ]
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused or _is_uncounted(func, args):
            return func(*args, **kwargs)
        entry = self._take(func)
        if entry is _RECOMPUTE:
            return func(*args, **kwargs)
        out = tree_map_only(
            (_Saved, _Swapped), lambda saved: saved.get(func, self._allow_mutation), entry
        )
        writes = isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable
        if self._results.draws_again and _is_random(func):
            if writes:
                out = tree_map_only(torch.Tensor, torch.clone, out)
            func(*args, **kwargs)
        else:
            for mode in self._outer:
                mode._take(func)
        return _written(func, args, kwargs, out) if writes else out

    def _take(self, func: Any) -> Any:
        """What became of this call's result; it is given out once."""
        number = self._calls[func]
        self._calls[func] += 1
        entries = self._results.of.get(func, [])
        if number >= len(entries):
            raise RuntimeError(_DIFFERENT.format(op=func, times=number + 1, known=len(entries)))
        entry = entries[number]
        if entry is _CONSUMED:
            raise RuntimeError(_TWICE)
        if entry is not _RECOMPUTE:
            entries[number] = _CONSUMED
        return entry


def selective_contexts(
    policy_fn_or_list: Any,
    swapping: Callable[[], Swapping],
    allow_cache_entry_mutation: bool = False,
) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """The contexts of one checkpointed region, for its forward and its recomputation.

    The policy answers for each operation, in forward only; of a list, the operations in it are saved. Raises TypeError
    and UsageError for what is neither; UsageError, in the region's forward, for another answer. A region with
    contexts is recomputed once.
    """
    results = _Results()
    policy = _policy_of(policy_fn_or_list)
    return (
        _Forward(policy, results, swapping),
        _Recomputation(results, allow_cache_entry_mutation),
    )


def entered_policies() -> tuple[list[_Policy], list[TorchDispatchMode]]:
    """The contexts of regions that this thread is in, and other dispatch modes."""
    modes = _get_current_dispatch_mode_stack()
    policies = [mode for mode in modes if isinstance(mode, _Policy)]
    return policies, [mode for mode in modes if not isinstance(mode, _Policy)]


def _policy_of(policy_fn_or_list: Any) -> Any:
    if not isinstance(policy_fn_or_list, (list, tuple, set, frozenset)):
        if callable(policy_fn_or_list):
            return policy_fn_or_list
        raise TypeError(
            "[create_selective_checkpoint_contexts] policy_fn_or_list must be either a function or a list of ops, not "
            f"{type(policy_fn_or_list).__name__}"
        )
    for op in policy_fn_or_list:
        if not isinstance(op, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)):
            hint = ", such as torch.ops.aten.mm.default for torch.ops.aten.mm"
            raise UsageError(
                f"[create_selective_checkpoint_contexts] {op} is a {type(op).__name__}: a list names OpOverloads{hint}"
            )
    saved = frozenset(policy_fn_or_list)
    return lambda ctx, op, *args, **kwargs: op in saved


@contextmanager
def _counters_shared() -> Iterator[None]:
    """Below autograd, where modes run, aliases share no in-place counter unless asked to; and what is done here is no
    operation of the user's that other modes should count."""
    with (
        torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False),
        torch._C._DisableTorchDispatch(),
    ):
        yield


def _alias(tensor: torch.Tensor, source: torch.Tensor | None) -> torch.Tensor:
    """The tensor without a graph, on the in-place counter that it will have once autograd is done with it."""
    if type(tensor) is not torch.Tensor:
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            return tensor.detach()
    with _counters_shared():
        if source is None:
            return tensor.detach()
        alias = source.detach()
        alias.data = tensor.detach()
        return alias


def _aliased(func: Any, args: Any) -> torch.Tensor | None:
    """The argument whose view the operation returns: its counter becomes the view's."""
    if not getattr(func, "is_view", False):
        return None
    for argument, given in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and type(given) is torch.Tensor:
            return given
    return None


def _written(func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """An operation in place is its effect: what it wrote to must hold the saved result."""
    results = [out] if isinstance(out, torch.Tensor) else list(out or ())
    targets = [
        kwargs[argument.name] if argument.name in kwargs else args[place]
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None
        and argument.alias_info.is_write
        and (argument.name in kwargs or place < len(args))
    ]
    for target, result in zip(targets, results, strict=False):
        if target.untyped_storage()._cdata != result.untyped_storage()._cdata:
            target.copy_(result)
    return targets[0] if isinstance(out, torch.Tensor) and targets else out


def _is_uncounted(func: Any, args: Any) -> bool:
    """Casts of weights are always made again: autocast has some in its cache in forward and not in recomputation, which
    may run on another thread."""
    if func in _IGNORED:
        return True
    if func is not torch.ops.aten._to_copy.default or not args:
        return False
    source = args[0]
    return is_weight(source) or (source._base is not None and is_weight(source._base))


def _is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
