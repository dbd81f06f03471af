"""Peak memory growth and step time of the demo's model without and with Ebbtide, as the median of pairs.

Each run is a fresh process; a pair is one run without and one with, one after the other, so that a slow minute of the
machine hits both. Ratios are of one pair.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table


def run(arguments: list[str]) -> dict[str, dict[str, float]]:
    """One demo in two modes; returns its JSON by mode."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "demo.json"
        command = [
            sys.executable,
            "-m",
            "ebbtide",
            "demo",
            "--modes",
            "plain,ebbtide",
            "--json",
            str(path),
        ]
        subprocess.run(
            [*command, *arguments], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        return {row["mode"]: row for row in json.loads(path.read_text())["runs"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    options, demo_arguments = parser.parse_known_args()
    growth, step = [], []
    for _ in range(options.pairs):
        rows = run(demo_arguments)
        plain, ebbtide = rows["plain"], rows["ebbtide"]
        growth.append(ebbtide["peak_growth_bytes"] / plain["peak_growth_bytes"])
        step.append(ebbtide["step_s"] / plain["step_s"])
    table = Table(title=f"with Ebbtide, of the run without ({options.pairs} pairs)")
    for column in ("", "median", "least", "most"):
        table.add_column(column, justify="right" if column else "left")
    for name, ratios in (("peak memory growth", growth), ("step time", step)):
        table.add_row(
            name,
            *(f"{number:.2f}" for number in (statistics.median(ratios), min(ratios), max(ratios))),
        )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
