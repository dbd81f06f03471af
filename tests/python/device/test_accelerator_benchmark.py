"""The benchmark for real accelerators runs here at tiny sizes, with every section, and tells when a gradient is wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ebbtide.torch.framework import TorchFramework

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

import accelerator  # noqa: E402

SECTIONS = ("correctness", "bandwidth", "decoder", "gpt2", "lstm", "fill")
OURS = ("Ebbtide", "Ebbtide group_swap", "Ebbtide, disk behind")


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EBBTIDE_ALLOW_TMPFS", "1")  # where the tests' directory is one
    folder = tmp_path / "spill"
    folder.mkdir()
    return folder


def run(*arguments: str, folder: Path) -> tuple[int, dict[str, Any]]:
    path = folder / "results.json"
    code = accelerator.main(["--dry-run", "--json", str(path), *arguments])
    return code, json.loads(path.read_text(encoding="utf-8"))


def test_a_dry_run_measures_everything(tmp_path: Path, disk: Path, control: ModuleType) -> None:
    code, results = run("--disk", str(disk), folder=tmp_path)
    assert code == 0, results["errors"]
    assert (results["errors"], results["cut"]) == ({}, [])
    assert set(SECTIONS) <= set(results)
    assert results["machine"]["libraries"]["torch"] == torch.__version__

    check_correctness(results["correctness"])
    for row in results["bandwidth"]:
        assert row["d2h_gb_per_s"] > 0
        assert row["ebbtide_h2d_share"] > 0
    for name in ("decoder", "lstm"):
        check_variants(results[name]["variants"])
    assert set(OURS) <= set(results["decoder"]["variants"])
    assert results["gpt2"].get("missing") or set(OURS) <= set(results["gpt2"]["variants"])

    lstm = results["lstm"]["variants"]
    packed, single = lstm["Ebbtide group_swap"], lstm["Ebbtide"]
    assert 0 < packed["d2h_copies"] < single["d2h_copies"]
    assert 0 < packed["h2d_copies"] < single["h2d_copies"]
    assert packed["d2h_bytes"] == single["d2h_bytes"]

    fill = results["fill"]
    assert 0 < fill["no offload"]["largest"] < fill["Ebbtide"]["largest"]
    assert control.races() == []


def check_correctness(found: dict[str, Any]) -> None:
    assert found["correct"] is True
    assert (found["failures"], found["traffic_failures"]) == ([], [])
    counted = [entry for entry in found["entries"] if entry["union_bytes"] is not None]
    assert counted
    for entry in counted:
        assert entry["d2h_bytes"] == entry["h2d_bytes"] == entry["union_bytes"] > 0
    for entry in found["entries"]:
        assert entry["equal"] is True, entry
        assert entry["races"] == 0, entry


def check_variants(variants: dict[str, Any]) -> None:
    for name, row in variants.items():
        if "missing" in row:
            assert name in ("torchtune", "TRL"), row
            continue
        assert "failed" not in row, row
        assert row["step_s"] > 0
        if name in OURS:
            assert row["races"] == 0
            assert row["d2h_bytes"] > 0
            assert row["host_allocations_after_first"] == 0


def test_a_wrong_gradient_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_view = TorchFramework.make_view

    def make_wrong_view(*arguments: Any) -> torch.Tensor:
        view = make_view(*arguments)
        return view * 1.001 if view.is_floating_point() else view

    monkeypatch.setattr(TorchFramework, "make_view", make_wrong_view)
    code, results = run(folder=tmp_path)
    assert code == 1
    assert results["correctness"]["correct"] is False
    assert "decoder" not in results  # nothing is measured of what is wrong
    assert "gradients differ" in capsys.readouterr().err


def test_without_time_everything_is_cut_and_said(tmp_path: Path) -> None:
    code, results = run("--minutes", "0", folder=tmp_path)
    assert code == 1  # nothing was compared, so nothing is known to be right
    assert "correctness" in results["cut"]
