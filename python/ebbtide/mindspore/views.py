"""Tensors over storages: views of any dtype, sizes and strides."""

from __future__ import annotations

from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, mint
from mindspore.common.dtype import dtype_to_nptype
from mindspore.ops.auto_generate import AsStrided

from ebbtide.framework import ViewMeta
from ebbtide.mindspore.storages import Held, HostBuffer

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


class Dtype:
    """What a dtype is to the session. A tensor's own ``itemsize`` is wrong after ``view(dtype)``."""

    __slots__ = ("itemsize", "kind", "numpy")

    def __init__(self, kind: int, dtype: Any) -> None:
        self.kind = kind
        self.numpy = np.dtype(dtype_to_nptype(_STORED.get(dtype, dtype)))
        self.itemsize: int = self.numpy.itemsize


DTYPES = {dtype: Dtype(kind, dtype) for kind, dtype in enumerate(_DTYPES)}


class Views:
    """Of storages on one device. Thread safe."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._empty: dict[Any, Tensor] = {}
        self._as_strided = AsStrided()

    def make(self, storage: Held, view: ViewMeta) -> Tensor:
        offset, itemsize, _, sizes, strides, dtype = view
        whole = storage.nbytes // itemsize * itemsize
        if isinstance(storage, HostBuffer):
            array = np.asarray(storage)[:whole].view(DTYPES[dtype].numpy)
            memory = Tensor.from_numpy(array).untyped_storage()
        else:
            memory = storage.memory
        if memory.dtype == dtype:
            return self._set(memory, offset, sizes, strides)
        # A tensor takes a storage of its own dtype only.
        flat = self._set(memory, 0, (whole // DTYPES[memory.dtype].itemsize,), (1,)).view(dtype)
        return self._as_strided(flat, sizes, strides, offset)

    def flat_bytes(self, storage: Held) -> Tensor:
        view = ViewMeta(0, 1, 0, (storage.nbytes,), (1,), mindspore.uint8)
        return self.make(storage, view)

    def _set(
        self, memory: Any, offset: int, sizes: tuple[int, ...], strides: tuple[int, ...]
    ) -> Tensor:
        dtype = memory.dtype
        empty = self._empty.get(dtype)
        if empty is None:
            empty = mint.empty((0,), dtype=dtype, device=self._target)
            empty = self._empty.setdefault(dtype, empty)
        tensor = empty.data  # cheaper than a new tensor
        tensor.set_(memory, offset, sizes, strides)
        return tensor
