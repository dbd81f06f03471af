"""Peak memory growth and step time of the demo's model, or an MLP, without and with Ebbtide.

Two processes, one without and one with, take their steps in turn: a slow minute of the machine hits both. A ratio of
step times is of one such pair of steps; the first pair is left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from ebbtide.demo.settings import FRAMEWORKS, Settings
from ebbtide.demo.training import train

MODES = ("plain", "ebbtide")

# Of MindSpore, whose attention keeps many matrices of scores. Each saves some 0.8 GiB in 12 layers: enough that what is
# held in any case (the window, copies on their way, a few operations' own results) weighs little.
MINDSPORE_SIZES = {
    "decoder": {"layers": 12, "width": 512, "sequence": 256, "batch": 4},
    "mlp": {"layers": 12, "width": 512, "sequence": 1024, "batch": 16},
}


def trainer_of(framework: str, model: str) -> Any:
    """What makes the trainer; None for the demo's own."""
    if model == "decoder":
        return None
    import mindspore_mlp

    return mindspore_mlp.Trainer


def run_child(mode: str, model: str, settings: Settings) -> None:
    """Trains; after each step says so and waits for a line before the next."""
    lines, sys.stdout = sys.stdout, sys.stderr

    def pause(done: int) -> None:
        print(json.dumps({"step": done}), file=lines, flush=True)
        sys.stdin.readline()

    result = train(mode, settings, pause, trainer_of(settings.framework, model))
    print(json.dumps({"result": dataclasses.asdict(result)}), file=lines, flush=True)


class Child:
    def __init__(self, mode: str, model: str, settings: Settings) -> None:
        command = [sys.executable, __file__, "--child", mode, "--model", model]
        command += ["--settings", settings.to_json()]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a run ended with exit code {self._process.wait()}")
        return json.loads(line)

    def proceed(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)
        return self.receive()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--framework", choices=tuple(FRAMEWORKS), default="torch")
    parser.add_argument("--model", choices=("decoder", "mlp"), default="decoder")
    for name in ("layers", "width", "sequence", "batch"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--child", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--settings", type=Settings.from_json, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run_child(options.child, options.model, options.settings)
        return
    if options.model != "decoder" and options.framework != "mindspore":
        parser.error(f"--model {options.model}: only with --framework mindspore")

    sizes = dict(MINDSPORE_SIZES[options.model]) if options.framework == "mindspore" else {}
    for name in ("layers", "width", "sequence", "batch"):
        if (given := getattr(options, name)) is not None:
            sizes[name] = given
    settings = Settings(framework=options.framework, steps=options.steps, **sizes)
    children = []
    for mode in MODES:
        children.append(Child(mode, options.model, settings))
        children[-1].receive()
    answers: list[dict[str, Any]] = []
    for _ in range(options.steps):
        answers = [child.proceed() for child in children]
    plain, ebbtide = (answer["result"] for answer in answers)
    if plain["loss_bits"] != ebbtide["loss_bits"]:
        raise SystemExit("losses differ")

    pairs = list(zip(plain["step_seconds"], ebbtide["step_seconds"], strict=True))[1:]
    step = [with_it / without for without, with_it in pairs]
    growth = ebbtide["growth_bytes"] / plain["growth_bytes"]
    shape = f"{settings.batch} × {settings.sequence} × {settings.width}"
    what = f"{options.framework}, {options.model} of {settings.layers} layers, {shape}"
    table = Table(title=f"{what}: with Ebbtide, of the run without ({len(pairs)} pairs of steps)")
    for column in ("", "median", "least", "most"):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("peak memory growth", f"{growth:.2f}", "", "")
    figures = (statistics.median(step), min(step), max(step))
    table.add_row("step time", *(f"{figure:.2f}" for figure in figures))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
