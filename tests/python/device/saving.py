"""What the tests of the session on the device save, and where they look for its traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from support import assert_at_rest

N = 3000  # elements; its bytes are no whole number of pages
NBYTES = 4 * N
NEXT_BLOCK = -(-NBYTES // 64) * 64


class _Save(torch.autograd.Function):
    """Equals ``anchor``, lazily; backward multiplies by all that was saved, after calling ``then``."""

    @staticmethod
    def forward(ctx, anchor, then, *tensors):
        ctx.save_for_backward(*tensors)
        ctx.then = then
        return anchor.clone()

    @staticmethod
    def backward(ctx, grad):
        saved = ctx.saved_tensors
        ctx.then()
        for tensor in saved:
            grad = grad * tensor
        return grad, None, *(None for _ in saved)


def nothing() -> None:
    pass


def save(leaf: torch.Tensor, *tensors: torch.Tensor, then: Callable[[], None] = nothing) -> Any:
    return _Save.apply(leaf, then, *tensors)


def leaf(nbytes: int = NBYTES, device: int = 0) -> torch.Tensor:
    return torch.ones(nbytes // 4, device=f"tide:{device}", requires_grad=True)


def overwrite(nbytes: int = NBYTES, device: int = 0) -> Any:
    """Kernels write where the stream's memory was freed last."""
    return [torch.full((nbytes // 4,), -1.0, device=f"tide:{device}") for _ in range(4)]


def overwritten(tensors: list[torch.Tensor]) -> bool:
    return all(bool((tensor == -1).all()) for tensor in tensors)


def gradient(output: torch.Tensor, to: torch.Tensor, **options: Any) -> torch.Tensor:
    return torch.autograd.grad(output, to, torch.ones_like(output), **options)[0]


def settled(tide: Any) -> Any:
    """What is done is reported; something was loaded or will be, so no value came from a live storage."""
    stats = tide.stats()
    assert stats.live_hits == 0, stats
    return stats


def end_backward() -> None:
    """Until a backward that has just ended is let go of: its thread drops the last node after the caller has gone on."""
    for device in range(torch.accelerator.device_count()):
        end = leaf(4, device)
        torch.autograd.grad(end.view(-1), end, torch.ones_like(end))


def assert_all_at_rest(tide: Any) -> None:
    end_backward()
    assert_at_rest(tide)


def main_stream() -> torch.Stream:
    return torch.accelerator.current_stream(0)


def side_stream() -> torch.Stream:
    side = torch.Stream(device="tide")
    side.wait_stream(main_stream())
    return side
