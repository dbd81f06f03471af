"""MindSpore on the CPU, PyNative, as a backend of the behaviour tests.

Graphs are run by MindSpore's dynamic autograd, which its public functions stand on: those run a backward at once, or in
the reverse order of the forwards. What is public is tested in tests/python/mindspore.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mindspore as ms
import mindspore_memory as memory
import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops
from mindspore._c_expression import run_backward
from mindspore.common._grad_function import _Function
from mindspore.graph.api import _pynative_executor as executor
from mindspore_lacks import DTYPES, OPS, THINGS, VIEWS
from protocol import Layout, Network, Program, Step
from support import EXACT

import ebbtide.mindspore as ebb

as_strided = ops.auto_generate.AsStrided()


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return ops.LayerNorm(-1, -1)(x, weight, bias)[0]


_OPS: dict[str, Callable[..., Tensor]] = {
    "add": mint.add,
    "clone": lambda x: x.copy(),
    "cos": mint.cos,
    "exp": mint.exp,
    "gelu": ops.gelu,
    "layer_norm": _layer_norm,
    "linear": mint.nn.functional.linear,
    "matmul": mint.matmul,
    "mul": mint.mul,
    "relu": ops.relu,
    "sigmoid": mint.sigmoid,
    "sin": mint.sin,
    "softmax": lambda x: ops.softmax(x, -1),
    "sum": mint.sum,
    "tanh": mint.tanh,
}


def _narrow(x: Tensor, dim: int, start: int, length: int) -> Tensor:
    if length:
        return x.narrow(dim, start, length)
    sizes = tuple(0 if i == dim else n for i, n in enumerate(x.shape))  # `narrow` refuses 0
    return as_strided(x, sizes, tuple(x.stride()), x.storage_offset() + start * x.stride()[dim])


def _unfold(x: Tensor, dim: int, size: int, step: int) -> Tensor:
    count = (x.shape[dim] - size) // step + 1
    sizes = (*x.shape[:dim], count, *x.shape[dim + 1 :], size)
    strides = (*x.stride()[:dim], x.stride()[dim] * step, *x.stride()[dim + 1 :], x.stride()[dim])
    return as_strided(x, sizes, strides, x.storage_offset())


def _part(x: Tensor, part: int) -> Tensor:
    real = {ms.complex64: ms.float32, ms.complex128: ms.float64}[x.dtype]
    sizes, strides = tuple(x.shape), tuple(2 * stride for stride in x.stride())
    return as_strided(x.view(real), sizes, strides, 2 * x.storage_offset() + part)


_VIEWS: dict[str, Callable[..., Tensor]] = {
    "as_strided": as_strided,
    "chunk": lambda x, chunks, dim, i: x.chunk(chunks, dim)[i],
    "detach": ops.stop_gradient,
    "diagonal": lambda x: x.diagonal(),
    "dtype": lambda x, name: x.view(getattr(ms, name)),
    "expand": lambda x, *sizes: x.expand(sizes),
    "imag": lambda x: _part(x, 1),
    "narrow": _narrow,
    "permute": lambda x, *dims: x.permute(*dims),
    "real": lambda x: _part(x, 0),
    "select": lambda x, dim, i: x.select(dim, i),
    "squeeze": lambda x, dim: x.squeeze(dim),
    "step": lambda x, dim, step: x[(slice(None),) * dim + (slice(None, None, step),)],
    "t": lambda x: x.t(),
    "transpose": lambda x, a, b: x.transpose(a, b),
    "unfold": _unfold,
    "unsqueeze": lambda x, dim: x.unsqueeze(dim),
    "view": lambda x, *sizes: x.view(sizes),
}


def digest(elements: np.ndarray) -> int:
    """A number that depends on each byte and its place."""
    raw = np.frombuffer(elements.tobytes(), np.uint8).astype(np.int64)
    return 1 + elements.ndim + int((raw * (np.arange(raw.size) % 251 + 1)).sum())


class _Reading:
    def __init__(self, restored: list[Tensor] | None, reads: int, peek: int | None) -> None:
        self.restored = restored
        self.reads = reads
        self.peek = peek


class _Save(_Function):
    @staticmethod
    def forward(ctx, anchor, reading, *tensors):
        ctx.save_for_backward(*tensors)
        ctx.reading = reading
        return anchor.copy()

    @staticmethod
    def backward(ctx, grad):
        reading = ctx.reading
        total = count = 0
        for _ in range(reading.reads):
            tensors = ctx.saved_tensors
            count = len(tensors)
            for i, tensor in enumerate(tensors):
                elements = memory.elements(tensor)
                if reading.peek:
                    elements = elements[(slice(reading.peek),) * elements.ndim]
                total += (i + 1) * digest(elements)
            if reading.restored is not None:
                reading.restored.extend(tensors)
        return grad * total, None, *(None for _ in range(count))


class _Square(_Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x * 2


class MindSporePass:
    def __init__(self, output: Tensor, leaves: Sequence[Tensor]) -> None:
        self.output = output
        self._leaves = tuple(leaves)

    def gradients(self, retain: bool = False) -> list[Tensor | None]:
        return differentiate(self.output, self._leaves, retain)


def differentiate(
    output: Tensor, leaves: Sequence[Tensor], retain: bool = False, record: bool = False
) -> list[Tensor | None]:
    """Backward from ones. ``record``: the gradients can be differentiated again."""
    ones = ops.ones_like(output)
    with recording(record):
        found = run_backward(
            (output,), (ones,), retain or record, record, tuple(leaves), True, accumulate_grad=False
        )
    return list(found)


@contextlib.contextmanager
def recording(on: bool = True) -> Iterator[None]:
    before = executor.grad_flag()
    executor.set_grad_flag(on)
    try:
        yield
    finally:
        executor.set_grad_flag(before)


class MindSporeBackend:
    """See :class:`protocol.Backend`."""

    device = "cpu"
    counts_holders = False
    waits = True  # while a storage is held, a view of it is known to be one

    def __init__(self, tier: str, **options: Any) -> None:
        self.tier = tier
        self.exact = EXACT | options
        self.prefetches = options.get("prefetch_bytes") != 0
        self.packs = bool(options.get("group_swap"))
        self.name = f"mindspore-cpu-{tier}"

    def begin(self) -> None:
        pass

    def end(self) -> None:
        memory.drop_unfinished_graphs()

    def require(self, what: str) -> None:
        if what in THINGS:
            pytest.skip(THINGS[what])

    def hide_use_counts(self, monkeypatch: Any) -> None:
        monkeypatch.setattr(
            "ebbtide.mindspore.framework.MindSporeFramework.holders", lambda self, held: None
        )

    def expect_torn_copies(self) -> None:
        pass

    def settle(self) -> None:
        pass

    def offload(self, model: Any = None, **options: Any) -> Any:
        return ebb.offload(
            model, **({"to": self.tier, "device": self.device} | self.exact | options)
        )

    def leaf(self, *sizes: int, dtype: str = "float64", seed: int = 0) -> Tensor:
        values = np.random.default_rng(seed).standard_normal(sizes)
        leaf = Tensor(values, dtype=self._dtype(dtype))
        leaf.requires_grad_()
        return leaf

    def tensor(self, *sizes: int, dtype: str = "float32", seed: int = 0) -> Tensor:
        tensor = mint.empty(sizes, dtype=self._dtype(dtype))
        memory.elements(tensor)[...] = self._random(tensor, seed)
        return tensor

    def _dtype(self, name: str) -> Any:
        if name in DTYPES:
            pytest.skip(DTYPES[name])
        return getattr(ms, name)

    def _random(self, tensor: Tensor, seed: int) -> np.ndarray:
        high = 2 if tensor.dtype == ms.bool_ else 256
        kind = memory.numpy_dtype(tensor)
        raw = np.random.default_rng(seed).integers(
            high, size=(int(np.prod(tensor.shape)) * kind.itemsize,), dtype=np.uint8
        )
        return raw.view(kind).reshape(tensor.shape)

    def op(self, name: str, *tensors: Any, **options: Any) -> Tensor:
        if name in OPS:
            pytest.skip(OPS[name])
        return _OPS[name](*tensors, **options)

    def view(self, tensor: Tensor, *steps: Step) -> Tensor:
        view = tensor
        for name, *args in steps:
            if name in VIEWS:
                pytest.skip(VIEWS[name])
            view = _VIEWS[name](view, *args)
        assert self.same_storage(tensor, view), f"{steps} made a copy"
        return view

    def save(
        self,
        anchor: Tensor,
        tensors: Sequence[Tensor],
        *,
        restored: list[Tensor] | None = None,
        reads: int = 1,
        peek: int | None = None,
    ) -> Tensor:
        return _Save.apply(anchor, _Reading(restored, reads, peek), *tensors)

    def square(self, x: Tensor) -> Tensor:
        return _Square.apply(x)

    def around(self, array: Any) -> Tensor:
        return Tensor.from_numpy(array)

    def numpy(self, tensor: Tensor) -> Any:
        return memory.elements(tensor)

    def network(self, width: int = 8, seed: int = 0) -> Network:
        ms.set_seed(seed)
        model = nn.SequentialCell(
            nn.Dense(width, 2 * width),
            nn.GELU(),
            nn.LayerNorm((2 * width,)),
            nn.Dense(2 * width, width),
        )
        return Network(model, list(model.trainable_params()), model)

    def recording(self) -> contextlib.AbstractContextManager[Any]:
        return recording()

    def no_grad(self) -> contextlib.AbstractContextManager[Any]:
        return recording(False)

    def gradients(
        self,
        output: Tensor,
        tensors: Sequence[Tensor],
        *,
        retain: bool = False,
        record: bool = False,
    ) -> list[Tensor | None]:
        return differentiate(output, tensors, retain, record)

    def forward(
        self, program: Program, leaves: Sequence[Tensor], tide: Any = None
    ) -> MindSporePass:
        with recording(), contextlib.nullcontext() if tide is None else tide:
            output = program(*leaves)
        return MindSporePass(output, leaves)

    def bits(self, tensor: Tensor) -> bytes:
        return memory.elements(tensor).tobytes()

    def layout(self, tensor: Tensor) -> Layout:
        return Layout(
            memory.dtype_name(tensor),
            tensor.storage_offset(),
            tuple(tensor.shape),
            tuple(tensor.stride()),
            "cpu",
            False,
            False,
        )

    def storage_nbytes(self, tensor: Tensor) -> int:
        return tensor.untyped_storage().nbytes()

    def same_storage(self, *tensors: Tensor) -> bool:
        return len({memory.storage_address(tensor) for tensor in tensors}) == 1

    def address(self, tensor: Tensor) -> int:
        offset = tensor.storage_offset() * memory.numpy_dtype(tensor).itemsize
        return memory.storage_address(tensor) + offset

    def version(self, tensor: Tensor) -> int:
        return tensor._version

    def write(self, tensor: Tensor, seed: int = 1, counted: bool = True) -> None:
        values = self._random(tensor, seed)
        if counted and tensor.is_contiguous() and tensor.storage_offset() == 0:
            source = mint.empty(tuple(tensor.shape), dtype=tensor.dtype)
            memory.elements(source)[...] = values
            tensor.copy_(source)
        else:
            # MindSpore's own `copy_` into a strided view is lost on the CPU.
            memory.elements(tensor)[...] = values
