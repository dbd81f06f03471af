"""The command line, and the demo from its options to its exit code."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import ebbtide
from ebbtide.cli import main
from ebbtide.demo import command, compare, memory
from ebbtide.demo.settings import Settings
from ebbtide.demo.text import read_corpus
from ebbtide.demo.training import Result, Traffic
from ebbtide.errors import EbbtideError, UsageError

MIB = 1 << 20


def result(mode: str = "plain", **changes: Any) -> Result:
    same = Result(
        mode=mode,
        losses=(4.0, 3.0),
        loss_bits=(11, 12),
        checksum="abc",
        step_seconds=(1.0, 2.0),
        growth_bytes=600 * MIB,
        peak_by_kernel=True,
        parameters=1000,
        threads=1,
        accelerator=None,
        traffic=Traffic(saved_bytes=700 * MIB),
    )
    return dataclasses.replace(same, **changes)


def exit_code(*arguments: str) -> object:
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    return raised.value.code


# --- the command line


def test_version_is_told_by_the_module_too() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ebbtide", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"ebbtide {ebbtide.__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--nothing",),
        ("demo", "--nothing"),
        ("demo", "--steps", "0"),
        ("demo", "--steps", "many"),
        ("demo", "--modes", "plain,fast"),
    ],
)
def test_wrong_arguments_exit_with_2(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(*arguments) == 2
    assert "usage: ebbtide" in capsys.readouterr().err


def one_line_error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_errors_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    assert "multiple of 64" in one_line_error(capsys, "demo", "--width", "100")
    assert "does not exist" in one_line_error(capsys, "demo", "--to", str(tmp_path / "none"))
    absent = str(tmp_path / "none" / "out.json")
    assert "does not exist" in one_line_error(capsys, "demo", "--json", absent)


def test_missing_packages_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    text = one_line_error(capsys, "demo")
    assert "torch and transformers" in text
    assert "pip install 'ebbtide[demo]' torch" in text
    text = one_line_error(capsys, "demo", "--framework", "mindspore")
    assert "mindspore not installed: pip install 'ebbtide[mindspore]'" in text


def test_a_mode_of_another_framework_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    arguments = ("demo", "--framework", "mindspore", "--modes", "plain,save_on_cpu")
    text = one_line_error(capsys, *arguments)
    assert "mindspore has no mode 'save_on_cpu': give some of plain, ebbtide" in text


# --- the demo as a whole


def test_demo_trains_equally_in_all_modes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    monkeypatch.setenv("EBBTIDE_KEEP_LAST_BYTES", "0")
    monkeypatch.setenv("EBBTIDE_ALLOW_TMPFS", "1")
    output = tmp_path / "out.json"
    sizes = "--steps 2 --layers 2 --width 128 --sequence 64 --batch 4 --threads 1".split()
    assert main(["demo", *sizes, "--to", str(tmp_path), "--json", str(output)]) == 0

    written = json.loads(output.read_text(encoding="utf-8"))
    assert written["equal"] is True
    modes = written["modes"]
    assert list(modes) == ["plain", "ebbtide", "save_on_cpu"]
    for mode in modes.values():
        assert len(mode["losses"]) == len(mode["step_seconds"]) == 2
        assert mode["loss_bits"] == modes["plain"]["loss_bits"]
        assert mode["checksum"] == modes["plain"]["checksum"]
        assert mode["traffic"]["saved_bytes"] == modes["plain"]["traffic"]["saved_bytes"]
    moved = modes["ebbtide"]["traffic"]
    assert 0 < moved["moved_in_bytes"] <= moved["moved_out_bytes"] <= moved["unique_bytes"]
    assert moved["unique_bytes"] < moved["saved_bytes"]

    captured = capsys.readouterr()
    assert "equal, bit for bit" in captured.out
    assert str(tmp_path) in captured.out.replace("\n", "")
    assert captured.err == ""


def test_demo_exits_with_1_where_results_differ(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")

    def run_mode(mode: str, settings: Settings, on_step: Any) -> Result:
        on_step(1)
        return result(mode, checksum="abc" if mode == "plain" else "abd")

    monkeypatch.setattr(command, "run_mode", run_mode)
    assert main(["demo", "--modes", "plain,ebbtide"]) == 1
    out = capsys.readouterr().out
    assert "DIFFERENT" in out
    assert "NOT EQUAL" in out


def test_a_mode_that_fails_says_why() -> None:
    pytest.importorskip("torch")
    settings = Settings(width=64, sequence=1 << 30)  # more text than there is
    with pytest.raises(EbbtideError, match=r"plain ended with exit code 2: .*smaller --sequence"):
        compare.run_mode("plain", settings, lambda done: None)


# --- parts


def test_equal_results_have_no_differences() -> None:
    assert compare.differences([]) == []
    assert compare.differences([result()]) == []
    faster = result("ebbtide", step_seconds=(0.5, 0.5), growth_bytes=1)
    assert compare.differences([result(), faster]) == []


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"loss_bits": (11, 13)}, "differ in 1 losses, the first at step 2"),
        ({"loss_bits": (11,)}, "has 1 losses"),
        ({"checksum": "abd"}, "differ in their final parameters"),
    ],
)
def test_tampered_results_are_found(changes: dict[str, Any], text: str) -> None:
    results = [result(), result("save_on_cpu"), result("ebbtide", **changes)]
    found = compare.differences(results)
    assert len(found) == 1
    assert found[0].startswith("ebbtide ")
    assert text in found[0]


def test_corpus_is_the_same_at_every_call(tmp_path: Path) -> None:
    text = read_corpus(1000)
    assert len(text) >= 1000
    assert text == read_corpus(1000)
    with pytest.raises(UsageError, match="0 bytes of Python source"):
        read_corpus(1, tmp_path)


@pytest.mark.parametrize("sampled", [False, True])
def test_peak_memory_counts_what_is_freed_again(
    sampled: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if sampled:
        monkeypatch.setattr(memory, "_CLEAR_REFS", tmp_path / "none" / "clear_refs")
    with memory.PeakMemory() as peak:
        block = bytearray(b"x") * (64 * MIB)
        if sampled:
            time.sleep(0.05)
        del block
    if sampled:
        assert not peak.by_kernel
    assert 60 * MIB < peak.growth_bytes < 200 * MIB
