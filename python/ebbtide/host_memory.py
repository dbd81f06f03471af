"""How much host memory one process may take: control groups, free memory, ranks on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

__all__ = ["available_bytes", "cgroup_headroom_bytes", "default_max_host_bytes", "local_ranks"]

PROC_CGROUP = Path("/proc/self/cgroup")
CGROUP_ROOT = Path("/sys/fs/cgroup")

# Version 1 says "no limit" with the largest multiple of the page size; no machine has 1 EiB.
_UNLIMITED_BYTES = 1 << 60

# Limit, use, and the line of memory.stat with the page cache that the kernel drops first.
_V1_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2_FILES = ("memory.max", "memory.current", "inactive_file")

# In order of trust. The last counts the workers of all machines: dividing by too many is safe.
_LOCAL_RANK_VARIABLES = (
    "LOCAL_WORLD_SIZE",  # torchrun
    "OMPI_COMM_WORLD_LOCAL_SIZE",  # Open MPI
    "MPI_LOCALNRANKS",  # MPICH, Intel MPI
    "MV2_COMM_WORLD_LOCAL_SIZE",  # MVAPICH
    "PALS_LOCAL_SIZE",  # Cray PALS
    "SLURM_STEP_TASKS_PER_NODE",  # srun: "8", "4(x2)" or "4(x2),3"
    "MS_WORKER_NUM",  # msrun
)


def local_ranks(environ: Mapping[str, str] | None = None) -> int:
    """Processes of this job that share this machine, as the launcher told them; 1 where none did.

    Values that are no positive number are passed over. ``environ`` defaults to ``os.environ``.
    """
    environ = os.environ if environ is None else environ
    for name in _LOCAL_RANK_VARIABLES:
        counts = [part.split("(")[0].strip() for part in environ.get(name, "").split(",")]
        if all(count.isdecimal() for count in counts):
            ranks = max(int(count) for count in counts)
            if ranks > 0:
                return ranks
    return 1


def available_bytes() -> int:
    """Bytes the machine can hand out without swapping. Knows nothing of control groups."""
    return int(psutil.virtual_memory().available)


def cgroup_headroom_bytes(
    proc_cgroup: Path = PROC_CGROUP, cgroup_root: Path = CGROUP_ROOT
) -> int | None:
    """Limit minus use, in bytes, of the tightest memory control group that holds this process.

    Versions 1 and 2, this group and all above it. Page cache that the kernel would drop before it
    denies memory does not count as used. At least 0; None where there is no limit or nothing could
    be read.
    """
    headrooms = [
        headroom
        for directory, files in _memory_groups(proc_cgroup, cgroup_root)
        if (headroom := _headroom(directory, files)) is not None
    ]
    return min(headrooms, default=None)


def default_max_host_bytes(
    environ: Mapping[str, str] | None = None,
    proc_cgroup: Path = PROC_CGROUP,
    cgroup_root: Path = CGROUP_ROOT,
) -> int:
    """Half of what this process could still get, in bytes, shared evenly by the local ranks."""
    free = available_bytes()
    headroom = cgroup_headroom_bytes(proc_cgroup, cgroup_root)
    if headroom is not None:
        free = min(free, headroom)
    return free // 2 // local_ranks(environ)


def _memory_groups(
    proc_cgroup: Path, cgroup_root: Path
) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Directories that may hold a memory limit for this process, with their file names."""
    try:
        lines = proc_cgroup.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        lines = []
    for line in lines:
        hierarchy, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if hierarchy == "0" and not controllers:
            # Beside version 1, version 2 is mounted one level down.
            for mount in (cgroup_root, cgroup_root / "unified"):
                yield from ((directory, _V2_FILES) for directory in _upwards(mount, group))
        elif "memory" in controllers.split(","):
            for mount in {cgroup_root / "memory", cgroup_root / controllers}:
                yield from ((directory, _V1_FILES) for directory in _upwards(mount, group))


def _upwards(mount: Path, group: str) -> Iterator[Path]:
    """``group`` below ``mount`` and everything above it up to ``mount``.

    In a container the group may be named as the machine sees it, while only its own directory is
    mounted, at ``mount``: directories that do not exist are for the reader to pass over.
    """
    parts = [part for part in group.split("/") if part]
    if ".." in parts:  # outside of what this cgroup namespace shows
        parts = []
    for depth in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:depth])


def _headroom(directory: Path, files: tuple[str, str, str]) -> int | None:
    limit_file, usage_file, cache_line = files
    limit = _read_number(directory / limit_file)
    if limit is None or limit >= _UNLIMITED_BYTES:
        return None
    usage = _read_number(directory / usage_file) or 0
    return max(0, limit - max(0, usage - _read_stat(directory / "memory.stat", cache_line)))


def _read_number(path: Path) -> int | None:
    """The number in ``path``; None for "max", nonsense, and what cannot be read."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return int(text) if text.isdecimal() else None


def _read_stat(path: Path, name: str) -> int:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return 0
    for line in lines:
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdecimal():
            return int(value)
    return 0
