"""A pytest plugin: how tests ended, from the reports alone, so that it is the same whichever worker ran them.

A run writes ``build/behaviour/<backend>.json`` for `tools/behaviour_table.py`, and ``build/hyper_parallel/<backend>.json``;
what an earlier run left there is gone when it begins, so that a process that dies leaves a hole and not the past. At the
end it prints the tables, and what tests recorded as the property ``SECTION + <title>``: a line under that title.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hyper_parallel_table import table_lines
from support import BACKEND

ROOT = Path(__file__).resolve().parents[2]
TESTS = Path(__file__).resolve().parent
BUILD = ROOT / "build"

SECTION = "section at the end: "

_RANK = {"passed": 0, "skipped": 1, "failed": 2}

TABLE = [sys.executable, str(ROOT / "tools" / "behaviour_table.py")]
_table: subprocess.CompletedProcess[str] | None = None


class Outcomes:
    """Of the tests in a folder or file of tests."""

    def __init__(self, tests: Path, folder: Path) -> None:
        self._tests = tests
        self._file = folder / f"{BACKEND}.json"
        # Test, as file::name, or file where all of it was skipped; to parameters, to what became of it. Parameters begin
        # with the variant of the backend.
        self._found: dict[str, dict[str, dict[str, str]]] = {}

    def __bool__(self) -> bool:
        return bool(self._found)

    def has(self, path: Path) -> bool:
        return self._tests == path or self._tests in path.parents

    def begin(self) -> None:
        self._file.unlink(missing_ok=True)

    def note(self, report: pytest.CollectReport | pytest.TestReport) -> None:
        """The worst of set-up, call and tear-down counts."""
        file, _, test = report.nodeid.partition("::")
        path = ROOT / file
        if not self.has(path):
            return
        name, _, parameters = test.partition("[")
        tests = self._found.setdefault(f"{path.name}::{name}" if name else path.name, {})
        parameters = parameters.removesuffix("]")
        known = tests.get(parameters)
        if known is not None and _RANK[known["outcome"]] >= _RANK[report.outcome]:
            return
        tests[parameters] = {"outcome": report.outcome}
        if report.skipped:
            reason = str(report.longrepr[2])
            tests[parameters]["reason"] = reason.removeprefix("Skipped: ")

    def write(self) -> None:
        if self:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_text(json.dumps(self._found, indent=1, sort_keys=True))


_BEHAVIOUR = Outcomes(TESTS / "behaviour", BUILD / "behaviour")
_REPORTS = Outcomes(TESTS / "hyper_parallel" / "test_reports.py", BUILD / "hyper_parallel")
_ALL = (_BEHAVIOUR, _REPORTS)

# Lines by title.
_sections: dict[str, list[str]] = {}


def pytest_collection_finish(session: pytest.Session) -> None:
    for outcomes in _ALL:
        if any(outcomes.has(item.path) for item in session.items):
            outcomes.begin()


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped:
        _BEHAVIOUR.note(report)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    for outcomes in _ALL:
        outcomes.note(report)
    if report.when == "call":
        for name, value in report.user_properties:
            if name.startswith(SECTION):
                _sections.setdefault(name.removeprefix(SECTION), []).append(value)


def note_unavailable(reason: str) -> None:
    """The whole backend cannot be run here."""
    subprocess.run([*TABLE, "--unavailable", BACKEND, reason], check=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A hole without a reason fails the run that says what ran for which framework."""
    global _table
    if hasattr(session.config, "workerinput"):
        return  # the process that started the workers has all reports
    for outcomes in _ALL:
        outcomes.write()
    if os.environ.get("EBBTIDE_BEHAVIOUR_TABLE"):
        _table = subprocess.run([*TABLE, "--short"], capture_output=True, text=True)
        if _table.returncode != 0 and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for line in table_lines(BUILD / "hyper_parallel") if _REPORTS else []:
        terminalreporter.write_line(line)
    for title, lines in _sections.items():
        terminalreporter.section(title)
        for line in lines:
            terminalreporter.write_line(line)
    if _table is not None:
        terminalreporter.section("behaviour by framework and device")
        terminalreporter.write(_table.stdout + _table.stderr)
