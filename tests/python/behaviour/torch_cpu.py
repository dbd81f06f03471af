"""PyTorch on the CPU as a backend of the behaviour tests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from protocol import Layout, Network, Program, Step
from support import EXACT
from torch_support import end_backward

import ebbtide.torch as ebb

_F = torch.nn.functional

_OPS: dict[str, Callable[..., torch.Tensor]] = {
    "add": torch.add,
    "clone": torch.clone,
    "cos": torch.cos,
    "exp": torch.exp,
    "gelu": _F.gelu,
    "layer_norm": lambda x, w, b: _F.layer_norm(x, x.shape[-1:], w, b),
    "linear": _F.linear,
    "matmul": torch.matmul,
    "mul": torch.mul,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "sin": torch.sin,
    "softmax": lambda x: torch.softmax(x, -1),
    "sum": torch.sum,
    "tanh": torch.tanh,
}

_VIEWS: dict[str, Callable[..., torch.Tensor]] = {
    "as_strided": torch.Tensor.as_strided,
    "chunk": lambda x, chunks, dim, i: x.chunk(chunks, dim)[i],
    "conj": torch.conj,
    "detach": torch.Tensor.detach,
    "diagonal": torch.diagonal,
    "dtype": lambda x, name: x.view(getattr(torch, name)),
    "expand": lambda x, *sizes: x.expand(*sizes),
    "imag": torch.imag,
    "narrow": torch.narrow,
    "neg": torch._neg_view,
    "permute": lambda x, *dims: x.permute(*dims),
    "real": torch.real,
    "select": torch.select,
    "squeeze": torch.squeeze,
    "step": lambda x, dim, step: x[(slice(None),) * dim + (slice(None, None, step),)],
    "t": torch.t,
    "transpose": torch.transpose,
    "unfold": torch.Tensor.unfold,
    "unsqueeze": torch.unsqueeze,
    "view": lambda x, *sizes: x.view(*sizes),
}


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in order of index, as bytes. A copy: strides of size-1 dimensions are odd at times."""
    if tensor.numel() == 0:
        return torch.empty(0, dtype=torch.uint8)
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def digest(tensor: torch.Tensor) -> int:
    """A number that depends on each byte and its place."""
    raw = _raw(tensor)
    weights = torch.arange(raw.numel(), device=raw.device) % 251 + 1
    return 1 + tensor.dim() + int((raw.to(torch.int64) * weights).sum())


class _Reading:
    def __init__(self, restored: list[torch.Tensor] | None, reads: int, peek: int | None) -> None:
        self.restored = restored
        self.reads = reads
        self.peek = peek


class _Save(torch.autograd.Function):
    @staticmethod
    def forward(ctx, anchor, reading, *tensors):
        ctx.save_for_backward(*tensors)
        ctx.reading = reading
        return anchor.clone()

    @staticmethod
    def backward(ctx, grad):
        reading = ctx.reading
        total = 0
        for _ in range(reading.reads):
            tensors = ctx.saved_tensors
            for i, tensor in enumerate(tensors):
                # `[...]` of a tensor is a view: the mark of what was read stays a plain sum.
                seen = tensor[(slice(reading.peek),) * tensor.dim()] if reading.peek else tensor
                total += (i + 1) * digest(seen)
            if reading.restored is not None:
                reading.restored.extend(tensors)
        return grad * total, None, *(None for _ in tensors)


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x * 2


class TorchPass:
    def __init__(self, output: torch.Tensor, leaves: Sequence[torch.Tensor]) -> None:
        self.output = output
        self._leaves = leaves

    def gradients(self, retain: bool = False) -> list[torch.Tensor | None]:
        return differentiate(self.output, self._leaves, retain)


def differentiate(
    output: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    retain: bool = False,
    record: bool = False,
) -> list[torch.Tensor | None]:
    grads = torch.autograd.grad(
        output,
        tensors,
        torch.ones_like(output),
        retain_graph=retain or record,
        create_graph=record,
        allow_unused=True,
    )
    end_backward()
    return list(grads)


class TorchBackend:
    """See :class:`protocol.Backend`."""

    device = "cpu"
    counts_holders = True

    def __init__(self, tier: str, **options: Any) -> None:
        self.tier = tier
        self.exact = EXACT | options
        self.prefetches = options.get("prefetch_bytes") != 0
        self.packs = self.waits = bool(options.get("group_swap"))
        self.name = f"torch-{self.device}-{tier}"

    def begin(self) -> None:
        pass

    def end(self) -> None:
        pass

    def require(self, what: str) -> None:
        pass

    def hide_use_counts(self, monkeypatch: Any) -> None:
        monkeypatch.setattr("ebbtide.torch.framework._use_count", None)
        self.counts_holders = False

    def expect_torn_copies(self) -> None:
        pass

    def settle(self) -> None:
        pass

    def offload(self, model: Any = None, **options: Any) -> ebb.Offload:
        return ebb.offload(
            model, **({"to": self.tier, "device": self.device} | self.exact | options)
        )

    def leaf(self, *sizes: int, dtype: str = "float64", seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(sizes, dtype=getattr(torch, dtype), generator=generator, device="cpu")
        return values.to(self.device).requires_grad_()

    def tensor(self, *sizes: int, dtype: str = "float32", seed: int = 0) -> torch.Tensor:
        tensor = torch.empty(sizes, dtype=getattr(torch, dtype), device=self.device)
        self._fill(tensor, seed)
        return tensor

    def _fill(self, tensor: torch.Tensor, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        high = 2 if tensor.dtype == torch.bool else 256
        nbytes = tensor.numel() * tensor.element_size()
        raw = torch.randint(high, (nbytes,), dtype=torch.uint8, generator=generator, device="cpu")
        tensor.copy_(raw.view(tensor.dtype).view(tensor.shape))

    def op(self, name: str, *tensors: Any, **options: Any) -> torch.Tensor:
        return _OPS[name](*tensors, **options)

    def view(self, tensor: torch.Tensor, *steps: Step) -> torch.Tensor:
        view = tensor
        for name, *args in steps:
            view = _VIEWS[name](view, *args)
        assert self.same_storage(tensor, view), f"{steps} made a copy"
        return view

    def save(
        self,
        anchor: torch.Tensor,
        tensors: Sequence[torch.Tensor],
        *,
        restored: list[torch.Tensor] | None = None,
        reads: int = 1,
        peek: int | None = None,
    ) -> torch.Tensor:
        return _Save.apply(anchor, _Reading(restored, reads, peek), *tensors)

    def square(self, x: torch.Tensor) -> torch.Tensor:
        return _Square.apply(x)

    def around(self, array: Any) -> torch.Tensor:
        self.require("host memory")
        return torch.from_numpy(array)

    def numpy(self, tensor: torch.Tensor) -> Any:
        self.require("host memory")
        return tensor.numpy()

    def network(self, width: int = 8, seed: int = 0) -> Network:
        torch.manual_seed(seed)
        with torch.device(self.device):
            model = torch.nn.Sequential(
                torch.nn.Linear(width, 2 * width),
                torch.nn.GELU(),
                torch.nn.LayerNorm(2 * width),
                torch.nn.Linear(2 * width, width),
            )
        return Network(model, list(model.parameters()), model)

    def recording(self) -> contextlib.AbstractContextManager[Any]:
        return torch.enable_grad()

    def no_grad(self) -> contextlib.AbstractContextManager[Any]:
        return torch.no_grad()

    def gradients(
        self,
        output: torch.Tensor,
        tensors: Sequence[torch.Tensor],
        *,
        retain: bool = False,
        record: bool = False,
    ) -> list[torch.Tensor | None]:
        return differentiate(output, tensors, retain, record)

    def forward(
        self, program: Program, leaves: Sequence[torch.Tensor], tide: Any = None
    ) -> TorchPass:
        with contextlib.nullcontext() if tide is None else tide:
            output = program(*leaves)
        return TorchPass(output, leaves)

    def bits(self, tensor: torch.Tensor) -> bytes:
        return _raw(tensor).cpu().numpy().tobytes()

    def layout(self, tensor: torch.Tensor) -> Layout:
        return Layout(
            str(tensor.dtype).removeprefix("torch."),
            tensor.storage_offset(),
            tuple(tensor.shape),
            tensor.stride(),
            str(tensor.device),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def storage_nbytes(self, tensor: torch.Tensor) -> int:
        return tensor.untyped_storage().nbytes()

    def same_storage(self, *tensors: torch.Tensor) -> bool:
        return len({tensor.untyped_storage()._cdata for tensor in tensors}) == 1

    def address(self, tensor: torch.Tensor) -> int:
        # `data_ptr()` of a tensor with a lazy bit is refused on some devices.
        offset = tensor.storage_offset() * tensor.element_size()
        return tensor.untyped_storage().data_ptr() + offset

    def version(self, tensor: torch.Tensor) -> int:
        return tensor._version

    def write(self, tensor: torch.Tensor, seed: int = 1, counted: bool = True) -> None:
        with torch.no_grad():
            self._fill(tensor if counted else tensor.data, seed)
