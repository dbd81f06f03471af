"""torch's own checkpoint, for the HyperParallel layer: its non-reentrant kind, in eager mode and where a compiler traces."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint as engine

from ebbtide.errors import UsageError
from ebbtide.policy import OpPlan, plan_of
from ebbtide.torch import selective
from ebbtide.torch.selective import entered_policies

OPTIONS = frozenset({"preserve_rng_state", "determinism_check", "debug"})

_takes_early_stop = "early_stop" in inspect.signature(engine.checkpoint).parameters


def checkpoint(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    context_fn: Any,
    early_stop: bool,
    options: dict[str, Any],
) -> Any:
    if context_fn is not None:
        options = {**options, "context_fn": context_fn}
    if _takes_early_stop:
        options = {**options, "early_stop": early_stop}
        stops: Any = nullcontext()
    else:
        stops = nullcontext() if early_stop else engine.set_checkpoint_early_stop(False)
    with stops:
        return engine.checkpoint(function, *args, use_reentrant=False, **options, **kwargs)


def checkpoint_captured(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], policy: Any
) -> Any:
    """For a compiler, which has an operator of its own for this call."""
    if policy is None:
        return engine.checkpoint(function, *args, use_reentrant=False, **kwargs)
    answers = _for_compiler(policy, "checkpoint")
    contexts = functools.partial(engine.create_selective_checkpoint_contexts, answers)
    return engine.checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def selective_contexts(
    policy: Any, swapping: Callable[[], selective.Swapping], allow_cache_entry_mutation: bool
) -> tuple[Any, Any]:
    """See `ebbtide.torch.selective`; where a compiler traces the region, torch's own, which mark what it is to save."""
    if not _is_traced():
        return selective.selective_contexts(policy, swapping, allow_cache_entry_mutation)
    answers = _for_compiler(policy, "create_selective_checkpoint_contexts")
    return engine.create_selective_checkpoint_contexts(answers, allow_cache_entry_mutation)


def _is_traced() -> bool:
    """Whether operations go into a graph, in a region that torch's own checkpoint calls."""
    tracing: Any = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return tracing is not None and tracing.get_proxy_mode() is not None


def _for_compiler(policy: Any, place: str) -> Any:
    if not callable(policy):
        return list(policy)
    answers = {
        OpPlan.SAVE: engine.CheckpointPolicy.MUST_SAVE,
        OpPlan.SWAP: engine.CheckpointPolicy.MUST_SAVE,
        OpPlan.RECOMPUTE: engine.CheckpointPolicy.PREFER_RECOMPUTE,
    }

    def answer(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        plan = plan_of(policy(ctx, op, *args, **kwargs), op)
        if plan is OpPlan.SWAP:
            _warn_saves(policy, place, op)
        return answers[plan]

    return answer


_warned: weakref.WeakSet[Any] = weakref.WeakSet()  # policies


def _warn_saves(policy: Any, place: str, op: Any) -> None:
    if policy in _warned:
        return
    _warned.add(policy)
    warnings.warn(
        f"[{place}] the policy answers MUST_SWAP for {op} in compiled code, where it saves: nothing leaves the device. To "
        "offload what compiled code saves, call the compiled function under swap or async_save_on_cpu; for single "
        "operations, leave the region out of torch.compile",
        RuntimeWarning,
        stacklevel=3,
    )


def is_selective(context: object) -> bool:
    return type(context).__module__ == engine.__name__


# --- what is not recomputed


def current_hooks() -> Any:
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return None if top is None else top(False)


@contextmanager
def excluded(
    pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]
) -> Iterator[None]:
    policies, others = entered_policies()
    if any(is_selective(mode) for mode in others):
        raise UsageError(
            "[checkpoint_exclude_wrapper] in a region with torch's own selective contexts, which count the operations of the "
            "excluded module: make them with ebbtide.hyper_parallel.create_selective_checkpoint_contexts"
        )
    before = [policy.paused for policy in policies]
    try:
        for policy in policies:
            policy.paused = True
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        for policy, paused in zip(policies, before, strict=True):
            policy.paused = paused


class RandomState(NamedTuple):
    host: torch.Tensor
    device_type: str
    devices: list[int]
    states: list[torch.Tensor]


def random_state(tensors: tuple[torch.Tensor, ...]) -> RandomState:
    device_type = next((t.device.type for t in tensors if t.device.type != "cpu"), "")
    if device_type and getattr(torch.get_device_module(device_type), "_initialized", False):
        return RandomState(torch.get_rng_state(), device_type, *engine.get_device_states(*tensors))
    return RandomState(torch.get_rng_state(), "", [], [])


def same_random_state(one: RandomState, other: RandomState) -> bool:
    pairs = zip([one.host, *one.states], [other.host, *other.states], strict=True)
    return one.devices == other.devices and all(torch.equal(a, b) for a, b in pairs)


def set_random_state(state: RandomState) -> None:
    torch.set_rng_state(state.host)
    if state.devices:
        engine.set_device_states(state.devices, state.states, device_type=state.device_type)


def as_result(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    return tensor.detach().requires_grad_(requires_grad)
