"""The results as tables for the terminal and for the documentation, and as JSON."""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from peers.cases import Case
from peers.measure import Result
from peers.offloaders import Offloader

BEGIN = "<!-- what `make peers` writes begins here -->"
END = "<!-- and ends here -->"

CHECKS = ("right", "at the bound", "frees", "keeps aliases", "no race", "at rest")
COLUMNS = (*CHECKS, "all at once")
_MIB = 1 << 20


class Results:
    """By case and offloader, in the order in which those are listed."""

    def __init__(
        self, cases: Sequence[Case], offloaders: Sequence[Offloader], results: Iterable[Result]
    ) -> None:
        self.cases = cases
        self.offloaders = offloaders
        self._results = {(result.case, result.offloader): result for result in results}

    def get(self, case: Case, offloader: Offloader) -> Result | None:
        return self._results.get((case.name, offloader.name))

    def of(self, offloader: Offloader) -> list[Result]:
        found = (self.get(case, offloader) for case in self.cases)
        return [result for result in found if result is not None]

    def counts(self, offloader: Offloader) -> list[str]:
        """Of those cases in which the question arises, those that pass."""
        results = self.of(offloader)
        columns = [[result.checks[i] for result in results] for i in range(len(CHECKS))]
        columns.append([result.all_at_once for result in results])
        return [f"{column.count(True)}/{len(column) - column.count(None)}" for column in columns]


# --- cells


def failures(result: Result) -> str:
    """A letter with its numbers for each failed check."""
    found = []
    if not result.right:
        found.append("**G**")
    if not result.at_bound:
        d2h = result.copies.d2h_bytes - result.bound.d2h_bytes
        h2d = result.copies.h2d_bytes - result.bound.h2d_bytes
        found.append(f"B {d2h / _MIB:+.1f}/{h2d / _MIB:+.1f}")
    if result.frees is False:
        freeable = result.bound.freeable_bytes
        found.append(f"F {100 * result.freed_bytes / freeable:.0f} %" if freeable else "F")
    if result.keeps_aliases is False:
        found.append(f"A {result.aliases.kept}/{result.bound.shared_storages}")
    if not result.no_race:
        found.append(f"R {len(result.races)}")
    if not result.at_rest:
        found.append(f"L {result.device_leak_bytes / _MIB:.1f}+{result.host_leak_bytes / _MIB:.1f}")
    return " · ".join(found) or "✓"


def moved(result: Result) -> str:
    copies = result.copies
    return (
        f"{copies.d2h_bytes / _MIB:.1f}/{copies.h2d_bytes / _MIB:.1f} "
        f"({copies.d2h_copies}/{copies.h2d_copies})"
    )


# --- terminal


def print_summary(results: Results, console: Console) -> None:
    table = Table(title=f"activation offloaders in {len(results.cases)} cases")
    table.add_column("offloader")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for offloader in results.offloaders:
        if results.of(offloader):
            table.add_row(offloader.name, *results.counts(offloader))
    console.print(table)


# --- documentation


def markdown(results: Results, versions: dict[str, str]) -> str:
    measured = [each for each in results.offloaders if results.of(each)]
    compared = [each for each in measured if each.call]
    lines = [*_table(["offloader", *COLUMNS], ([e.name, *results.counts(e)] for e in measured))]
    lines += ["", "### The offloaders", ""]
    for each in compared:
        version = f"{each.package} {versions[each.name]}"
        adapted = f" Adapted: {each.adapted}." if each.adapted else ""
        lines.append(f"- **{each.name}** ({version}): `{each.call}`.{adapted}")
    for kind in dict.fromkeys(case.kind for case in results.cases):
        cases = [case for case in results.cases if case.kind == kind]
        lines += ["", f"### {kind[0].upper()}{kind[1:]}", ""]
        lines += [f"- *{case.name}*: {case.what}" for case in cases]
        header = ["case", *(each.name for each in compared)]
        lines += ["", *_table(header, (_row(results, case, compared, failures) for case in cases))]
        header = ["moved", "bound", *(each.name for each in compared)]
        rows = (
            [case.name, _bound(results, case, compared), *_row(results, case, compared, moved)[1:]]
            for case in cases
        )
        lines += ["", *_table(header, rows)]
    lines += ["", "### What was not right", "", *_wrong(results, compared)]
    lines += ["", f"PyTorch {torch.__version__}, Python {platform.python_version()}."]
    return "\n".join(lines)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def _row(results: Results, case: Case, offloaders: Sequence[Offloader], cell: Any) -> list[str]:
    found = [results.get(case, each) for each in offloaders]
    return [case.name, *("–" if result is None else cell(result) for result in found)]


def _bound(results: Results, case: Case, offloaders: Sequence[Offloader]) -> str:
    for each in offloaders:
        result = results.get(case, each)
        if result is not None and result.bound.h2d_bytes:
            return f"{result.bound.d2h_bytes / _MIB:.1f}/{result.bound.h2d_bytes / _MIB:.1f}"
    return "–"


def _wrong(results: Results, offloaders: Sequence[Offloader]) -> list[str]:
    lines = []
    for each in offloaders:
        cases: dict[str, list[str]] = {}
        for result in results.of(each):
            if not result.right:
                cases.setdefault(result.outcome, []).append(result.case)
        for outcome, names in cases.items():
            lines.append(f"- {each.name}: {outcome} ({'; '.join(names)})")
    return lines or ["Nothing."]


def write_docs(path: Path, results: Results, versions: dict[str, str]) -> None:
    """Replaces what is between the two markers."""
    text = path.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise SystemExit(f"{path} must have {BEGIN!r} and {END!r} once each")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    block = markdown(results, versions)
    path.write_text(f"{before}{BEGIN}\n\n{block}\n\n{END}{after}", encoding="utf-8")


# --- JSON


def write_json(path: Path, results: Results, versions: dict[str, str]) -> None:
    entries = [
        {"kind": case.kind, **dataclasses.asdict(result), "all_at_once": result.all_at_once}
        for case in results.cases
        for each in results.offloaders
        if (result := results.get(case, each)) is not None
    ]
    text = json.dumps(
        {"torch": torch.__version__, "versions": versions, "results": entries}, indent=1
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")
