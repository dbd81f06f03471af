"""MindSpore as a framework of the session: storages, views, in-place counters and hooks of ``mindspore``."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import mindspore
from mindspore import Tensor, nn, recompute
from mindspore.common._grad_function import _Function
from mindspore.common.api import _pynative_executor

from ebbtide._core import KeepReason
from ebbtide.errors import UsageError
from ebbtide.framework import DeviceMemory, StorageRef, Streams, ViewMeta, Weights
from ebbtide.mindspore import passes
from ebbtide.mindspore.blocks import repeated_blocks, watch
from ebbtide.mindspore.compiling import compiled_construct
from ebbtide.mindspore.counters import Counter, mark_of, plain_alias, version_of
from ebbtide.mindspore.hooks import SavedTensorHooks
from ebbtide.mindspore.storages import ALIGNMENT_BYTES, Held, HeldStorage, HostBuffer, Storages
from ebbtide.mindspore.streams import device_bytes
from ebbtide.mindspore.views import DTYPES, Views
from ebbtide.mindspore.weights import CellWeights
from ebbtide.wrapping import run_inside

_MANY = 1 << 32  # more holders than there can be leases


class MindSporeFramework:
    """See :class:`ebbtide.framework.Framework`. One device type per object."""

    keep_last_storages = 8
    memory: DeviceMemory | None = None

    def __init__(self, device_type: str, streams: Streams | None = None) -> None:
        self.device_type = device_type
        self.streams = streams
        self._is_cpu = device_type == "cpu"
        self._target = "CPU" if self._is_cpu else device_type
        self._storages = Storages()
        self._views = Views(self._target)

    # --- what a tensor is

    def keep_reason(self, tensor: Tensor, weights: Weights) -> KeepReason | None:
        if type(tensor) is not Tensor:
            is_weight = isinstance(tensor, mindspore.Parameter)
            return KeepReason.PARAMETER if is_weight else KeepReason.UNSUPPORTED
        if tensor.dtype not in DTYPES:
            return KeepReason.UNSUPPORTED
        if tensor.device.partition(":")[0] != self._target:
            return KeepReason.DEVICE
        if 0 in tensor.shape:
            return KeepReason.SMALL
        storage = tensor.untyped_storage()
        if weights.holds(storage):
            return KeepReason.PARAMETER
        if not self._is_cpu and storage.data_ptr() % ALIGNMENT_BYTES != 0:
            # Somebody else's memory, which cannot be allocated anew at this residue.
            return KeepReason.UNSUPPORTED
        return None

    def nbytes(self, tensor: Tensor) -> int:
        dtype = DTYPES.get(tensor.dtype)
        return 0 if dtype is None else int(tensor.size) * dtype.itemsize

    def view_meta(self, tensor: Tensor) -> ViewMeta:
        dtype = tensor.dtype
        known = DTYPES[dtype]
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
        frame = sys._getframe(1).f_back
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
        if self._is_cpu:
            return self._storages.add(HostBuffer(nbytes, residue))
        memory = device_bytes(nbytes, self._target).untyped_storage()
        return self._storages.add(HeldStorage(memory, device))

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

    modified_hint = ""

    def modified_text(
        self, tensor: Any, view: ViewMeta | None, where: str, expected: int, found: int
    ) -> str:
        dtype, sizes = (tensor.dtype, tensor.shape) if view is None else (view.dtype, view.sizes)
        return (
            "One of the Tensor needed for gradient computation has been modified by an inplace operation, which is the "
            f"{dtype} Tensor of shape {list(sizes)}, {where}; and its version is {found}, expected version {expected}"
        )

    # --- backward

    def recomputes(self) -> bool:
        return False

    def make_view(self, storage: Held, view: ViewMeta, witness: Counter) -> Tensor:
        tensor = self._views.make(storage, view)
        # Handed to a backward that is itself recorded, a view would cut its graph.
        recorded = _pynative_executor.grad_flag() and _pynative_executor.enable_grad()
        return tensor.copy() if recorded else tensor

    def current_pass(self) -> int:
        return passes.current()

    def end_of_pass(self, callback: Callable[[], None]) -> None:
        passes.at_end(callback)

    def finish_queued(self) -> None:
        _pynative_executor.sync()

    def saved_tensor_hooks(
        self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
    ) -> AbstractContextManager[Any]:
        return SavedTensorHooks(pack, unpack)

    def run_inside(self, model: Any, context: Callable[[], AbstractContextManager[Any]]) -> None:
        if not isinstance(model, nn.Cell):
            raise UsageError(
                f"[offload.wrap] {type(model).__name__} is no model: pass a mindspore.nn.Cell"
            )
        run_inside(model, "construct", context, compiled_construct(type(model)))

    def watch_blocks(
        self, model: Any, begin: Callable[[str], None], end: Callable[[str], None]
    ) -> Callable[[], None]:
        return watch(repeated_blocks(model), begin, end)

    def weights(self, model: Any) -> Weights:
        return CellWeights(model)
