"""Directories for the disk tier: on a disk, writable, not in memory."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

from ebbtide.errors import UsageError

__all__ = ["default_disk_directory", "usable_directory"]

_IN_MEMORY = frozenset({"tmpfs", "ramfs"})
_MOUNTS = Path("/proc/self/mounts")


def default_disk_directory(
    allow_tmpfs: bool = False, mounts: Iterable[tuple[str, str]] | None = None
) -> Path:
    """A writable directory on a disk: the temporary one, ``/var/tmp`` or the current one.

    The first that fits. With ``allow_tmpfs``, one in memory is taken where none is on a disk.
    ``mounts`` are (mount point, file system) pairs in the order of mounting; read from the system
    by default.

    Raises:
        UsageError: there is none.
    """
    mounts = _read_mounts() if mounts is None else list(mounts)
    refused: list[str] = []
    in_memory: list[Path] = []
    for candidate in _candidates():
        reason = _unusable(candidate)
        if reason is None:
            kind = _file_system(candidate, mounts)
            if kind not in _IN_MEMORY:
                return candidate
            in_memory.append(candidate)
            reason = f"is in memory ({kind})"
        refused.append(f"{candidate} {reason}")
    if allow_tmpfs and in_memory:
        return in_memory[0]
    raise UsageError(
        f"[OffloadConfig.to] no directory for the disk tier ({', '.join(refused) or 'none exists'})"
        ": give to=<a directory on a disk>, or set allow_tmpfs"
    )


def _candidates() -> list[Path]:
    found: list[Path] = []
    sources: tuple[Callable[[], str], ...] = (tempfile.gettempdir, lambda: "/var/tmp", os.getcwd)
    for source in sources:
        try:
            path = Path(source())
        except OSError:  # no temporary directory at all, or the current one was removed
            continue
        if path not in found:
            found.append(path)
    return found


def usable_directory(directory: Path, allow_tmpfs: bool) -> Path:
    """``directory`` itself. Raises UsageError where the disk tier cannot be in it."""
    reason = _unusable(directory)
    if reason is not None:
        raise UsageError(
            f"[OffloadConfig.to] {directory} {reason}: "
            "create it or give a directory you can write to"
        )
    if not allow_tmpfs and (kind := _file_system(directory, _read_mounts())) in _IN_MEMORY:
        raise UsageError(
            f"[OffloadConfig.to] {directory} is in memory ({kind}), not on a disk: "
            "give a directory on a disk or set allow_tmpfs"
        )
    return directory


def _unusable(directory: Path) -> str | None:
    """Why no file can be made in ``directory``; None when one can."""
    if not os.path.lexists(directory):
        return "does not exist"
    if not os.path.isdir(directory):
        return "is not a directory"
    if not os.access(directory, os.W_OK | os.X_OK):
        return "is not writable"
    return None


def _file_system(directory: Path, mounts: Iterable[tuple[str, str]]) -> str:
    """The type of the file system that holds ``directory``; empty where it is not known."""
    real = os.path.realpath(directory)
    best, kind = "", ""
    for point, file_system in mounts:
        # Of two mounts at one point the later covers the earlier.
        if len(point) >= len(best) and (real + "/").startswith(point.rstrip("/") + "/"):
            best, kind = point, file_system
    return kind


def _read_mounts() -> list[tuple[str, str]]:
    try:
        text = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:  # not Linux
        return [(part.mountpoint, part.fstype) for part in psutil.disk_partitions(all=True)]
    rows = (line.split(" ") for line in text.splitlines())
    return [(_unescape(row[1]), row[2]) for row in rows if len(row) > 2]


def _unescape(point: str) -> str:
    """Undoes the octal escapes of blank, tab, newline and backslash."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), point)
