"""Trains a GPT-2-style decoder in one mode and measures: ``python -m ebbtide.demo.training``.

Runs in a process of its own, so that modes cannot disturb each other's memory. It prints one JSON
object per line: ``{"step": …}`` after each step, then ``{"result": …}``.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ebbtide.demo.memory import PeakMemory
from ebbtide.demo.settings import MODES, Settings
from ebbtide.demo.text import read_corpus
from ebbtide.errors import EbbtideError

__all__ = ["HEAD_WIDTH", "Result", "Traffic", "Trainer", "train"]

HEAD_WIDTH = 64

_LEARNING_RATE = 3e-5


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes of one step, on average; None where nobody counts them."""

    saved_bytes: int
    """What autograd saved: elements times itemsize, weights and duplicates counted."""
    unique_bytes: int | None = None
    """After duplicates and aliases are resolved, without weights and small storages."""
    moved_out_bytes: int | None = None
    moved_in_bytes: int | None = None
    peak_tier_bytes: int = 0
    """At most in use in the tier at any time."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one mode's training came to."""

    mode: str
    losses: tuple[float, ...]
    loss_bits: tuple[int, ...]
    """Of every step: the loss's 32 bits as a number."""
    checksum: str
    """Over the bits of all parameters after the last step."""
    step_seconds: tuple[float, ...]
    growth_bytes: int
    """Peak of resident memory in training, above that before its first step."""
    peak_by_kernel: bool
    """Whether the kernel told the peak; otherwise it was sampled."""
    parameters: int
    threads: int
    accelerator: str | None
    """The type of the accelerator that this machine has and the demo does not use."""
    traffic: Traffic

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Result:
        for name in ("losses", "loss_bits", "step_seconds"):
            values = {**values, name: tuple(values[name])}
        return cls(**{**values, "traffic": Traffic(**values["traffic"])})


class Trainer(Protocol):
    """A decoder, its optimizer and batches of text in one framework: a class ``Trainer(mode, settings, text)`` of the
    module ``ebbtide.demo.<framework>_trainer``. Equal settings give equal weights and batches."""

    parameters: int
    threads: int
    accelerator: str | None
    tide: Any
    """The ``Offload`` object of mode "ebbtide", else None."""

    def warm_up(self) -> None:
        """A step that leaves the weights alone. Makes gradients and the optimizer's state, which are there in every mode:
        what grows after this is what a step needs besides."""

    def set_learning_rate(self, rate: float) -> None: ...

    def step(self) -> Any:
        """Trains on the next batch; returns what ``loss`` takes."""

    def loss(self, of_step: Any) -> tuple[float, int]:
        """The loss, and its 32 bits as a number."""

    def checksum(self) -> str:
        """Over the bits of all parameters."""

    def saved_bytes(self) -> int:
        """What autograd saves in a forward over the next batch."""


def train(
    mode: str,
    settings: Settings,
    on_step: Callable[[int], None],
    make_trainer: Callable[[str, Settings, bytes], Trainer] | None = None,
) -> Result:
    """Trains in this process; ``on_step`` is called with the number of steps done."""
    text = read_corpus(settings.sequence + 1)
    if make_trainer is None:
        of_framework = importlib.import_module(f"ebbtide.demo.{settings.framework}_trainer")
        make_trainer = of_framework.Trainer
    trainer = make_trainer(mode, settings, text)
    trainer.warm_up()
    trainer.set_learning_rate(_LEARNING_RATE)
    if trainer.tide is not None:
        trainer.tide.reset_stats()
    steps, seconds = [], []
    with PeakMemory() as memory:
        for done in range(1, settings.steps + 1):
            started = time.perf_counter()
            steps.append(trainer.step())
            seconds.append(time.perf_counter() - started)
            on_step(done)

    losses = [trainer.loss(step) for step in steps]
    checksum = trainer.checksum()
    if trainer.tide is not None:
        traffic = _traffic_of(trainer.tide.stats(), settings.steps)
    else:
        traffic = Traffic(saved_bytes=trainer.saved_bytes())
    return Result(
        mode=mode,
        losses=tuple(loss for loss, _ in losses),
        loss_bits=tuple(bits for _, bits in losses),
        checksum=checksum,
        step_seconds=tuple(seconds),
        growth_bytes=memory.growth_bytes,
        peak_by_kernel=memory.by_kernel,
        parameters=trainer.parameters,
        threads=trainer.threads,
        accelerator=trainer.accelerator,
        traffic=traffic,
    )


def _traffic_of(stats: Any, steps: int) -> Traffic:
    return Traffic(
        saved_bytes=stats.saved_bytes // steps,
        unique_bytes=stats.unique_bytes // steps,
        moved_out_bytes=stats.d2h_bytes // steps,
        moved_in_bytes=stats.h2d_bytes // steps,
        peak_tier_bytes=max(stats.peak_disk_bytes, stats.peak_host_bytes),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="One mode of `ebbtide demo`.")
    parser.add_argument("--mode", choices=tuple(MODES), required=True)
    parser.add_argument("--settings", type=Settings.from_json, default=Settings(), metavar="JSON")
    options = parser.parse_args()
    # Libraries may print: stdout is for our lines alone.
    lines, sys.stdout = sys.stdout, sys.stderr

    def tell(event: dict[str, Any]) -> None:
        print(json.dumps(event), file=lines, flush=True)

    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        result = train(options.mode, options.settings, lambda done: tell({"step": done}))
    except EbbtideError as error:
        print(error, file=sys.stderr)
        return 2
    tell({"result": dataclasses.asdict(result)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
