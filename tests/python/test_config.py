"""Options are checked in one place, and come from arguments or the environment."""

from __future__ import annotations

import dataclasses
import math
import pickle
from pathlib import Path

import pytest

from ebbtide import (
    CheckpointPolicy,
    EbbtideError,
    OffloadConfig,
    UsageError,
)
from ebbtide.config import environment_name

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

FIELDS = (
    "to device min_bytes keep_last_bytes keep_last_groups prefetch_bytes prefetch_groups "
    "in_flight_bytes max_host_bytes group_swap policy only on_inplace allow_tmpfs "
    "max_device_memory max_slowdown max_disk_bytes tune_malloc"
).split()
SIZES = "min_bytes keep_last_bytes prefetch_bytes in_flight_bytes max_host_bytes max_disk_bytes"


pytestmark = pytest.mark.usefixtures("without_options_in_the_environment")


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
