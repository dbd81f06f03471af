"""What the tests share: the exact configuration, comparison by bits, the at-rest check."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import ebbtide.torch as ebb

# What the process tests: one framework on one device, by EBBTIDE_TEST_BACKEND.
BACKEND = os.environ.get("EBBTIDE_TEST_BACKEND", "torch-cpu")
DEVICE = "tide" if BACKEND == "torch-tide" else "cpu"

disk_first = pytest.mark.skipif(
    DEVICE != "cpu", reason="from an accelerator, host memory comes before the disk"
)

# Nothing is held back: every storage is copied as soon as nobody else holds it, and copies are waited for.
EXACT: dict[str, Any] = {"min_bytes": 0, "keep_last_bytes": 0, "in_flight_bytes": 0}


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


def assert_at_rest(tide: ebb.Offload) -> None:
    """Nothing is held any more; without a garbage collector run."""
    end_backward()
    tide.synchronize()
    stats = tide.stats()
    held = (stats.entries, stats.device_bytes, stats.host_bytes, stats.disk_bytes, stats.parked)
    assert held == (0, 0, 0, 0, 0), stats


def assert_loaded(tide: ebb.Offload) -> None:
    """The test moved bytes: without this a test of restores could pass on live hits alone."""
    stats = tide.stats()
    assert stats.d2h_bytes > 0, stats
    assert stats.h2d_bytes > 0, stats
