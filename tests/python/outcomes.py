"""A pytest plugin: how each behaviour test ended, for `tools/behaviour_table.py`.

A run writes ``build/behaviour/<backend>.json``; what an earlier run left there is gone when it begins, so that a process
that dies leaves a hole and not the past.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import BACKEND

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).parent / "behaviour"
FILE = ROOT / "build" / "behaviour" / f"{BACKEND}.json"

_RANK = {"passed": 0, "skipped": 1, "failed": 2}

TABLE = [sys.executable, str(ROOT / "tools" / "behaviour_table.py")]
_table: subprocess.CompletedProcess[str] | None = None

# Test, as file::name, or file where all of it was skipped; to parameters, to what became of it. Parameters begin with the variant of the backend.
_outcomes: dict[str, dict[str, dict[str, str]]] = {}


def pytest_collection_finish(session: pytest.Session) -> None:
    if any(FOLDER in item.path.parents for item in session.items):
        FILE.unlink(missing_ok=True)


def pytest_collectreport(report: Any) -> None:
    path = ROOT / report.nodeid
    if report.skipped and FOLDER in path.parents:
        _outcomes[path.name] = {"": {"outcome": "skipped", "reason": _reason(report)}}


def _reason(report: Any) -> str:
    return str(report.longrepr[2]).removeprefix("Skipped: ")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if FOLDER in item.path.parents:
        _note(item, report)
    return report


def _note(item: Any, report: Any) -> None:
    """The worst of set-up, call and tear-down counts."""
    parameters = item.callspec.id if hasattr(item, "callspec") else ""
    tests = _outcomes.setdefault(f"{item.path.name}::{item.originalname}", {})
    known = tests.get(parameters)
    if known is not None and _RANK[known["outcome"]] >= _RANK[report.outcome]:
        return
    tests[parameters] = {"outcome": report.outcome}
    if report.skipped:
        tests[parameters]["reason"] = _reason(report)


def note_unavailable(reason: str) -> None:
    """The whole backend cannot be run here."""
    subprocess.run([*TABLE, "--unavailable", BACKEND, reason], check=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A hole without a reason fails the run that says what ran for which framework."""
    global _table
    if _outcomes:
        FILE.parent.mkdir(parents=True, exist_ok=True)
        FILE.write_text(json.dumps(_outcomes, indent=1, sort_keys=True))
    if os.environ.get("EBBTIDE_BEHAVIOUR_TABLE"):
        _table = subprocess.run([*TABLE, "--short"], capture_output=True, text=True)
        if _table.returncode != 0 and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _table is not None:
        terminalreporter.section("behaviour by framework and device")
        terminalreporter.write(_table.stdout + _table.stderr)
