"""What the allocator is told of the streams that use a storage."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from saving import NBYTES, N, overwrite, overwritten, side_stream

from ebbtide.torch.framework import _streams


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
