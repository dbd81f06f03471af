"""The host memory a process may take follows from control groups, free memory, local ranks."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from ebbtide import host_memory
from ebbtide.host_memory import available_bytes, cgroup_headroom_bytes, default_max_host_bytes
from ebbtide.host_memory import local_ranks as count_local_ranks

MIB = 1 << 20
V1_UNLIMITED = 9223372036854771712


class Groups:
    """A tree of control groups in a temporary directory."""

    def __init__(self, root: Path) -> None:
        self.proc = root / "cgroup"
        self.root = root / "fs"
        self.root.mkdir()

    def process(self, *lines: str) -> None:
        self.proc.write_text("".join(f"{line}\n" for line in lines))

    def group(self, path: str, files: Mapping[str, object]) -> None:
        directory = self.root / path
        directory.mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (directory / name).write_text(f"{value}\n")

    def headroom(self) -> int | None:
        return cgroup_headroom_bytes(self.proc, self.root)


@pytest.fixture
def groups(tmp_path: Path) -> Groups:
    return Groups(tmp_path)


def v2(limit: object, used: int) -> dict[str, object]:
    return {"memory.max": limit, "memory.current": used}


def v1(limit: object, used: int) -> dict[str, object]:
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used}


def test_v2_limit_minus_use(groups: Groups) -> None:
    groups.process("0::/user/job")
    groups.group("user/job", v2(100 * MIB, 30 * MIB))
    assert groups.headroom() == 70 * MIB


def test_v2_the_tightest_group_above_binds(groups: Groups) -> None:
    groups.process("0::/user/job")
    groups.group("user/job", v2("max", 30 * MIB))
    groups.group("user", v2(50 * MIB, 40 * MIB))
    groups.group("", v2(1000 * MIB, 0))
    assert groups.headroom() == 10 * MIB


def test_v2_container_sees_its_own_group_at_the_root(groups: Groups) -> None:
    groups.process("0::/docker/0123")
    groups.group("", v2(64 * MIB, 4 * MIB))
    assert groups.headroom() == 60 * MIB


def test_v2_group_outside_of_the_namespace(groups: Groups) -> None:
    groups.process("0::/../../other")
    groups.group("", v2(64 * MIB, 4 * MIB))
    assert groups.headroom() == 60 * MIB


def test_v1_limit_minus_use(groups: Groups) -> None:
    groups.process("5:cpu:/x", "4:memory:/slurm/job", "0::/")
    groups.group("memory/slurm/job", v1(V1_UNLIMITED, 10 * MIB))
    groups.group("memory/slurm", v1(200 * MIB, 80 * MIB))
    assert groups.headroom() == 120 * MIB


def test_v1_controllers_mounted_together(groups: Groups) -> None:
    groups.process("4:cpu,memory:/job")
    groups.group("cpu,memory/job", v1(200 * MIB, 80 * MIB))
    assert groups.headroom() == 120 * MIB


def test_v2_beside_v1(groups: Groups) -> None:
    groups.process("4:memory:/", "0::/job")
    groups.group("memory", v1(V1_UNLIMITED, 0))
    groups.group("unified/job", v2(20 * MIB, 5 * MIB))
    assert groups.headroom() == 15 * MIB


@pytest.mark.parametrize(
    ("process", "path", "files", "cache_line"),
    [
        ("0::/job", "job", v2(100 * MIB, 90 * MIB), "inactive_file"),
        ("4:memory:/job", "memory/job", v1(100 * MIB, 90 * MIB), "total_inactive_file"),
    ],
)
def test_page_cache_that_can_be_dropped_is_not_used(
    groups: Groups, process: str, path: str, files: dict[str, object], cache_line: str
) -> None:
    groups.process(process)
    groups.group(path, {**files, "memory.stat": f"active_file 7\n{cache_line} {60 * MIB}"})
    assert groups.headroom() == 70 * MIB


@pytest.mark.parametrize("limit", ["max", V1_UNLIMITED, 1 << 60, "nonsense", "-1", ""])
def test_no_limit(groups: Groups, limit: object) -> None:
    groups.process("4:memory:/", "0::/")
    groups.group("", v2(limit, 5))
    groups.group("memory", v1(limit, 5))
    assert groups.headroom() is None


def test_over_the_limit_leaves_nothing(groups: Groups) -> None:
    groups.process("0::/")
    groups.group("", v2(10 * MIB, 11 * MIB))
    assert groups.headroom() == 0


def test_nothing_to_read(tmp_path: Path) -> None:
    assert cgroup_headroom_bytes(tmp_path / "absent", tmp_path / "none") is None


def test_use_that_cannot_be_read_counts_as_none(groups: Groups) -> None:
    groups.process("0::/")
    groups.group("", {"memory.max": 10 * MIB})
    assert groups.headroom() == 10 * MIB


@pytest.mark.parametrize(
    ("environ", "ranks"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "8"}, 8),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 4),
        ({"MPI_LOCALNRANKS": "2"}, 2),
        ({"MV2_COMM_WORLD_LOCAL_SIZE": "2"}, 2),
        ({"PALS_LOCAL_SIZE": "12"}, 12),
        ({"SLURM_STEP_TASKS_PER_NODE": "8"}, 8),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "3,4(x2)"}, 4),
        ({"MS_WORKER_NUM": "8"}, 8),
        ({"LOCAL_WORLD_SIZE": "2", "SLURM_STEP_TASKS_PER_NODE": "1"}, 2),
        ({"LOCAL_WORLD_SIZE": "", "MPI_LOCALNRANKS": "3"}, 3),
        ({"LOCAL_WORLD_SIZE": "0"}, 1),
        ({"LOCAL_WORLD_SIZE": "-2"}, 1),
        ({"LOCAL_WORLD_SIZE": "many"}, 1),
        ({"WORLD_SIZE": "64"}, 1),
    ],
)
def test_local_ranks(environ: dict[str, str], ranks: int) -> None:
    assert count_local_ranks(environ) == ranks


def test_local_ranks_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "5")
    assert count_local_ranks() == 5


def test_available_is_what_psutil_says(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = namedtuple("memory", ["available"])
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory(123))
    assert available_bytes() == 123


@pytest.mark.parametrize(
    ("available", "limit", "ranks", "expected"),
    [
        (100 * MIB, "max", 1, 50 * MIB),
        (100 * MIB, 60 * MIB, 1, 25 * MIB),  # 10 MiB of the 60 are used
        (40 * MIB, 60 * MIB, 1, 20 * MIB),
        (100 * MIB, "max", 4, 50 * MIB // 4),
        (100 * MIB, 5 * MIB, 1, 0),
    ],
)
def test_default_cap(
    groups: Groups,
    monkeypatch: pytest.MonkeyPatch,
    available: int,
    limit: object,
    ranks: int,
    expected: int,
) -> None:
    groups.process("0::/")
    groups.group("", v2(limit, 10 * MIB))
    monkeypatch.setattr(host_memory, "available_bytes", lambda: available)
    environ = {"LOCAL_WORLD_SIZE": str(ranks)}
    assert default_max_host_bytes(environ, groups.proc, groups.root) == expected


def test_default_cap_on_this_machine() -> None:
    assert 0 <= default_max_host_bytes({}) <= psutil.virtual_memory().total
