"""What the allocator is told of the streams that use a storage."""

from __future__ import annotations

import contextlib
from types import ModuleType
from typing import Any

import pytest
import torch
from saving import NBYTES, N, overwrite, overwritten, side_stream

import ebbtide.torch as ebb
from ebbtide.torch.framework import _streams
from ebbtide.torch.streams import TorchStreams


@pytest.mark.parametrize("lazily", ["conj", "neg"])
def test_the_allocator_is_told_of_the_storage_whatever_a_tensor_leaves_undone(
    lazily: str, control: ModuleType
) -> None:
    """Torch would make another tensor of one with lazy bits, and tell it of that."""
    streams, side = _streams("tide"), side_stream()
    x = torch.arange(2.0 * N).view(N, 2).to("tide")
    saved = torch.view_as_complex(x).conj()
    if lazily == "neg":
        saved = saved.imag
        assert saved.is_neg()
    host = torch.empty(N, 2).pin_memory()
    with side:
        host.copy_(x, non_blocking=True)
        number = streams.current(0)
    streams.record_stream_of(saved, number)
    del x, saved
    other = overwrite(2 * NBYTES)
    side.synchronize()
    assert torch.equal(host, torch.arange(2.0 * N).view(N, 2)) and overwritten(other)
    assert not control.races(), control.races()[0]


def chain(x: torch.Tensor, failing: type[BaseException]) -> torch.Tensor:
    """Each step is tried again where it fails."""
    y = x
    for _ in range(6):
        with contextlib.suppress(failing):
            y = (y * 1.5).sin()
            continue
        y = (y * 1.5).sin()
    return y.sum()


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError, RecursionError])
@pytest.mark.parametrize("number", range(1, 7))
def test_memory_that_the_allocator_could_not_be_told_of_is_not_reused_before_its_copy(
    error: type[BaseException],
    number: int,
    control: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An exception out of a signal handler comes in that very call, and the user tries the operation again."""
    x = torch.randn(N, device="tide", requires_grad=True)
    expected = torch.autograd.grad(chain(x, error), x)[0].cpu()
    tide = ebb.offload(to="host", min_bytes=0, keep_last_bytes=0, in_flight_bytes=0)
    record_stream, calls = TorchStreams.record_stream, iter(range(1, 1 << 30))

    def failing(self: TorchStreams, *arguments: Any) -> None:
        if next(calls) == number:
            raise error
        record_stream(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(TorchStreams, "record_stream", failing)
        with contextlib.suppress(error), tide:  # leaving it may be what is cut short
            loss = chain(x, error)
    assert next(calls) > number
    found = torch.autograd.grad(loss, x)[0].cpu()
    assert torch.equal(found, expected)
    assert not control.races(), control.races()[0]
