"""The directory of the disk tier where none was named; file systems that are memory."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from ebbtide import UsageError, disk_directory
from ebbtide.disk_directory import default_disk_directory


def test_candidates_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary, current = tmp_path / "temporary", tmp_path / "current"
    temporary.mkdir()
    current.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.chdir(current)
    in_memory = [("/", "ext4"), (str(temporary), "tmpfs")]
    assert default_disk_directory(mounts=[("/", "ext4")]) == temporary
    assert default_disk_directory(mounts=in_memory) == Path("/var/tmp")
    in_memory += [("/var", "ramfs")]
    assert default_disk_directory(mounts=in_memory) == current
    in_memory += [(str(current), "tmpfs")]
    with pytest.raises(UsageError) as caught:
        default_disk_directory(mounts=in_memory)
    text = str(caught.value)
    assert text.startswith("[OffloadConfig.to] no directory for the disk tier (")
    for part in (f"{temporary} is in memory (tmpfs)", "/var/tmp is in memory (ramfs)"):
        assert part in text
    assert text.endswith("give to=<a directory on a disk>, or set allow_tmpfs")
    assert default_disk_directory(True, in_memory) == temporary
    temporary.rmdir()
    assert default_disk_directory(True, in_memory) == Path("/var/tmp")


def test_a_removed_current_directory_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def removed() -> str:
        raise FileNotFoundError

    monkeypatch.setattr(tempfile, "gettempdir", removed)
    monkeypatch.setattr(os, "getcwd", removed)
    assert default_disk_directory(mounts=[("/", "ext4")]) == Path("/var/tmp")


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/a", "ext4"),
        ("/mnt", "xfs"),  # mounted later, over the tmpfs
        ("/mnt/x", "xfs"),
        ("/mntx", "ext4"),
        ("/mnt/x y/z", "tmpfs"),
    ],
)
def test_file_systems(
    path: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "d / ext4 rw 0 0\nn /mnt tmpfs rw 0 0\nd /mnt xfs rw 0 0\nn /mnt/x\\040y tmpfs rw 0 0\n"
    )
    monkeypatch.setattr(disk_directory, "_MOUNTS", mounts)
    assert disk_directory._file_system(Path(path), disk_directory._read_mounts()) == kind


def test_mounts_where_there_is_no_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_directory, "_MOUNTS", tmp_path / "absent")
    assert all(len(mount) == 2 for mount in disk_directory._read_mounts())
