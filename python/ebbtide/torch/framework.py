"""PyTorch as a framework of the session: storages, views, in-place counters and hooks of ``torch``."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import saved_tensors_hooks

from ebbtide import _core
from ebbtide.errors import UsageError
from ebbtide.framework import DeviceMemory, StorageRef, Streams, ViewMeta, Weights
from ebbtide.torch.blocks import graph_task_id, repeated_blocks, watch
from ebbtide.torch.memory import ACCELERATOR_MEMORY
from ebbtide.torch.queued import drop_queued
from ebbtide.torch.streams import TorchStreams, make_empty
from ebbtide.torch.unobserved import unobserved
from ebbtide.torch.weights import ModelWeights, is_weight, is_weight_cast
from ebbtide.wrapping import run_inside

_MAX_VIEW_KINDS = 4  # conj and neg bits
# What autocast casts weights to. Whether it is enabled cannot be asked: inside the operation it is switched off.
_CAST_DTYPES = frozenset({torch.bfloat16, torch.float16})

is_functorch_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_use_count = getattr(torch._C, "_storage_Use_Count", None)

_APPLY_CODE = torch.autograd.Function.apply.__func__.__code__


class TorchFramework(_core.TorchTensors):
    """See :class:`ebbtide.framework.Framework`. One device type per object; thread safe.

    What is called for every tensor is in the base class.
    """

    keep_last_storages = 0

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self._is_cpu = device_type == "cpu"
        self.streams: Streams | None = None if self._is_cpu else _streams(device_type)
        self.memory: DeviceMemory | None = None if self._is_cpu else ACCELERATOR_MEMORY
        self._empty: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        helpers = SimpleNamespace(
            StorageRef=StorageRef,
            ViewMeta=ViewMeta,
            cast_dtypes=_CAST_DTYPES,
            is_functorch_wrapped=is_functorch_wrapped,
            capturing=_capture_query(device_type),
            use_count=_use_count,
            is_weight=is_weight,
            is_weight_cast=is_weight_cast,
            graph_task_id=graph_task_id,
        )
        super().__init__(torch, device_type, helpers)

    # --- what a tensor is

    def is_region_input(self) -> bool:
        frame = sys._getframe(1).f_back
        if frame is not None and frame.f_code is _APPLY_CODE:
            frame = frame.f_back
        if frame is None or frame.f_globals.get("__name__") != "torch.utils.checkpoint":
            return False
        return frame.f_code.co_name != "backward"  # which recomputes

    # --- storages

    # Where one call of torch is all there is, its C function itself stands for the method: twice as fast.
    storage = staticmethod(torch.Tensor.untyped_storage)

    address = staticmethod(torch.UntypedStorage.data_ptr)

    def device_of(self, index: int) -> torch.device:
        return torch.device(self.device_type, None if self._is_cpu else index)

    def allocation_error(self, error: BaseException) -> BaseException:
        """What ``allocate`` raises where this comes."""
        out_of_memory = isinstance(error, torch.OutOfMemoryError)
        # The CPU allocator has no type of its own for this.
        if out_of_memory or (isinstance(error, RuntimeError) and "alloc" in str(error)):
            return MemoryError(str(error))
        return error

    # --- in-place counters

    version = staticmethod(attrgetter("_version"))

    def witness_of_lazy(self, tensor: torch.Tensor) -> torch.Tensor:
        """The witness of a tensor with a conj or neg bit."""
        return self._emptied(tensor, self._empty_like(tensor))

    def _emptied(self, tensor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        """``data`` on the in-place counter of ``tensor``."""
        alias = tensor.detach()
        # Some devices refuse data whose lazy bits differ, and only what is complex can get the conj bit.
        if alias.is_neg() != data.is_neg():
            alias = torch._neg_view(alias).detach()
        if alias.is_conj() != data.is_conj():
            if not alias.is_complex():
                alias.data = _with_bits(
                    self.empty_of(data.dtype, data.device), False, data.is_neg()
                )
            alias = torch._conj(alias).detach()
        alias.data = data
        return alias

    def _empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        empty = self.empty_of(tensor.dtype, tensor.device)
        return _with_bits(empty, tensor.is_conj(), tensor.is_neg())

    def empty_of(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        empty = self._empty.get((dtype, device))
        if empty is None:
            empty = self._empty[dtype, device] = make_empty(dtype, device)
        return empty

    replaceable = staticmethod(attrgetter("is_leaf"))

    @unobserved
    def without_elements(self, tensor: torch.Tensor) -> torch.Tensor:
        empty = torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
        return self._emptied(tensor, _with_bits(empty, tensor.is_conj(), tensor.is_neg()))

    modified_hint = "torch.autograd.set_detect_anomaly(True) shows the operation that saved it"

    def modified_text(
        self, tensor: torch.Tensor, view: ViewMeta | None, where: str, expected: int, found: int
    ) -> str:
        kind, sizes = tensor.type(), "" if tensor.is_nested else f" {list(tensor.shape)}"
        if view is not None:
            # The witness may be one of another dtype with the same counter.
            kind = torch.empty(0, dtype=view.dtype, device=tensor.device).type()
            sizes = f" {list(view.sizes)}"
        return (
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{kind}{sizes}], {where}, is at version {found}; expected version {expected} instead"
        )

    # --- backward

    def make_any_view(
        self, storage: torch.UntypedStorage, view: ViewMeta, witness: torch.Tensor
    ) -> torch.Tensor:
        """What ``make_view`` is for, also of lazy bits and in inference mode."""
        if torch.is_inference_mode_enabled():
            # Its tensors have no in-place counter to share.
            with torch.inference_mode(False):
                return self.make_any_view(storage, view, witness)
        offset, _, kind, sizes, strides, dtype = view
        data = self.empty_of(dtype, storage.device).detach()
        data.set_(storage, offset, sizes, strides)
        bits = kind % _MAX_VIEW_KINDS
        return self._emptied(witness, _with_bits(data, bool(bits & 1), bool(bits & 2)))

    def end_of_pass(self, callback: Callable[[], None]) -> None:
        queue_callback = Variable._execution_engine.queue_callback
        queue_callback(callback)
        queue_callback(_core.AtEnd(functools.partial(drop_queued, graph_task_id())))

    def finish_queued(self) -> None:
        pass

    def saved_tensor_hooks(
        self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]
    ) -> AbstractContextManager[Any]:
        return saved_tensors_hooks(pack, unpack)

    def run_inside(self, model: Any, context: Callable[[], AbstractContextManager[Any]]) -> None:
        if not isinstance(model, torch.nn.Module):
            raise UsageError(
                f"[offload.wrap] {type(model).__name__} is no model: pass a torch.nn.Module"
            )
        run_inside(model, "forward", context)

    def watch_blocks(
        self, model: Any, begin: Callable[[str], None], end: Callable[[str], None]
    ) -> Callable[[], None]:
        return watch(repeated_blocks(model), begin, end)

    def weights(self, model: Any) -> Weights:
        return ModelWeights(model)


_all_streams: dict[str, TorchStreams] = {}


def _streams(device_type: str) -> TorchStreams:
    """Of this process: copy streams are few, and shared."""
    return _all_streams.setdefault(device_type, TorchStreams(device_type))


def _capture_query(device_type: str) -> Callable[[], bool] | None:
    # The C function under the public one, where it has one.
    query = getattr(torch._C, f"_{device_type}_isCurrentStreamCapturing", None)
    module = getattr(torch, device_type, None)
    return query or getattr(module, "is_current_stream_capturing", None)


def _with_bits(tensor: torch.Tensor, conj: bool, neg: bool) -> torch.Tensor:
    if conj:
        tensor = torch._conj(tensor)
    if neg:
        tensor = torch._neg_view(tensor)
    return tensor
