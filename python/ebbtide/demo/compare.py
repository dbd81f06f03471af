"""Runs modes one after another, each in a fresh process, and compares what they computed."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import IO, Any

from ebbtide.demo.settings import Settings
from ebbtide.demo.training import Result
from ebbtide.errors import EbbtideError

__all__ = ["differences", "run_mode"]


def run_mode(mode: str, settings: Settings, on_step: Callable[[int], None]) -> Result:
    """Trains in a process of its own; ``on_step`` is called with the number of steps done.

    Raises:
        EbbtideError: the process did not end well; the text ends with the last line it wrote.
    """
    arguments = ["--mode", mode, "--settings", settings.to_json()]
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "ebbtide.demo.training", *arguments],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            encoding="utf-8",
        )
        with process:
            try:
                result = _follow(process.stdout, on_step)
            except BaseException:
                process.kill()
                raise
        if process.returncode == 0 and result is not None:
            return result
        raise EbbtideError(
            f"[demo] mode {mode} ended with exit code {process.returncode}: {_last_line(errors)}"
        )


def _follow(lines: IO[str] | None, on_step: Callable[[int], None]) -> Result | None:
    result: Result | None = None
    for line in lines or ():
        if not line.startswith("{"):  # a library's own output, past Python's stdout
            continue
        event: dict[str, Any] = json.loads(line)
        if "step" in event:
            on_step(event["step"])
        else:
            result = Result.from_dict(event["result"])
    return result


def _last_line(stream: IO[bytes]) -> str:
    stream.seek(0)
    lines = stream.read().decode("utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "no word why")


def differences(results: Sequence[Result]) -> list[str]:
    """How ``results`` differ from the first one, in words; empty where all computed the same.

    Losses are compared by their bits at every step, parameters by a checksum over their bits.
    """
    found: list[str] = []
    for result in results[1:]:
        first = results[0]
        if len(result.loss_bits) != len(first.loss_bits):
            found.append(
                f"{result.mode} has {len(result.loss_bits)} losses, "
                f"{first.mode} {len(first.loss_bits)}"
            )
            continue
        pairs = zip(first.loss_bits, result.loss_bits, strict=True)
        steps = [step for step, (a, b) in enumerate(pairs, start=1) if a != b]
        if steps:
            found.append(
                f"{result.mode} and {first.mode} differ in {len(steps)} losses, "
                f"the first at step {steps[0]}"
            )
        if result.checksum != first.checksum:
            found.append(f"{result.mode} and {first.mode} differ in their final parameters")
    return found
