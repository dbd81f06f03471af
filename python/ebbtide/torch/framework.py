"""PyTorch as a framework of the session: storages, views, in-place counters and hooks of ``torch``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import saved_tensors_hooks

from ebbtide._core import KeepReason, Owned
from ebbtide.errors import UsageError
from ebbtide.framework import DeviceMemory, StorageRef, Streams, ViewMeta, Weights
from ebbtide.torch.blocks import graph_task_id, repeated_blocks, watch
from ebbtide.torch.memory import ACCELERATOR_MEMORY
from ebbtide.torch.streams import TorchStreams
from ebbtide.torch.unobserved import unobserved
from ebbtide.torch.weights import ModelWeights, is_weight, is_weight_cast
from ebbtide.wrapping import run_inside

_ALIGNMENT_BYTES = 512
_MAX_VIEW_KINDS = 4  # conj and neg bits
# What autocast casts weights to. Whether it is enabled cannot be asked: inside the operation it is switched off.
_CAST_DTYPES = frozenset({torch.bfloat16, torch.float16})

is_functorch_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_use_count = getattr(torch._C, "_storage_Use_Count", None)

_APPLY_CODE = torch.autograd.Function.apply.__func__.__code__


_free_weak_reference = torch.UntypedStorage._free_weak_ref
_new_tuple = tuple.__new__  # a named one, without the call of its own function


_held = [torch.UntypedStorage(0)]
_REFERENCES_OF_A_LIST = sys.getrefcount(_held[-1])


class TorchFramework:
    """See :class:`ebbtide.framework.Framework`. One device type per object; thread safe."""

    keep_last_storages = 0

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self._is_cpu = device_type == "cpu"
        self.streams: Streams | None = None if self._is_cpu else _streams(device_type)
        self.memory: DeviceMemory | None = None if self._is_cpu else ACCELERATOR_MEMORY
        self._capturing = _capture_query(device_type)
        self._devices: set[torch.device] = set()  # of this type, seen so far
        self._where: dict[int, torch.device] = {}  # by index
        self._dtype_kinds: dict[torch.dtype, int] = {}
        self._empty: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    # --- what a tensor is

    def keep_reason(self, tensor: torch.Tensor, weights: Weights) -> KeepReason | None:
        if type(tensor) is not torch.Tensor:
            return KeepReason.PARAMETER if is_weight(tensor) else KeepReason.UNSUPPORTED
        base = tensor._base
        if base is not None and is_weight(base):
            return KeepReason.PARAMETER
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
            return KeepReason.UNSUPPORTED
        if is_functorch_wrapped(tensor):
            return KeepReason.UNSUPPORTED
        if self._is_cpu:
            if not tensor.is_cpu:
                return KeepReason.DEVICE
        elif tensor.device not in self._devices and not self._is_own(tensor.device):
            return KeepReason.DEVICE
        elif self._capturing is not None and self._capturing():
            return KeepReason.CAPTURE
        storage = tensor.untyped_storage()
        # The memory of others than torch's allocator (parts of a storage, what was taken over from other libraries) cannot
        # be kept from reuse while a stream works on it, nor allocated anew at the same residue.
        if not self._is_cpu and not (
            storage.resizable() and storage.data_ptr() % _ALIGNMENT_BYTES == 0
        ):
            return KeepReason.UNSUPPORTED
        if weights.holds(storage):
            return KeepReason.PARAMETER
        if tensor.dtype in _CAST_DTYPES and is_weight_cast(tensor if base is None else base):
            return KeepReason.PARAMETER_CAST
        if tensor.numel() == 0:
            return KeepReason.SMALL
        return None

    def _is_own(self, device: torch.device) -> bool:
        if device.type != self.device_type:
            return False
        self._devices.add(device)
        return True

    def nbytes(self, tensor: torch.Tensor) -> int:
        try:
            return tensor.numel() * tensor.element_size()
        except RuntimeError:
            return 0

    def view_meta(self, tensor: torch.Tensor) -> ViewMeta:
        dtype = tensor.dtype
        kind = self._dtype_kinds.get(dtype)
        if kind is None:
            kind = self._dtype_kinds.setdefault(dtype, len(self._dtype_kinds) * _MAX_VIEW_KINDS)
        kind += tensor.is_conj() + 2 * tensor.is_neg()
        return _new_tuple(
            ViewMeta,
            (
                tensor.storage_offset(),
                tensor.element_size(),
                kind,
                tensor.size(),
                tensor.stride(),
                dtype,
            ),
        )

    def is_region_input(self) -> bool:
        frame = sys._getframe(2).f_back
        if frame is not None and frame.f_code is _APPLY_CODE:
            frame = frame.f_back
        if frame is None or frame.f_globals.get("__name__") != "torch.utils.checkpoint":
            return False
        return frame.f_code.co_name != "backward"  # which recomputes

    # --- storages

    # Where one call of torch is all there is, its C function itself stands for the method: twice as fast.
    storage = staticmethod(torch.Tensor.untyped_storage)

    def storage_bytes(self, tensor: torch.Tensor) -> int:
        return tensor.untyped_storage().nbytes()

    def storage_ref(self, storage: torch.UntypedStorage) -> StorageRef:
        device = 0 if self._is_cpu else storage.device.index
        return _new_tuple(
            StorageRef, (device, storage._cdata, storage.data_ptr(), storage.nbytes())
        )

    address = staticmethod(torch.UntypedStorage.data_ptr)

    def unmoved(self, storage: torch.UntypedStorage, ref: StorageRef) -> bool:
        return storage.data_ptr() == ref.address and storage.nbytes() == ref.nbytes

    def weak(self, storage: torch.UntypedStorage) -> Owned:
        return Owned(storage._weak_ref(), _free_weak_reference)

    def lock(self, weak: Owned) -> torch.UntypedStorage | None:
        return torch.UntypedStorage._new_with_weak_ptr(weak.value)

    def holders(self, held: list[torch.UntypedStorage]) -> int | None:
        if _use_count is None:
            return None
        # Tensors hold the storage itself; users may also hold the same Python object as the session. Python's own calls
        # hold their arguments once or twice (a compiler's or a debugger's frame evaluation), so none is in between.
        others: int = _use_count(held[-1]._cdata) - 1
        of_object = sys.getrefcount(held[-1]) - _REFERENCES_OF_A_LIST
        return others + of_object if of_object > 0 else others

    def allocate(self, nbytes: int, residue: int, device: int) -> torch.UntypedStorage:
        where = self._where.get(device)
        if where is None:
            where = torch.device(self.device_type, None if self._is_cpu else device)
            self._where[device] = where
        try:
            storage = torch.UntypedStorage(nbytes, device=where)
            shift = (residue - storage.data_ptr()) % _ALIGNMENT_BYTES
            if shift == 0:
                return storage
            storage = torch.UntypedStorage(nbytes + _ALIGNMENT_BYTES, device=where)
            shift = (residue - storage.data_ptr()) % _ALIGNMENT_BYTES
            return storage[shift : shift + nbytes]
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error
        except RuntimeError as error:
            # The CPU allocator has no type of its own for this.
            if "alloc" not in str(error):
                raise
            raise MemoryError(str(error)) from error

    # --- in-place counters

    version = staticmethod(attrgetter("_version"))

    def witness(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_conj() or tensor.is_neg():
            return self._emptied(tensor, self._empty_like(tensor))
        alias = tensor.detach()
        kind = tensor.dtype, tensor.device
        empty = self._empty.get(kind)
        alias.data = self._empty_of(*kind) if empty is None else empty
        return alias

    def _emptied(self, tensor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        """``data`` on the in-place counter of ``tensor``."""
        alias = tensor.detach()
        # Some devices refuse data whose lazy bits differ, and only what is complex can get the conj bit.
        if alias.is_neg() != data.is_neg():
            alias = torch._neg_view(alias).detach()
        if alias.is_conj() != data.is_conj():
            if not alias.is_complex():
                alias.data = _with_bits(
                    self._empty_of(data.dtype, data.device), False, data.is_neg()
                )
            alias = torch._conj(alias).detach()
        alias.data = data
        return alias

    def _empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        empty = self._empty_of(tensor.dtype, tensor.device)
        return _with_bits(empty, tensor.is_conj(), tensor.is_neg())

    def _empty_of(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        empty = self._empty.get((dtype, device))
        if empty is None:
            empty = self._empty[dtype, device] = _make_empty(dtype, device)
        return empty

    def counter_owner(self, tensor: torch.Tensor) -> torch.Tensor:
        base = tensor._base
        return tensor if base is None else base

    replaceable = staticmethod(attrgetter("is_leaf"))

    def keep(self, tensor: torch.Tensor, reason: KeepReason) -> torch.Tensor:
        owned = tensor.is_leaf and tensor.requires_grad
        if reason is KeepReason.SMALL and tensor.numel() == 0 and not owned:
            # A view without elements must not pin the storage it came from.
            return self._without_elements(tensor)
        if tensor.is_leaf:
            # No graph hangs at a leaf, and whoever swaps its data wants backward to see the new data.
            return tensor
        # The tensor itself would keep its own node alive for ever where it is the node's output.
        return tensor.detach()

    @unobserved
    def _without_elements(self, tensor: torch.Tensor) -> torch.Tensor:
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

    def recomputes(self) -> bool:
        frame = sys._getframe(1).f_back
        return frame is not None and frame.f_globals.get("__name__") == "torch.utils.checkpoint"

    @unobserved
    def make_view(
        self, storage: torch.UntypedStorage, view: ViewMeta, witness: torch.Tensor
    ) -> torch.Tensor:
        if torch.is_inference_mode_enabled():
            # Its tensors have no in-place counter to share.
            with torch.inference_mode(False):
                return self.make_view(storage, view, witness)
        offset, _, kind, sizes, strides, dtype = view
        kind_of_empty = dtype, storage.device
        empty = self._empty.get(kind_of_empty)
        if empty is None:
            empty = self._empty_of(*kind_of_empty)
        data = empty.detach()  # cheaper than a new tensor
        data.set_(storage, offset, sizes, strides)
        bits = kind % _MAX_VIEW_KINDS
        if bits or witness.is_conj() or witness.is_neg():
            return self._emptied(witness, _with_bits(data, bool(bits & 1), bool(bits & 2)))
        alias = witness.detach()
        alias.data = data
        return alias

    def current_pass(self) -> int:
        return graph_task_id() + 1

    def end_of_pass(self, callback: Callable[[], None]) -> None:
        Variable._execution_engine.queue_callback(callback)

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


@unobserved
def _make_empty(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):  # whose tensors could not be changed outside of it
        return torch.empty(0, dtype=dtype, device=device)


_all_streams: dict[str, TorchStreams] = {}


def _streams(device_type: str) -> TorchStreams:
    """Of this process: copy streams are few, and shared."""
    return _all_streams.setdefault(device_type, TorchStreams(device_type))


def _capture_query(device_type: str) -> Callable[[], bool] | None:
    return getattr(getattr(torch, device_type, None), "is_current_stream_capturing", None)


def _with_bits(tensor: torch.Tensor, conj: bool, neg: bool) -> torch.Tensor:
    if conj:
        tensor = torch._conj(tensor)
    if neg:
        tensor = torch._neg_view(tensor)
    return tensor
