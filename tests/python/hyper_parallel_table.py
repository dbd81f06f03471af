"""The outcomes of the tests by report that each backend's last run left, as one table."""

from __future__ import annotations

import json
from pathlib import Path

_RANK = {"passed": 0, "skipped": 1, "failed": 2}
_SHOWN = {"passed": "equal", "skipped": "skipped", "failed": "FAILED"}
_SWAPS = ("group_swap=off", "group_swap=on")


def table_lines(folder: Path) -> list[str]:
    """Tests down, backends and group_swap across; a cell is the worst of a test's other parameters."""
    runs = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
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
