"""How the tests by report ended, by framework and group_swap: written by each run, shown at its end with the others'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[3] / "build" / "hyper_parallel"
_FILE = "test_reports.py"
_RANK = {"passed": 0, "skipped": 1, "failed": 2}
_SHOWN = {"passed": "equal", "skipped": "skipped", "failed": "FAILED"}
_SWAPS = ("group_swap=off", "group_swap=on")


class Outcomes:
    """Of one process. The file of an earlier one is gone when it begins: a process that dies leaves a hole."""

    def __init__(self, backend: str) -> None:
        self._path = FOLDER / f"{backend}.json"
        # Test, as file::name, to parameters, to what became of it.
        self._outcomes: dict[str, dict[str, dict[str, str]]] = {}

    def begin(self, items: list[Any]) -> None:
        if any(item.path.name == _FILE for item in items):
            self._path.unlink(missing_ok=True)

    def noted(self) -> bool:
        return bool(self._outcomes)

    def note(self, item: Any, report: Any) -> None:
        """The worst of set-up, call and tear-down counts."""
        if item.path.name != _FILE:
            return
        parameters = item.callspec.id if hasattr(item, "callspec") else ""
        tests = self._outcomes.setdefault(f"{item.path.name}::{item.originalname}", {})
        known = tests.get(parameters)
        if known is not None and _RANK[known["outcome"]] >= _RANK[report.outcome]:
            return
        tests[parameters] = {"outcome": report.outcome}
        if report.skipped:
            tests[parameters]["reason"] = report.longrepr[2].removeprefix("Skipped: ")

    def write(self) -> None:
        if self.noted():
            FOLDER.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(self._outcomes, indent=1, sort_keys=True))


def table_lines() -> list[str]:
    """Tests down, backends and group_swap across; a cell is the worst of a test's other parameters."""
    runs = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
    if not runs:
        return []
    columns = [(backend, swap) for backend in runs for swap in _SWAPS]
    names = dict.fromkeys(test for tests in runs.values() for test in tests)
    rows = [["HyperParallel, by report", *(f"{b} {s[11:]}" for b, s in columns)]]
    for name in names:
        shown = name.partition("::test_")[2].replace("_", " ")
        rows.append([shown, *(_cell(runs[b].get(name, {}), swap) for b, swap in columns)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]


def _cell(parameters: dict[str, dict[str, str]], swap: str) -> str:
    found = [what["outcome"] for name, what in parameters.items() if swap in name]
    return _SHOWN[max(found, key=_RANK.__getitem__)] if found else "-"
