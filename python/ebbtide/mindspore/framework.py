"""MindSpore as a framework of the session: storages, views, in-place counters and hooks of ``mindspore``."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, nn, recompute
from mindspore.common._grad_function import _Function
from mindspore.common.api import _pynative_executor
from mindspore.common.dtype import dtype_to_nptype
from mindspore.ops.auto_generate import AsStrided

from ebbtide._core import KeepReason
from ebbtide.errors import UsageError
from ebbtide.framework import StorageRef, Streams, ViewMeta, Weights
from ebbtide.mindspore import passes
from ebbtide.mindspore.blocks import repeated_blocks, watch
from ebbtide.mindspore.counters import Counter, mark_of, plain_alias, version_of
from ebbtide.mindspore.hooks import SavedTensorHooks
from ebbtide.mindspore.storages import Held, HostBuffer, Storages
from ebbtide.mindspore.weights import CellWeights
from ebbtide.wrapping import run_inside

_DTYPES = (
    *(mindspore.bool_, mindspore.uint8, mindspore.uint16, mindspore.uint32, mindspore.uint64),
    *(mindspore.int8, mindspore.int16, mindspore.int32, mindspore.int64),
    *(mindspore.float16, mindspore.bfloat16, mindspore.float32, mindspore.float64),
    *(mindspore.complex64, mindspore.complex128),
    *(mindspore.float8_e4m3fn, mindspore.float8_e5m2),
)
# Dtypes that numpy does not have: their bytes come as these.
_STORED = {
    mindspore.float8_e4m3fn: mindspore.uint8,
    mindspore.float8_e5m2: mindspore.uint8,
}


class _Dtype:
    """What a dtype is to the session. A tensor's own ``itemsize`` is wrong after ``view(dtype)``."""

    __slots__ = ("empty", "itemsize", "kind", "numpy", "stored")

    def __init__(self, kind: int, dtype: Any) -> None:
        self.kind = kind
        self.stored = _STORED.get(dtype, dtype)
        self.numpy = np.dtype(dtype_to_nptype(self.stored))
        self.itemsize = self.numpy.itemsize
        self.empty = Tensor.from_numpy(np.empty((0,), self.numpy))


_MANY = 1 << 32  # more holders than there can be leases


class MindSporeFramework:
    """See :class:`ebbtide.framework.Framework`. One device type per object."""

    keep_last_storages = 8

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self._is_cpu = device_type == "cpu"
        self.streams: Streams | None = None
        self._storages = Storages()
        self._dtypes = {dtype: _Dtype(kind, dtype) for kind, dtype in enumerate(_DTYPES)}
        self._as_strided = AsStrided()

    # --- what a tensor is

    def keep_reason(self, tensor: Tensor, weights: Weights) -> KeepReason | None:
        if type(tensor) is not Tensor:
            is_weight = isinstance(tensor, mindspore.Parameter)
            return KeepReason.PARAMETER if is_weight else KeepReason.UNSUPPORTED
        if tensor.dtype not in self._dtypes:
            return KeepReason.UNSUPPORTED
        if tensor.device != "CPU":
            return KeepReason.DEVICE
        if 0 in tensor.shape:
            return KeepReason.SMALL
        if weights.holds(tensor.untyped_storage()):
            return KeepReason.PARAMETER
        return None

    def nbytes(self, tensor: Tensor) -> int:
        dtype = self._dtypes.get(tensor.dtype)
        return 0 if dtype is None else int(tensor.size) * dtype.itemsize

    def view_meta(self, tensor: Tensor) -> ViewMeta:
        dtype = tensor.dtype
        known = self._dtypes[dtype]
        return ViewMeta(
            tensor.storage_offset(),
            known.itemsize,
            known.kind,
            tensor.shape,
            tuple(tensor.stride()),
            dtype,
        )

    def is_region_input(self) -> bool:
        # Of a recompute with use_reentrant=False. The other kind holds its inputs itself.
        frame = sys._getframe(2).f_back
        if frame is None or frame.f_globals.get("__name__") != _Function.__module__:
            return False
        frame = frame.f_back
        return frame is not None and frame.f_globals.get("__name__") == recompute.__module__

    # --- storages

    def storage(self, tensor: Tensor) -> Held:
        held = self._storages.of(tensor, 0)
        if tensor._is_leaf:
            held.note_leaf(mark_of(tensor))
        return held

    def storage_bytes(self, tensor: Tensor) -> int:
        return int(tensor.untyped_storage().nbytes())

    def storage_ref(self, storage: Held) -> StorageRef:
        return StorageRef(storage.device, storage.number, storage.address, storage.nbytes)

    def address(self, storage: Held) -> int:
        return storage.address

    def unmoved(self, storage: Held, ref: StorageRef) -> bool:
        return not storage.moved()

    def weak(self, storage: Held) -> weakref.ref[Held]:
        return weakref.ref(storage)

    def lock(self, weak: weakref.ref[Held]) -> Held | None:
        return weak()

    def holders(self, held: list[Held]) -> int | None:
        # A graph may keep a tensor's mark without its memory, but hardly one of a leaf. Views are not seen, so there may
        # be holders where none is known.
        return _MANY if held[-1].is_of_living_leaf() else None

    def allocate(self, nbytes: int, residue: int, device: int) -> Held:
        return self._storages.add(HostBuffer(nbytes, residue))

    # --- in-place counters

    def version(self, tensor: Any) -> int:
        return version_of(tensor)

    def witness(self, tensor: Tensor) -> Counter:
        return mark_of(tensor).counter

    def counter_owner(self, tensor: Tensor) -> Any:
        return mark_of(tensor)

    def replaceable(self, tensor: Tensor) -> bool:
        return False

    def keep(self, tensor: Tensor, reason: KeepReason) -> Tensor:
        return plain_alias(tensor)

    def modified_text(self, tensor: Any, expected: int, found: int) -> str:
        return (
            "One of the Tensor needed for gradient computation has been modified by an inplace operation, "
            f"and its version is {found} , expected version {expected}"
        )

    # --- backward

    def make_view(self, storage: Held, view: ViewMeta, witness: Counter) -> Tensor:
        tensor = self._view(storage, view)
        # Handed to a backward that is itself recorded, a view would cut its graph.
        recorded = _pynative_executor.grad_flag() and _pynative_executor.enable_grad()
        return tensor.copy() if recorded else tensor

    def _view(self, storage: Held, view: ViewMeta) -> Tensor:
        offset, itemsize, _, sizes, strides, dtype = view
        known = self._dtypes[dtype]
        if isinstance(storage, HostBuffer):
            array = np.asarray(storage)[: storage.nbytes // itemsize * itemsize]
            memory = Tensor.from_numpy(array.view(known.numpy)).untyped_storage()
        else:
            memory = storage.memory
        if memory.dtype == dtype:
            tensor = known.empty.data
            tensor.set_(memory, offset, sizes, strides)
            return tensor
        # A tensor set on a storage takes the storage's dtype.
        stored = self._dtypes[memory.dtype]
        flat = stored.empty.data
        flat.set_(memory, 0, (storage.nbytes // itemsize * itemsize // stored.itemsize,), (1,))
        return self._as_strided(flat.view(dtype), sizes, strides, offset)

    def current_pass(self) -> int:
        return passes.current()

    def end_of_pass(self, callback: Callable[[], None]) -> None:
        passes.at_end(callback)

    def saved_tensor_hooks(
        self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
    ) -> AbstractContextManager[Any]:
        return SavedTensorHooks(pack, unpack)

    def run_inside(self, model: Any, context: Callable[[], AbstractContextManager[Any]]) -> None:
        if not isinstance(model, nn.Cell):
            raise UsageError(
                f"[offload.wrap] {type(model).__name__} is no model: pass a mindspore.nn.Cell"
            )
        run_inside(model, "construct", context)

    def watch_blocks(
        self, model: Any, begin: Callable[[str], None], end: Callable[[str], None]
    ) -> Callable[[], None]:
        return watch(repeated_blocks(model), begin, end)

    def weights(self, model: Any) -> Weights:
        return CellWeights(model)
