"""Tensors over storages: views of any dtype, sizes and strides."""

from __future__ import annotations

from typing import Any, NamedTuple

import mindspore
import numpy as np
from mindspore import Tensor, mint
from mindspore.ops.auto_generate import AsStrided

from ebbtide.framework import ViewMeta
from ebbtide.mindspore.storages import Held, HostBuffer


class Dtype(NamedTuple):
    """What a dtype is to the session. A tensor's own ``itemsize`` is wrong after ``view(dtype)``."""

    kind: int
    numpy: Any  # of a buffer's elements: where numpy has not the dtype itself, a view makes it
    itemsize: int


_NUMPY_DTYPES = {
    mindspore.bool_: np.bool_,
    mindspore.uint8: np.uint8,
    mindspore.uint16: np.uint16,
    mindspore.uint32: np.uint32,
    mindspore.uint64: np.uint64,
    mindspore.int8: np.int8,
    mindspore.int16: np.int16,
    mindspore.int32: np.int32,
    mindspore.int64: np.int64,
    mindspore.float16: np.float16,
    mindspore.float32: np.float32,
    mindspore.float64: np.float64,
    mindspore.complex64: np.complex64,
    mindspore.complex128: np.complex128,
    mindspore.bfloat16: np.uint16,
    mindspore.float8_e4m3fn: np.uint8,
    mindspore.float8_e5m2: np.uint8,
}

DTYPES = {
    dtype: Dtype(kind, numpy_dtype, np.dtype(numpy_dtype).itemsize)
    for kind, (dtype, numpy_dtype) in enumerate(_NUMPY_DTYPES.items())
}


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
