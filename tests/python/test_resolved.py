"""What options come to on a machine: defaults by device, tier and memory; directories that are no disk."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from pathlib import Path

import pytest

import ebbtide.resolved
from ebbtide import OffloadConfig, UsageError, disk_directory
from ebbtide.resolved import Resolved

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

SIZES = "min_bytes keep_last_bytes prefetch_bytes in_flight_bytes max_host_bytes max_disk_bytes"


pytestmark = pytest.mark.usefixtures("without_options_in_the_environment")


def mount(directory: Path, line: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory, now the one for temporary files, on what a line of the table of mounts says."""
    mounts = directory / "mounts"
    mounts.write_text(line)
    monkeypatch.setattr(disk_directory, "_MOUNTS", mounts)
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary directory that counts as a disk, whatever this machine has."""
    return mount(tmp_path, "disk / ext4 rw 0 0\n", monkeypatch)


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary directory that counts as memory, as does everything else."""
    return mount(tmp_path, "none / tmpfs rw 0 0\n", monkeypatch)


def test_defaults_on_an_accelerator() -> None:
    resolved = Resolved.from_config(OffloadConfig(), "cuda", True, 80 * GIB)
    assert (resolved.device_type, resolved.tier, resolved.directory) == ("cuda", "host", None)
    assert resolved.min_bytes == 256 * KIB
    assert resolved.keep_last_bytes == 128 * MIB
    assert resolved.prefetch_bytes == 256 * MIB
    assert resolved.in_flight_bytes == GIB
    assert resolved.max_disk_bytes is None
    assert (resolved.keep_last_groups, resolved.prefetch_groups) == (1, 1)
    assert (resolved.group_swap, resolved.pack_below_bytes) == (False, 0)
    assert (resolved.only, resolved.on_inplace) == ("saved", "error")
    assert (resolved.allow_tmpfs, resolved.tune_malloc) == (False, True)


def test_defaults_for_cpu_tensors(disk: Path) -> None:
    resolved = Resolved.from_config(OffloadConfig(), "cpu", False, 0)
    assert (resolved.tier, resolved.directory) == ("disk", disk)
    assert resolved.min_bytes == 64 * KIB
    assert resolved.keep_last_bytes == 32 * MIB
    assert resolved.prefetch_bytes == 64 * MIB
    assert resolved.in_flight_bytes == 64 * MIB
    assert (resolved.keep_last_groups, resolved.prefetch_groups) == (None, None)
    assert resolved.prefetch_to_peak
    given = Resolved.from_config(OffloadConfig(prefetch_bytes="64MiB"), "cpu", False, 0)
    assert not given.prefetch_to_peak
    asked = Resolved.from_config(
        OffloadConfig(keep_last_groups=2, prefetch_groups=0), "cpu", False, 0
    )
    assert (asked.keep_last_groups, asked.prefetch_groups) == (2, 0)


@pytest.mark.parametrize(
    ("total", "in_flight"), [(80 * GIB, GIB), (5 * GIB, GIB // 2), (1000, 100), (0, GIB)]
)
def test_in_flight_is_a_share_of_the_device(total: int, in_flight: int) -> None:
    assert Resolved.from_config(OffloadConfig(), "cuda", True, total).in_flight_bytes == in_flight


@pytest.mark.parametrize("accelerator", [True, False])
@pytest.mark.parametrize("to", ["host", "disk"])
def test_the_tier_decides_min_bytes(accelerator: bool, to: str, disk: Path) -> None:
    resolved = Resolved.from_config(OffloadConfig(to=to), "x", accelerator, GIB)
    assert resolved.tier == to
    assert resolved.min_bytes == (256 if to == "host" else 64) * KIB


@pytest.mark.parametrize("accelerator", [True, False])
@pytest.mark.parametrize("to", ["host", "disk"])
def test_group_swap_packs_and_takes_smaller_storages(
    accelerator: bool, to: str, disk: Path
) -> None:
    resolved = Resolved.from_config(OffloadConfig(to=to, group_swap=True), "x", accelerator, GIB)
    assert (resolved.group_swap, resolved.pack_below_bytes) == (True, 400_000)
    assert resolved.min_bytes == 64 * KIB
    given = Resolved.from_config(
        OffloadConfig(to=to, group_swap=True, min_bytes=7), "x", accelerator, GIB
    )
    assert given.min_bytes == 7


@pytest.mark.parametrize("what", ["keep_last", "prefetch"])
@pytest.mark.parametrize(
    ("options", "nbytes", "groups"),
    [({}, None, 1), ({"groups": 0}, None, 0), ({"groups": 3}, None, 3), ({"bytes": 0}, 0, None)],
)
def test_groups_decide_unless_bytes_are_given(
    what: str, options: dict[str, int], nbytes: int | None, groups: int | None
) -> None:
    default = Resolved.from_config(OffloadConfig(), "cuda", True, GIB)
    given = {f"{what}_{unit}": value for unit, value in options.items()}
    resolved = Resolved.from_config(OffloadConfig.from_options(**given), "cuda", True, GIB)
    expected = getattr(default, f"{what}_bytes") if nbytes is None else nbytes
    assert getattr(resolved, f"{what}_bytes") == expected
    assert getattr(resolved, f"{what}_groups") == groups
    other = "prefetch" if what == "keep_last" else "keep_last"
    assert getattr(resolved, f"{other}_groups") == 1


def test_a_disk_behind_host_memory_has_both_caps(disk: Path) -> None:
    made = OffloadConfig(to=disk, max_host_bytes="1MiB", max_disk_bytes="1GiB")
    resolved = Resolved.from_config(made, "cuda", True, GIB)
    assert (resolved.max_host_bytes, resolved.max_disk_bytes) == (MIB, GIB)


def test_what_was_asked_for_is_used(disk: Path) -> None:
    sizes = {name: number for number, name in enumerate(SIZES.split())}
    made = OffloadConfig.from_options(
        to=disk, only="layer_inputs", on_inplace="saved", tune_malloc=False, **sizes
    )
    resolved = dataclasses.asdict(Resolved.from_config(made, "cuda", True, GIB))
    assert {name: resolved[name] for name in sizes} == sizes
    assert (resolved["tier"], resolved["directory"]) == ("disk", disk)
    assert (resolved["only"], resolved["on_inplace"]) == ("layer_inputs", "saved")
    assert resolved["tune_malloc"] is False


def test_max_host_bytes_comes_from_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ebbtide.resolved, "default_max_host_bytes", lambda: 77)
    assert Resolved.from_config(OffloadConfig(), "cuda", True, GIB).max_host_bytes == 77
    assert (
        Resolved.from_config(OffloadConfig(max_host_bytes=5), "cuda", True, GIB).max_host_bytes == 5
    )


def test_an_absent_directory(disk: Path) -> None:
    with pytest.raises(UsageError) as caught:
        Resolved.from_config(OffloadConfig(to=disk / "absent/"), "cuda", True, GIB)
    text = str(caught.value)
    assert text.startswith(f"[OffloadConfig.to] {disk / 'absent'} does not exist: create it")
    assert not (disk / "absent").exists()


def test_a_file_is_no_directory(disk: Path) -> None:
    (disk / "file").touch()
    with pytest.raises(UsageError, match="file is not a directory: create it or give"):
        Resolved.from_config(OffloadConfig(to=disk / "file"), "cuda", True, GIB)


def test_a_directory_that_cannot_be_written(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UsageError, match="is not writable: create it or give"):
        Resolved.from_config(OffloadConfig(to=disk), "cuda", True, GIB)


def test_a_directory_in_memory(memory: Path) -> None:
    with pytest.raises(UsageError) as caught:
        Resolved.from_config(OffloadConfig(to=memory), "cuda", True, GIB)
    text = str(caught.value)
    assert text.startswith(f"[OffloadConfig.to] {memory} is in memory (tmpfs), not on a disk: ")
    assert text.endswith("set allow_tmpfs")
    allowed = Resolved.from_config(OffloadConfig(to=memory, allow_tmpfs=True), "cuda", True, GIB)
    assert (allowed.directory, allowed.allow_tmpfs) == (memory, True)
