"""Runs every case under every offloader on the test device, and writes down what came of it."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from rich.console import Console

from peers import table
from peers.cases import all_cases
from peers.offloaders import OFFLOADERS, Unavailable
from peers.processes import measure_all


def main() -> None:
    parser = argparse.ArgumentParser(prog="peers", description=__doc__)
    parser.add_argument("--only", help="offloaders, by their names, separated by commas")
    parser.add_argument("--cases", default="", help="those with this in their kind or name")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--docs", type=Path, help="whose block between markers is written anew")
    options = parser.parse_args()

    console = Console(width=None if sys.stdout.isatty() else 120)
    named = options.only.split(",") if options.only else [each.name for each in OFFLOADERS]
    unknown = set(named) - {each.name for each in OFFLOADERS}
    if unknown:
        parser.error(f"no such offloader: {', '.join(sorted(unknown))}")
    offloaders, versions = [], {}
    for each in OFFLOADERS:
        if each.name not in named:
            continue
        try:
            versions[each.name] = each.version()
        except Unavailable as reason:
            console.print(f"{each.name} is left out: {reason}")
        else:
            offloaders.append(each)
    cases = [case for case in all_cases() if options.cases in f"{case.kind} {case.name}"]

    pairs = [(case, each) for case in cases for each in offloaders if each.applies(case)]
    found = []
    for (case, each), result in measure_all(pairs, options.jobs):
        found.append(result)
        note = "" if result.right else f"  {result.outcome}"
        line = f"[{len(found)}/{len(pairs)}] {case.name}, {each.name}: "
        console.print(line + table.failures(result) + note, markup=False, highlight=False)
    results = table.Results(cases, offloaders, found)
    table.print_summary(results, console)
    if options.json:
        table.write_json(options.json, results, versions)
    if options.docs:
        table.write_docs(options.docs, results, versions)


if __name__ == "__main__":
    main()
