"""``ebbtide demo``: options, progress, and the order of things."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ebbtide.config import OffloadConfig
from ebbtide.demo.compare import differences, run_mode
from ebbtide.demo.settings import FRAMEWORKS, MODES, Settings
from ebbtide.demo.table import explain, render
from ebbtide.demo.training import HEAD_WIDTH, Result
from ebbtide.errors import UsageError
from ebbtide.resolved import Resolved

__all__ = ["add_to"]

_DESCRIPTION = """\
Train a small GPT-2-style decoder on Python's own source text, without and with Ebbtide, and compare
memory, time and results. Nothing is downloaded. Takes one to two minutes on two cores.

modes:
""" + "\n".join(f"  {mode:12} {what}" for mode, what in MODES.items())

# Packages, and the command that installs them.
_NEEDS = {
    "torch": (("torch", "transformers"), "pip install 'ebbtide[demo]' torch"),
    "mindspore": (("mindspore",), "pip install 'ebbtide[mindspore]'"),
}

_EPILOG = "Exit code: 0, or 1 where losses or parameters differ, or 2 where the demo cannot run."


def add_to(commands: Any) -> None:
    """Adds the command to argparse's ``commands``."""
    default = Settings()
    parser = commands.add_parser(
        "demo",
        help="train a small decoder without and with Ebbtide, and compare",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=_run)
    parser.add_argument(
        "--framework",
        choices=tuple(FRAMEWORKS),
        default=default.framework,
        help="what to train with (default: %(default)s)",
    )

    def add_count(name: str, help_text: str, least: int = 1) -> None:
        value = getattr(default, name)
        parser.add_argument(
            f"--{name}",
            type=_count(least),
            default=value,
            metavar="N",
            help=f"{help_text} (default: {value or 'as the framework chooses'})",
        )

    add_count("steps", "training steps of each mode")
    add_count("layers", "blocks of the decoder")
    add_count("width", f"of the hidden states, a multiple of {HEAD_WIDTH}", HEAD_WIDTH)
    add_count("sequence", "tokens of a sample; a token is a byte", 2)
    add_count("batch", "samples of a step")
    add_count("threads", "of the framework")
    parser.add_argument(
        "--to",
        default=default.to,
        metavar="TIER",
        help='"disk", "host", or a directory on a disk (default: %(default)s)',
    )
    parser.add_argument(
        "--seed",
        type=_count(0, (1 << 63) - 1),
        default=default.seed,
        metavar="N",
        help="of weights and samples (default: %(default)s)",
    )
    parser.add_argument(
        "--modes",
        type=_modes,
        metavar="MODE[,MODE…]",
        help="what to run (default: all that the framework has)",
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there too")


def _count(least: int, most: int = (1 << 31) - 1) -> Any:
    def parse(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(
                f"{text!r}: give a whole number from {least} to {most}"
            )
        return int(text)

    return parse


def _modes(text: str) -> tuple[str, ...]:
    modes = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for mode in modes:
        if mode not in MODES:
            raise argparse.ArgumentTypeError(f"{mode!r}: give some of {', '.join(MODES)}")
    return modes


def _run(options: argparse.Namespace) -> int:
    names = [field.name for field in dataclasses.fields(Settings)]
    settings = Settings(**{name: getattr(options, name) for name in names})
    modes = options.modes or FRAMEWORKS[settings.framework]
    directory = _check(settings, modes, options.json)
    out, progress = Console(highlight=False), Console(stderr=True, highlight=False)
    results = _train_all(modes, settings, progress)
    found = differences(results)
    if options.json is not None:
        _write(options.json, settings, results, found)
    out.print(_headline(settings, results[0]))
    out.print(render(results, unknown="–" if out.encoding.startswith("utf") else "-"))
    out.print(*explain(results, directory))
    if results[0].accelerator is not None:
        out.print(
            f"This machine has an accelerator ({results[0].accelerator}); "
            "this release offloads CPU tensors only, so all of this ran on the CPU."
        )
    return 1 if found else 0


def _check(settings: Settings, modes: Sequence[str], output: Path | None) -> Path | None:
    """Raises UsageError for what would fail in every mode; returns the disk tier's directory."""
    needed, command = _NEEDS[settings.framework]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"[demo] {' and '.join(missing)} not installed: {command}")
    for mode in modes:
        if mode not in FRAMEWORKS[settings.framework]:
            raise UsageError(
                f"[demo] {settings.framework} has no mode {mode!r}: give some of "
                f"{', '.join(FRAMEWORKS[settings.framework])}"
            )
    if settings.width % HEAD_WIDTH:
        raise UsageError(f"[demo] --width {settings.width}: give a multiple of {HEAD_WIDTH}")
    if output is not None and not output.absolute().parent.is_dir():
        raise UsageError(f"[demo] --json {output}: its directory does not exist: create it")
    return Resolved.from_config(
        OffloadConfig.from_options(to=settings.to), "cpu", accelerator=False
    ).directory


def _train_all(modes: Sequence[str], settings: Settings, console: Console) -> list[Result]:
    results: list[Result] = []
    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f} of {task.total:.0f} steps"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    # Where nobody watches, a bar would be printed once, at its end.
    shown: AbstractContextManager[Any] = bars if console.is_terminal else nullcontext()
    with shown:
        for mode in modes:
            bar = bars.add_task(mode, total=settings.steps)
            on_step = partial(_advance, bars, bar)
            results.append(run_mode(mode, settings, on_step))
    return results


def _advance(bars: Progress, bar: TaskID, done: int) -> None:
    bars.update(bar, completed=done)


def _headline(settings: Settings, result: Result) -> str:
    return (
        f"A decoder of {settings.layers} layers, width {settings.width}, "
        f"{result.parameters / 1e6:.1f} million parameters; {settings.steps} steps of "
        f"{settings.batch} x {settings.sequence} tokens; {settings.framework} on the CPU, "
        f"{result.threads} threads."
    )


def _write(path: Path, settings: Settings, results: Sequence[Result], found: list[str]) -> None:
    content = {
        "settings": dataclasses.asdict(settings),
        "equal": not found,
        "differences": found,
        "modes": {result.mode: dataclasses.asdict(result) for result in results},
    }
    try:
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"[demo] --json {path}: {error.strerror}: give another file") from error
