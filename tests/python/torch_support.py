"""What the tests of PyTorch share: the test device, comparison by bits, the end of a backward."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from support import DEVICE


def load_test_device() -> None:
    """The device of tests/device as torch's accelerator; skips the test where it cannot be built."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "device"))
    try:
        import tide_device  # noqa: F401
    except ImportError as error:
        pytest.skip(f"THE TEST DEVICE CANNOT BE BUILT HERE, nothing of it was tested: {error}")


def device_races() -> list[str]:
    """What the test device has seen since it was asked last: pairs of accesses without order."""
    from tide_device import control

    for index in range(torch.accelerator.device_count()):
        torch.accelerator.synchronize(index)
    races = [str(race) for race in control.races()]
    control.reset()
    return races


def assert_no_races() -> None:
    races = device_races()
    assert not races, races


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal shape, dtype and bits; NaNs compare by their bits too."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(_bits(a), _bits(b))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements' bytes in order of index. A copy: where a size is 1, strides may be odd."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    plain = plain.clone(memory_format=torch.contiguous_format)
    return plain.reshape(-1).view(torch.uint8)


def assert_same_bits(
    found: Iterable[torch.Tensor | None], expected: Iterable[torch.Tensor | None]
) -> None:
    found, expected = list(found), list(expected)
    assert len(found) == len(expected)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert (a is None) == (b is None), f"tensor {i}: {a is None=} {b is None=}"
        if a is not None and b is not None:
            assert same_bits(a, b), f"tensor {i} of shape {tuple(a.shape)} differs"


def end_backward() -> None:
    """Until what backward has run is let go of: an accelerator's thread drops its last node, and with it the graph, after
    the caller has gone on."""
    if DEVICE == "cpu":
        return
    for index in range(torch.accelerator.device_count()):
        # One thread serves a device: it comes to this when it is done with all before.
        nothing = torch.zeros((), device=f"{DEVICE}:{index}", requires_grad=True)
        torch.autograd.grad(nothing.clone(), nothing)
