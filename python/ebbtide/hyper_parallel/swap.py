"""Offload without recomputation: around a call, a module, or for tensors by name."""

from __future__ import annotations

import enum
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from ebbtide.errors import UsageError
from ebbtide.framework import Tensor
from ebbtide.hyper_parallel.groups import current
from ebbtide.hyper_parallel.naming import name_in_group
from ebbtide.hyper_parallel.pool import PinnedMemoryPool
from ebbtide.hyper_parallel.runtime import modules_for, modules_to_wrap, saving
from ebbtide.modules import CheckpointWrapper, Module, Modules, SwapWrapper
from ebbtide.policy import CheckpointPolicy, shown_answer

PolicyFn = Callable[[Tensor], Any]
_T = TypeVar("_T")


class PolicyError(UsageError, RuntimeError):
    """A policy for tensors answered something else than MUST_SAVE or MUST_SWAP."""


def swap(
    function: Callable[..., Any],
    *args: Any,
    policy_fn: PolicyFn | None = None,
    group_swap: bool = False,
    cpu_pool: PinnedMemoryPool | None = None,
    **kwargs: Any,
) -> Any:
    """``function(*args, **kwargs)``; what autograd saves in it leaves the device and comes back for backward.

    Args:
        function: a module or any callable. Parameters and buffers of a module stay on the device.
        policy_fn: ``policy_fn(tensor)`` answers ``CheckpointPolicy.MUST_SWAP`` or ``MUST_SAVE`` for each saved tensor;
            without it all leave.
        group_swap: small storages cross together; same values, same bytes, fewer copies.
        cpu_pool: the cap on host memory; default: that of ``ebbtide.OffloadConfig``.

    With a current group (``SwapManager``) its schedule says when; otherwise copies start by themselves. Nothing is done
    where autograd records nothing, nor for what backward recomputes. In compiled code the graph ends here, and what the
    function runs is compiled for itself; with ``fullgraph=True`` the compiler raises.

    Raises PolicyError (a RuntimeError) for another answer of the policy, else what the function raises.
    """
    return _Swapped(policy_fn, group_swap, cpu_pool)(function, args, kwargs)


def _checked(policy_fn: PolicyFn | None) -> PolicyFn | None:
    if policy_fn is None:
        return None

    def policy(tensor: Tensor) -> CheckpointPolicy:
        answer = policy_fn(tensor)
        # By name: members of torch's enum, and of HyperParallel's own, count too.
        name = answer.name if isinstance(answer, enum.Enum) else None
        if name == "MUST_SWAP":
            return CheckpointPolicy.MUST_SWAP
        if name == "MUST_SAVE":
            return CheckpointPolicy.MUST_SAVE
        raise PolicyError(
            f"[swap] policy_fn answered {shown_answer(answer)} for a tensor: return CheckpointPolicy.MUST_SWAP to offload it, or MUST_SAVE "
            "to keep it"
        )

    return policy


@dataclass(frozen=True)
class _Swapped:
    """How a function is called under `swap`; what a swap wrapper does in forward."""

    policy_fn: PolicyFn | None
    group_swap: bool
    cpu_pool: PinnedMemoryPool | None

    def __call__(
        self, wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        modules = modules_for(wrapped, args, kwargs)
        if not modules.records():
            return wrapped(*args, **kwargs)
        modules.break_graph("swap")
        scope = saving(
            wrapped,
            modules=modules,
            policy=_checked(self.policy_fn),
            group_swap=self.group_swap,
            cpu_pool=self.cpu_pool,
        )
        with scope:
            return wrapped(*args, **kwargs)


def swap_wrapper(
    module: Callable[..., Any],
    policy_fn: PolicyFn | None = None,
    group_swap: bool = False,
    cpu_pool: PinnedMemoryPool | None = None,
) -> Module:
    """The module with every forward under ``swap``; a plain callable becomes a module.

    Names of parameters, buffers and state are those of the module. Wrap layers first, then shard the model.
    """
    modules = modules_to_wrap("swap_wrapper", module)
    warn_if_nested("swap_wrapper", modules, module)
    return modules.wrapper(SwapWrapper, module, _Swapped(policy_fn, bool(group_swap), cpu_pool))


def warn_if_nested(place: str, modules: Modules, module: object) -> None:
    """Where a wrapper is inside of another the inner one decides."""
    if modules.is_module(module) and any(
        isinstance(inner, (SwapWrapper, CheckpointWrapper)) for inner in modules.submodules(module)
    ):
        warnings.warn(
            f"[{place}] {type(module).__name__} is or has a wrapped module: for what it saves the inner wrapper decides",
            RuntimeWarning,
            stacklevel=3,
        )


def swap_tensor_wrapper(
    target: _T,
    tag: str | None = None,
    group_swap: bool = False,
    cpu_pool: PinnedMemoryPool | None = None,
) -> _T:
    """Names tensors, in any nested structure, that are to leave with the current group; returns ``target`` itself.

    For use in the forward of a layer of a chain (``SwapManager.set_forward_prefetch_layer``): their storages leave the
    device after the layer, and come back ahead of its backward. Or in ``SwapManager.group_context``, whose calls say when.
    Other tensors that are saved there outside of wrappers stay. In the last layer of a chain nothing leaves; without a
    current group nothing happens but a warning. ``tag`` shows in that.
    """
    modules = modules_for(target)
    if modules.in_backward() or not modules.records():
        return target
    now = current.get()
    if now is None:
        named = "" if tag is None else f" {tag!r}"
        warnings.warn(
            f"[swap_tensor_wrapper]{named} no group is current: link the layers with "
            "SwapManager().set_forward_prefetch_layer(first, second), and call them outside of compiled code",
            RuntimeWarning,
            stacklevel=2,
        )
        return target
    if now.group.is_last():
        return target
    name_in_group("swap_tensor_wrapper", now, target, modules, group_swap, cpu_pool)
    return target


@contextmanager
def async_save_on_cpu(
    policy_fn: PolicyFn | None = None,
    group_swap: bool = False,
    cpu_pool: PinnedMemoryPool | None = None,
) -> Iterator[None]:
    """The context behind ``swap``: what autograd saves inside leaves the device. Arguments as there.

    Only tensors whose type or base says so are known to be parameters.
    """
    modules = modules_for()
    modules.break_graph("async_save_on_cpu")
    swaps: dict[str, Any] = {"group_swap": group_swap, "cpu_pool": cpu_pool}
    policy = _checked(policy_fn)
    with saving(None, modules=modules, policy=policy, name="async_save_on_cpu", **swaps):
        yield
