"""The table of what ran for which framework: every hole has a reason, or the run fails."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "behaviour_table.py"
NAME = "test_views.py::test_overlapping_views_show_each_others_writes"
PASSED = {"outcome": "passed"}


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("behaviour_table", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "OUTCOMES", tmp_path / "behaviour")
    return module


def print_table(
    table: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: Any, *arguments: str
) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["behaviour_table.py", *arguments])
    status = table.main()
    return status, capsys.readouterr().out


def write(table: ModuleType, backend: str, outcomes: dict[str, Any]) -> None:
    table.OUTCOMES.mkdir(exist_ok=True)
    (table.OUTCOMES / f"{backend}.json").write_text(json.dumps(outcomes))


def every_backend(table: ModuleType) -> None:
    for backend in table.BACKENDS:
        variants = [f"{backend}-disk-prefetch", f"{backend}-disk-packed-prefetch"]
        write(table, backend, {NAME: dict.fromkeys(variants, PASSED)})


def test_all_ran(table, monkeypatch, capsys) -> None:
    every_backend(table)
    status, text = print_table(table, monkeypatch, capsys, "--short")
    assert status == 0
    assert text.count("1 passed,   0 partly,   0 not") == 6


def test_a_test_that_did_not_run_is_a_hole_without_a_reason(table, monkeypatch, capsys) -> None:
    every_backend(table)
    write(table, "mindspore-cpu", {"test_views.py::test_another": {"": PASSED}})
    status, text = print_table(table, monkeypatch, capsys, "--short")
    assert status == 1
    assert f"mindspore-cpu: UNEXPLAINED: {NAME}" in text


def test_a_test_without_group_swap_is_a_hole(table, monkeypatch, capsys) -> None:
    every_backend(table)
    write(table, "torch-cpu", {NAME: {"torch-cpu-disk-prefetch": PASSED}})
    status, text = print_table(table, monkeypatch, capsys)
    assert status == 1
    assert "NOT RUN" in text


def test_a_skip_has_its_reason_and_a_part_that_ran(table, monkeypatch, capsys) -> None:
    every_backend(table)
    skipped = {"outcome": "skipped", "reason": "no such dtype"}
    ran = {"mindspore-cpu-disk-packed-prefetch": PASSED, "mindspore-cpu-disk-prefetch-a": PASSED}
    write(table, "mindspore-cpu", {NAME: {**ran, "mindspore-cpu-disk-prefetch-b": skipped}})
    status, text = print_table(table, monkeypatch, capsys)
    assert status == 0
    assert "1 passed 1 skipped" in text
    assert "0 passed,   1 partly,   0 not" in text
    assert "mindspore-cpu: no such dtype: overlapping_views_show_each_others_writes" in text


def test_what_cannot_be_run_here_is_counted_and_says_why(table, monkeypatch, capsys) -> None:
    every_backend(table)
    reason = "MINDSPORE CANNOT BE INSTALLED HERE"
    print_table(table, monkeypatch, capsys, "--unavailable", "mindspore-cpu", reason)
    (table.OUTCOMES / "torch-tide.json").unlink()
    status, text = print_table(table, monkeypatch, capsys, "--short")
    assert status == 0
    assert f"mindspore-cpu: {reason}" in text
    assert "torch-tide did not run, or its process died" in text
    assert text.count("0 passed,   0 partly,   1 not") == 4
