"""Options are checked in one place, come from arguments or the environment, and get defaults."""

from __future__ import annotations

import dataclasses
import math
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import ebbtide
from ebbtide import (
    CheckpointPolicy,
    EbbtideError,
    OffloadConfig,
    UsageError,
    config,
    disk_directory,
)
from ebbtide.config import environment_name
from ebbtide.disk_directory import default_disk_directory

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

FIELDS = (
    "to device min_bytes keep_last_bytes keep_last_groups prefetch_bytes prefetch_groups "
    "in_flight_bytes max_host_bytes group_swap policy only on_inplace allow_tmpfs "
    "max_device_memory max_slowdown max_disk_bytes tune_malloc"
).split()
SIZES = "min_bytes keep_last_bytes prefetch_bytes in_flight_bytes max_host_bytes max_disk_bytes"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("EBBTIDE_"):
            monkeypatch.delenv(name)


def refusal(**options: object) -> str:
    with pytest.raises(UsageError) as caught:
        OffloadConfig.from_options(**options)
    return str(caught.value)


# --- fields


def test_fields_and_their_order() -> None:
    assert [item.name for item in dataclasses.fields(OffloadConfig)] == FIELDS


def test_everything_has_a_default() -> None:
    made = OffloadConfig.from_options()
    assert made == OffloadConfig()
    assert made == OffloadConfig.from_options(**dict.fromkeys(FIELDS))
    assert (made.only, made.on_inplace, made.tune_malloc) == ("saved", "error", True)
    assert (made.group_swap, made.allow_tmpfs) == (False, False)


def test_frozen_and_replaceable() -> None:
    made = OffloadConfig(min_bytes="1MiB")
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.min_bytes = 1  # type: ignore[misc]
    assert dataclasses.replace(made, only="layer_inputs").min_bytes == MIB
    with pytest.raises(UsageError):
        dataclasses.replace(made, min_bytes=-1)
    assert pickle.loads(pickle.dumps(made)) == made


def test_the_constructor_checks_too_and_reads_no_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EBBTIDE_MIN_BYTES", "1")
    assert OffloadConfig().min_bytes is None
    with pytest.raises(UsageError, match=r"\[OffloadConfig.only\] 'all'"):
        OffloadConfig(only="all")


@pytest.mark.parametrize("name", SIZES.split())
def test_sizes(name: str) -> None:
    assert getattr(OffloadConfig.from_options(**{name: "2KiB"}), name) == 2 * KIB
    assert getattr(OffloadConfig.from_options(**{name: 0}), name) == 0
    assert refusal(**{name: "many"}).startswith(f"[OffloadConfig.{name}] 'many' is no size: give ")


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"only": "all"}, ["[OffloadConfig.only]", "'all'", '"saved" or "layer_inputs"']),
        ({"only": 3}, ["[OffloadConfig.only]", "3", '"saved" or "layer_inputs"']),
        ({"on_inplace": "warn"}, ["[OffloadConfig.on_inplace]", "'warn'", '"error" or "saved"']),
        ({"allow_tmpfs": 1}, ["[OffloadConfig.allow_tmpfs]", "1", "give True or False"]),
        ({"tune_malloc": "maybe"}, ["[OffloadConfig.tune_malloc]", "'maybe'", "True or False"]),
        ({"policy": "MUST_SWAP"}, ["[OffloadConfig.policy]", "'MUST_SWAP'", "CheckpointPolicy"]),
        ({"device": "cuda:x"}, ["[OffloadConfig.device]", "'cuda:x'", '"cuda"']),
        ({"device": 0}, ["[OffloadConfig.device]", "0", '"cuda"']),
        ({"to": "hots"}, ["[OffloadConfig.to]", "'hots'", '"host"', '"disk"', "directory"]),
        ({"to": Path("absent")}, ["[OffloadConfig.to]", "absent", '"host"', "separator"]),
        ({"to": ""}, ["[OffloadConfig.to]", "''", '"host"']),
        ({"to": 7}, ["[OffloadConfig.to]", "7", '"host"']),
        ({"to": b"/tmp"}, ["[OffloadConfig.to]", "b'/tmp'", '"host"']),
        ({"keep_last_groups": -1}, ["[OffloadConfig.keep_last_groups]", "-1", "whole number"]),
        ({"prefetch_groups": True}, ["[OffloadConfig.prefetch_groups]", "True", "whole number"]),
        ({"group_swap": "perhaps"}, ["[OffloadConfig.group_swap]", "'perhaps'", "True or False"]),
        ({"max_device_memory": "x"}, ["[OffloadConfig.max_device_memory]", "'x'", "give bytes"]),
        ({"max_slowdown": "slow"}, ["[OffloadConfig.max_slowdown]", "'slow'", "give a number"]),
        ({"max_slowdown": math.nan}, ["[OffloadConfig.max_slowdown]", "nan", "give a number"]),
    ],
)
def test_wrong_values(options: dict[str, object], parts: list[str]) -> None:
    text = refusal(**options)
    assert text.startswith(parts[0])
    for part in parts:
        assert part in text


@pytest.mark.parametrize(
    ("option", "hints"),
    [
        ("min_byte", ["min_bytes"]),
        ("max_hostbytes", ["max_host_bytes"]),
        ("keep_last", ["keep_last_bytes", "keep_last_groups"]),
        ("zzz", FIELDS),
    ],
)
def test_unknown_options(option: str, hints: list[str]) -> None:
    text = refusal(**{option: 1})
    assert text.startswith(f"[OffloadConfig.from_options] unknown option '{option}': ")
    for hint in hints:
        assert hint in text


@pytest.mark.parametrize("what", ["keep_last", "prefetch"])
def test_options_that_exclude_each_other(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = refusal(**{f"{what}_bytes": 5, f"{what}_groups": 2})
    assert text == (
        f"[OffloadConfig.{what}_bytes] 5 given, and OffloadConfig.{what}_groups 2 too: "
        f"they exclude each other, give {what}_bytes or {what}_groups"
    )
    # An argument counts more than its opposite in the environment.
    monkeypatch.setenv(f"EBBTIDE_{what.upper()}_GROUPS", "2")
    config = OffloadConfig.from_options(**{f"{what}_bytes": 5})
    assert (getattr(config, f"{what}_bytes"), getattr(config, f"{what}_groups")) == (5, None)
    assert getattr(OffloadConfig.from_options(), f"{what}_groups") == 2
    monkeypatch.setenv(f"EBBTIDE_{what.upper()}_BYTES", "5")
    assert f"EBBTIDE_{what.upper()}_BYTES] 5 given" in refusal()


@pytest.mark.parametrize(
    ("name", "value", "default"),
    [
        ("max_device_memory", "40GiB", None),
        ("max_slowdown", 1.1, None),
    ],
)
def test_options_of_later_releases(
    name: str, value: object, default: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    ending = f"{name} is not available in this release: leave it at {default}"
    text = refusal(**{name: value})
    assert text.startswith(f"[OffloadConfig.{name}] ") and text.endswith(ending)
    OffloadConfig.from_options(**{name: default})
    monkeypatch.setenv(f"EBBTIDE_{name.upper()}", str(value))
    text = refusal()
    assert text.startswith(f"[EBBTIDE_{name.upper()}] ") and text.endswith(ending)


def test_errors_are_value_errors() -> None:
    assert issubclass(UsageError, ValueError) and issubclass(UsageError, EbbtideError)


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "cpu", "npu", "Ascend"])
def test_devices(device: str) -> None:
    assert OffloadConfig(device=device).device == device


def test_a_frameworks_device_object() -> None:
    torch = pytest.importorskip("torch")
    assert OffloadConfig(device=torch.device("cuda", 1)).device == "cuda:1"
    with pytest.raises(UsageError, match=r"\[OffloadConfig.device\]"):
        OffloadConfig(device=torch.zeros(1))


def test_policy_is_kept() -> None:
    def policy(tensor: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SWAP

    assert OffloadConfig.from_options(policy=policy).policy is policy


# --- environment


@pytest.mark.parametrize("field", [name for name in FIELDS if name != "policy"])
def test_environment_names(field: str) -> None:
    assert environment_name(field) == f"EBBTIDE_{field.upper()}"


def test_policy_has_no_environment_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EBBTIDE_POLICY", "anything")
    assert environment_name("policy") is None
    assert OffloadConfig.from_options().policy is None


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("to", "cpu", "host"),
        ("to", "NVMe", "disk"),
        ("to", "/spill", Path("/spill")),
        ("device", "cuda:1", "cuda:1"),
        ("min_bytes", "1MiB", MIB),
        ("keep_last_bytes", "0", 0),
        ("prefetch_bytes", "1k", KIB),
        ("in_flight_bytes", "7", 7),
        ("max_host_bytes", " 8GiB ", 8 * GIB),
        ("max_disk_bytes", "1TB", 10**12),
        ("only", "layer_inputs", "layer_inputs"),
        ("on_inplace", "SAVED", "saved"),
        ("allow_tmpfs", "1", True),
        ("allow_tmpfs", "off", False),
        ("tune_malloc", "no", False),
        ("tune_malloc", "True", True),
        ("group_swap", "false", False),
        ("group_swap", "1", True),
        ("keep_last_groups", "0", 0),
        ("prefetch_groups", " 3 ", 3),
    ],
)
def test_environment_values(
    field: str, text: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"EBBTIDE_{field.upper()}", text)
    assert getattr(OffloadConfig.from_options(), field) == value


def test_argument_over_environment_over_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EBBTIDE_MIN_BYTES", "10")
    monkeypatch.setenv("EBBTIDE_TUNE_MALLOC", "0")
    assert OffloadConfig.from_options(min_bytes=5).min_bytes == 5
    assert OffloadConfig.from_options(min_bytes=0).min_bytes == 0
    assert OffloadConfig.from_options(min_bytes=None).min_bytes == 10
    assert OffloadConfig.from_options(tune_malloc=True).tune_malloc is True
    monkeypatch.setenv("EBBTIDE_MIN_BYTES", " ")
    assert OffloadConfig.from_options().min_bytes is None


@pytest.mark.parametrize("field", [name for name in FIELDS if name != "policy"])
def test_errors_name_the_variable(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"EBBTIDE_{field.upper()}", "?!")
    assert refusal().startswith(f"[EBBTIDE_{field.upper()}] '?!' ")


# --- where to


@pytest.mark.parametrize(
    ("to", "kept"),
    [
        ("host", "host"),
        ("CPU", "host"),
        ("disk", "disk"),
        ("nvme", "disk"),
        ("/some/where", Path("/some/where")),
        ("~/spill", Path.home() / "spill"),
        (Path("/x/../y"), Path("/y")),
    ],
)
def test_to(to: str | Path, kept: object) -> None:
    made = OffloadConfig.from_options(to=to)
    assert made.to == kept
    assert dataclasses.replace(made) == made


def test_directories_are_kept_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spill").mkdir()
    (tmp_path / "host").mkdir()
    assert OffloadConfig(to="spill").to == tmp_path / "spill"
    assert OffloadConfig(to="./later").to == tmp_path / "later"
    assert OffloadConfig(to="host").to == "host"
    assert OffloadConfig(to=Path("host")).to == tmp_path / "host"


# --- resolve


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary directory that counts as a disk, whatever this machine has."""
    mounts = tmp_path / "mounts"
    mounts.write_text("disk / ext4 rw 0 0\n")
    monkeypatch.setattr(disk_directory, "_MOUNTS", mounts)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary directory that counts as memory, as does everything else."""
    mounts = tmp_path / "mounts"
    mounts.write_text("none / tmpfs rw 0 0\n")
    monkeypatch.setattr(disk_directory, "_MOUNTS", mounts)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_defaults_on_an_accelerator() -> None:
    resolved = OffloadConfig().resolve("cuda", True, 80 * GIB)
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
    resolved = OffloadConfig().resolve("cpu", False, 0)
    assert (resolved.tier, resolved.directory) == ("disk", disk)
    assert resolved.min_bytes == 64 * KIB
    assert resolved.keep_last_bytes == 32 * MIB
    assert resolved.prefetch_bytes == 64 * MIB
    assert resolved.in_flight_bytes == 64 * MIB
    assert (resolved.keep_last_groups, resolved.prefetch_groups) == (None, None)
    assert resolved.prefetch_to_peak
    assert not OffloadConfig(prefetch_bytes="64MiB").resolve("cpu", False, 0).prefetch_to_peak
    asked = OffloadConfig(keep_last_groups=2, prefetch_groups=0).resolve("cpu", False, 0)
    assert (asked.keep_last_groups, asked.prefetch_groups) == (2, 0)


@pytest.mark.parametrize(
    ("total", "in_flight"), [(80 * GIB, GIB), (5 * GIB, GIB // 2), (1000, 100), (0, GIB)]
)
def test_in_flight_is_a_share_of_the_device(total: int, in_flight: int) -> None:
    assert OffloadConfig().resolve("cuda", True, total).in_flight_bytes == in_flight


@pytest.mark.parametrize("accelerator", [True, False])
@pytest.mark.parametrize("to", ["host", "disk"])
def test_the_tier_decides_min_bytes(accelerator: bool, to: str, disk: Path) -> None:
    resolved = OffloadConfig(to=to).resolve("x", accelerator, GIB)
    assert resolved.tier == to
    assert resolved.min_bytes == (256 if to == "host" else 64) * KIB


@pytest.mark.parametrize("accelerator", [True, False])
@pytest.mark.parametrize("to", ["host", "disk"])
def test_group_swap_packs_and_takes_smaller_storages(
    accelerator: bool, to: str, disk: Path
) -> None:
    resolved = OffloadConfig(to=to, group_swap=True).resolve("x", accelerator, GIB)
    assert (resolved.group_swap, resolved.pack_below_bytes) == (True, 400_000)
    assert resolved.min_bytes == 64 * KIB
    given = OffloadConfig(to=to, group_swap=True, min_bytes=7).resolve("x", accelerator, GIB)
    assert given.min_bytes == 7


@pytest.mark.parametrize("what", ["keep_last", "prefetch"])
@pytest.mark.parametrize(
    ("options", "nbytes", "groups"),
    [({}, None, 1), ({"groups": 0}, None, 0), ({"groups": 3}, None, 3), ({"bytes": 0}, 0, None)],
)
def test_groups_decide_unless_bytes_are_given(
    what: str, options: dict[str, int], nbytes: int | None, groups: int | None
) -> None:
    default = OffloadConfig().resolve("cuda", True, GIB)
    given = {f"{what}_{unit}": value for unit, value in options.items()}
    resolved = OffloadConfig.from_options(**given).resolve("cuda", True, GIB)
    expected = getattr(default, f"{what}_bytes") if nbytes is None else nbytes
    assert getattr(resolved, f"{what}_bytes") == expected
    assert getattr(resolved, f"{what}_groups") == groups
    other = "prefetch" if what == "keep_last" else "keep_last"
    assert getattr(resolved, f"{other}_groups") == 1


def test_a_disk_behind_host_memory_has_both_caps(disk: Path) -> None:
    made = OffloadConfig(to=disk, max_host_bytes="1MiB", max_disk_bytes="1GiB")
    resolved = made.resolve("cuda", True, GIB)
    assert (resolved.max_host_bytes, resolved.max_disk_bytes) == (MIB, GIB)


def test_what_was_asked_for_is_used(disk: Path) -> None:
    sizes = {name: number for number, name in enumerate(SIZES.split())}
    made = OffloadConfig.from_options(
        to=disk, only="layer_inputs", on_inplace="saved", tune_malloc=False, **sizes
    )
    resolved = dataclasses.asdict(made.resolve("cuda", True, GIB))
    assert {name: resolved[name] for name in sizes} == sizes
    assert (resolved["tier"], resolved["directory"]) == ("disk", disk)
    assert (resolved["only"], resolved["on_inplace"]) == ("layer_inputs", "saved")
    assert resolved["tune_malloc"] is False


def test_max_host_bytes_comes_from_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "default_max_host_bytes", lambda: 77)
    assert OffloadConfig().resolve("cuda", True, GIB).max_host_bytes == 77
    assert OffloadConfig(max_host_bytes=5).resolve("cuda", True, GIB).max_host_bytes == 5


def test_an_absent_directory(disk: Path) -> None:
    with pytest.raises(UsageError) as caught:
        OffloadConfig(to=disk / "absent/").resolve("cuda", True, GIB)
    text = str(caught.value)
    assert text.startswith(f"[OffloadConfig.to] {disk / 'absent'} does not exist: create it")
    assert not (disk / "absent").exists()


def test_a_file_is_no_directory(disk: Path) -> None:
    (disk / "file").touch()
    with pytest.raises(UsageError, match="file is not a directory: create it or give"):
        OffloadConfig(to=disk / "file").resolve("cuda", True, GIB)


def test_a_directory_that_cannot_be_written(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UsageError, match="is not writable: create it or give"):
        OffloadConfig(to=disk).resolve("cuda", True, GIB)


def test_a_directory_in_memory(memory: Path) -> None:
    with pytest.raises(UsageError) as caught:
        OffloadConfig(to=memory).resolve("cuda", True, GIB)
    text = str(caught.value)
    assert text.startswith(f"[OffloadConfig.to] {memory} is in memory (tmpfs), not on a disk: ")
    assert text.endswith("set allow_tmpfs")
    allowed = OffloadConfig(to=memory, allow_tmpfs=True).resolve("cuda", True, GIB)
    assert (allowed.directory, allowed.allow_tmpfs) == (memory, True)


# --- the default directory


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


# --- the package


def test_what_the_package_exports() -> None:
    assert ebbtide.__version__ == "0.1.0"
    for name in ebbtide.__all__:
        assert hasattr(ebbtide, name)


def test_import_loads_no_framework() -> None:
    script = (
        "import sys, ebbtide, ebbtide.report\n"
        "assert not {'torch', 'mindspore', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    path = str(Path(ebbtide.__file__).parents[1])
    environ = {**os.environ, "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", script], check=True, env=environ)
