"""Disk behind the host tier: what does not fit goes on to a file and comes back, within the cap, or with a stated error."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from copy_streams import host_copies_seen
from faulty_steps import STORAGES, Step, offload
from saving import NEXT_BLOCK, assert_all_at_rest

import ebbtide.torch as ebb
from ebbtide import CorruptionError, HostMemoryError, SpillError

TORCH_TESTS = Path(__file__).resolve().parents[1] / "torch"
pytestmark = pytest.mark.filterwarnings("ignore:.*no room for")


@pytest.fixture
def descriptors(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TORCH_TESTS))
    import descriptors

    return descriptors


@pytest.fixture
def step(control: ModuleType) -> Iterator[Step]:
    gc.collect()
    gc.disable()
    with host_copies_seen(control):
        made = Step(control)
        ebb.trim()  # the slab that others were allowed
        yield made
    ebb.trim()
    gc.enable()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("blocks", [2, 3, 4, 8])
def test_spilled_bytes_come_back_within_the_cap(
    blocks: int, packed: bool, step: Step, control: ModuleType, tmp_path: Path
) -> None:
    tide = offload(to=tmp_path, max_host_bytes=blocks * NEXT_BLOCK, group_swap=packed)
    for _ in range(3):
        output = step.output(tide, settled=True)
        assert tide.stats().host_reserved_bytes <= blocks * NEXT_BLOCK
        assert step.is_right(step.gradient(output, retain_graph=True))
        assert step.is_right(step.gradient(output))
        del output
        assert_all_at_rest(tide)
    stats = tide.stats()
    assert stats.peak_host_bytes <= blocks * NEXT_BLOCK
    assert (stats.spilled_bytes > 0) == (blocks < STORAGES)
    assert not control.races()


def test_a_full_disk_keeps_what_does_not_fit(
    step: Step, tmp_path: Path, descriptors: ModuleType
) -> None:
    tide = offload(to=tmp_path, max_host_bytes=2 * NEXT_BLOCK)
    with descriptors.full_disk(tmp_path):
        output = step.output(tide, settled=True)
    assert tide.stats().kept["disk_full"] > 0
    assert tide.stats().kept["host_full"] == 0
    assert step.is_right(step.gradient(output))
    del output
    assert_all_at_rest(tide)


@pytest.mark.parametrize("damage", ["flipped", "bad_disk"])
def test_a_damaged_file_is_a_stated_error_and_the_copy_is_kept(
    damage: str, step: Step, tmp_path: Path, descriptors: ModuleType
) -> None:
    tide = offload(to=tmp_path, max_host_bytes=2 * NEXT_BLOCK)
    output = step.output(tide, settled=True)
    text = ""
    with getattr(descriptors, damage)(tmp_path):
        try:
            step.gradient(output, retain_graph=True)
        except CorruptionError as error:
            text = f"{damage == 'flipped'}: {error}"
        except (SpillError, HostMemoryError) as error:  # nothing can be written either: no room
            text = f"{damage == 'bad_disk'}: {error}"
    assert text.startswith("True")
    torch.accelerator.synchronize(0)
    assert step.is_right(step.gradient(output))
    del output
    assert_all_at_rest(tide)


def test_the_file_has_no_name(step: Step, tmp_path: Path) -> None:
    tide = offload(to=tmp_path, max_host_bytes=2 * NEXT_BLOCK)
    output = step.output(tide, settled=True)
    assert tide.stats().spilled_bytes > 0
    assert list(tmp_path.iterdir()) == []  # nothing to unlink
    assert step.is_right(step.gradient(output))
