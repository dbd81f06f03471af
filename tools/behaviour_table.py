#!/usr/bin/env python3
"""Print which behaviour tests ran for which framework and device, from what the runs left in ``build/behaviour``.

A cell is how all variants of a test (tier, prefetch, parameters) ended, without and with ``group_swap``. Whatever did not
run has its reason; without one it is an unexplained hole, and the exit status is 1.

Usage: ``behaviour_table.py [--short]``; ``--short`` prints totals and holes, and not the names.
``behaviour_table.py --unavailable BACKEND REASON`` notes why a backend cannot be run here at all.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests" / "python" / "behaviour"
OUTCOMES = ROOT / "build" / "behaviour"
BACKENDS = ("torch-cpu", "torch-tide", "mindspore-cpu")
UNAVAILABLE = "unavailable"  # in place of tests: why a whole backend could not run

Outcomes = dict[str, dict[str, dict[str, str]]]


class Cell(NamedTuple):
    text: str
    holes: dict[str, int]  # reasons, and how many variants each left out; "" is no reason


def read(backend: str) -> tuple[Outcomes, str]:
    """Outcomes, and why there are none."""
    path = OUTCOMES / f"{backend}.json"
    if not path.exists():
        return {}, f"{backend} did not run, or its process died"
    found: Any = json.loads(path.read_text(encoding="utf-8"))
    return ({}, found[UNAVAILABLE]) if UNAVAILABLE in found else (found, "")


def about(file: str) -> str:
    """The first line of a test file's docstring."""
    docstring = ast.get_docstring(ast.parse((TESTS / file).read_text(encoding="utf-8")))
    return (docstring or "").split("\n")[0].rstrip(".")


def cell(name: str, backend: str, outcomes: Outcomes, no_outcomes: str, swapped: bool) -> Cell:
    if no_outcomes:
        return Cell("not run", {no_outcomes: 1})
    file = name.split("::")[0]
    if file in outcomes:
        return Cell("skipped", {outcomes[file][""]["reason"]: 1})
    if name not in outcomes:
        if file.startswith("test_torch_") and not backend.startswith("torch-"):
            return Cell("-", {f"PyTorch's own: {about(file)} ({file})": 1})
        return Cell("NOT RUN", {"": 1})
    variants = {
        variant: outcome
        for variant, outcome in outcomes[name].items()
        if not variant.startswith(backend) or ("-packed-" in variant) == swapped
    }
    if not variants:
        return Cell("NOT RUN", {"": 1})
    counts = Counter(outcome["outcome"] for outcome in variants.values())
    holes = Counter(
        outcome.get("reason", "")
        for outcome in variants.values()
        if outcome["outcome"] == "skipped"
    )
    text = " ".join(f"{counts[word]} {word}" for word in sorted(counts))
    return Cell(text, dict(holes))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="totals and holes only")
    parser.add_argument("--unavailable", nargs=2, metavar=("BACKEND", "REASON"))
    arguments = parser.parse_args()
    if arguments.unavailable:
        backend, reason = arguments.unavailable
        OUTCOMES.mkdir(parents=True, exist_ok=True)
        text = json.dumps({UNAVAILABLE: reason.strip()})
        (OUTCOMES / f"{backend}.json").write_text(text, encoding="utf-8")
        return 0

    runs = {backend: read(backend) for backend in BACKENDS}
    names = sorted({name for outcomes, _ in runs.values() for name in outcomes if "::" in name})
    columns = [(backend, swapped) for backend in BACKENDS for swapped in (False, True)]
    table = {
        (name, *column): cell(name, column[0], *runs[column[0]], column[1])
        for name in names
        for column in columns
    }
    if not arguments.short:
        print_names(names, columns, table)
    print_totals(names, columns, table)
    return print_holes(columns, table)


def print_names(names: list[str], columns: list[tuple[str, bool]], table: dict[Any, Cell]) -> None:
    heads = [f"{backend}{' group_swap' if swapped else ''}" for backend, swapped in columns]
    width = max(map(len, names), default=4)
    print("behaviour".ljust(width), *(head.ljust(24) for head in heads), sep=" | ")
    for name in names:
        cells = (table[(name, *column)].text.ljust(24) for column in columns)
        print(name.ljust(width), *cells, sep=" | ")
    print()


def print_totals(names: list[str], columns: list[tuple[str, bool]], table: dict[Any, Cell]) -> None:
    print(
        f"{len(names)} behaviour tests; how many passed in every variant, and of how many all or some did not run:"
    )
    for backend, swapped in columns:
        cells = [table[(name, backend, swapped)] for name in names]
        whole = sum("passed" in c.text and not c.holes and "failed" not in c.text for c in cells)
        partly = sum("passed" in c.text and bool(c.holes) for c in cells)
        none = sum("passed" not in c.text and "failed" not in c.text for c in cells)
        failed = sum("failed" in c.text for c in cells)
        swap = "with group_swap" if swapped else ""
        line = f"  {backend:<14}{swap:<16}{whole:4} passed, {partly:3} partly, {none:3} not"
        print(line + (f", {failed} FAILED" if failed else ""))


def print_holes(columns: list[tuple[str, bool]], table: dict[Any, Cell]) -> int:
    """Each reason once, with the tests it is about. Returns 1 where there is none."""
    reasons: dict[tuple[str, str], set[str]] = {}
    for (name, backend, _), found in table.items():
        for reason in found.holes:
            reasons.setdefault((backend, reason), set()).add(name)
    unexplained = 0
    for (backend, reason), names in sorted(reasons.items()):
        if reason:
            short = [name.split("::")[1].removeprefix("test_") for name in sorted(names)]
            shown = ", ".join(short[:2]) + (f" and {len(short) - 2} more" if len(short) > 2 else "")
            print(f"  {backend}: {reason}: {shown}")
        else:
            unexplained = 1
            print(f"  {backend}: UNEXPLAINED: {', '.join(sorted(names)[:9])} of {len(names)}")
    return unexplained


if __name__ == "__main__":
    sys.exit(main())
