"""The memory of MindSpore's CPU tensors, read and written past MindSpore: no kernel makes a copy or lacks a dtype."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import numpy as np
from mindspore import Tensor
from mindspore.graph.api import _pynative_executor as executor

_NAMES = {"float8e4m3fn": "float8_e4m3fn", "float8e5m2": "float8_e5m2"}
# numpy has no such numbers: their bytes are what counts.
_RAW = {"float8_e4m3fn": "u1", "float8_e5m2": "u1", "bfloat16": "u2"}


def dtype_name(tensor: Tensor) -> str:
    name = str(tensor.dtype).lower()
    return _NAMES.get(name, name)


def numpy_dtype(tensor: Tensor) -> np.dtype:
    """One of the same size."""
    name = dtype_name(tensor)
    return np.dtype(_RAW.get(name, name))


def storage_address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def end_backward(tide: Any) -> None:
    """MindSpore's backend thread drops the last node of a graph, and its ticket, a moment after a backward has returned."""
    executor.sync()
    deadline = time.monotonic() + 10
    while tide.stats().entries and time.monotonic() < deadline:
        time.sleep(0.001)


def drop_unfinished_graphs() -> None:
    """MindSpore keeps the graph of a forward that raised, and, in it, what compiled functions save in later forwards."""
    executor.clear_res()


def elements(tensor: Tensor) -> np.ndarray:
    """A view of the tensor's memory, with its strides. The caller keeps the tensor alive meanwhile."""
    executor.sync()
    dtype = numpy_dtype(tensor)
    if tensor.size == 0:
        return np.empty(tuple(tensor.shape), dtype)
    storage = tensor.untyped_storage()
    raw = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    flat = np.frombuffer(raw, dtype, offset=tensor.storage_offset() * dtype.itemsize, count=1)
    strides = tuple(stride * dtype.itemsize for stride in tensor.stride())
    return np.lib.stride_tricks.as_strided(flat, tuple(tensor.shape), strides)
