"""Ebbtide on a real accelerator: first whether gradients are right, then what it costs and gains.

    python benchmarks/accelerator.py --json results.json                # under eight minutes
    python benchmarks/accelerator.py --disk /mnt/nvme/tmp               # with a disk behind the host too
    python benchmarks/accelerator.py --dry-run                          # tiny sizes; the test device where there is no other

Needs torch, Ebbtide and rich; uses transformers, torchtune and TRL where they are installed, and says where they are not.
Ends with 1 where something is not right, with 2 where there is nothing to measure on. The file is
written after each section, so that a run that is cut short leaves what it has measured.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for equal bits from run to run
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from on_accelerator import bandwidth, correctness, fill, output, steps
from on_accelerator.budget import Budget
from on_accelerator.machine import Machine, NoDevice
from rich.console import Console

# Of the whole time, what a section may take at most.
SHARES = {
    "correctness": 0.2,
    "bandwidth": 0.12,
    "decoder": 0.35,
    "gpt2": 0.2,
    "lstm": 0.1,
    "fill": 0.25,
}


class Run:
    def __init__(self, args: argparse.Namespace, console: Console) -> None:
        self.machine = Machine(args.dry_run)
        self.budget = Budget(args.minutes)
        self.args, self._console = args, console
        self.results: dict[str, Any] = {
            "machine": self.machine.describe(),
            "arguments": {name: str(value) for name, value in vars(args).items()},
            "errors": {},
            "cut": self.budget.cut,
        }

    def section(self, name: str, measure: Callable[[], Any]) -> None:
        """One that fails is noted, and the rest go on."""
        self.budget.begin(SHARES[name])
        self._console.print(f"{name} … {self.budget.used_s:.0f} s", highlight=False)
        if self.budget.allows(0, name):
            try:
                self.results[name] = measure()
            except Exception as error:
                traceback.print_exc()
                self.results["errors"][name] = f"{type(error).__name__}: {error}"
        self.machine.clean()
        self.save()

    def save(self) -> None:
        self.results["seconds"] = self.budget.used_s
        if self.args.json is not None:
            text = json.dumps(self.results, indent=1)
            self.args.json.write_text(text + "\n", encoding="utf-8")

    def check(self) -> list[str]:
        """What is not right."""
        args = self.args

        def entries() -> dict[str, Any]:
            found = correctness.check(self.machine, args.disk, args.dry_run, self.budget.allows)
            return {
                "entries": found,
                "failures": correctness.failures(found),
                "traffic_failures": correctness.traffic_failures(found),
            }

        self.section("correctness", entries)
        reason = self.results["errors"].get("correctness", "no time: nothing was compared")
        nothing = {"entries": [], "failures": [reason], "traffic_failures": []}
        found = self.results.setdefault("correctness", nothing)
        found["correct"] = not found["failures"]
        self.save()
        return found["failures"]

    def measure(self) -> None:
        machine, budget, args = self.machine, self.budget, self.args
        tiny, disk, rounds = args.dry_run, args.disk, args.rounds
        self.section("bandwidth", lambda: bandwidth.measure(machine, tiny, budget))
        self.section("decoder", lambda: steps.decoder(machine, disk, tiny, rounds, budget))
        self.section("gpt2", lambda: steps.gpt2(machine, disk, tiny, rounds, budget))
        self.section("lstm", lambda: steps.lstm(machine, tiny, rounds, budget))
        self.section("fill", lambda: fill.measure(machine, tiny, budget))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="to keep to; cuts are listed")
    parser.add_argument("--rounds", type=int, default=7, help="steps of each offloader")
    parser.add_argument("--json", type=Path, help="write all numbers there")
    parser.add_argument("--disk", type=Path, help="a directory on a disk, to put behind the host")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, one round")
    args = parser.parse_args(argv)
    if args.dry_run:
        args.rounds = 1
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    try:
        run = Run(args, console)
    except NoDevice as error:
        print(f"accelerator: {error}", file=sys.stderr)
        return 2
    wrong = run.check()
    if not wrong:
        run.measure()
    output.show(console, run.results)
    if wrong:
        print("NOT RIGHT, nothing was measured:", *wrong, sep="\n  ", file=sys.stderr)
        return 1
    traffic = run.results["correctness"]["traffic_failures"]
    failed = [f"{name}: {error}" for name, error in run.results["errors"].items()]
    if traffic or failed:
        print("NOT AS IT SHOULD BE:", *traffic, *failed, sep="\n  ", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
