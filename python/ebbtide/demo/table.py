"""The demo's results as one table, and what it means in words."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from rich import box
from rich.table import Table

from ebbtide.demo.compare import differences
from ebbtide.demo.settings import MODES
from ebbtide.demo.training import Result
from ebbtide.sizes import format_bytes

__all__ = ["explain", "render"]

_REFERENCE = next(iter(MODES))


def render(results: Sequence[Result], unknown: str = "–") -> Table:
    """One column per mode; ``unknown`` where a mode does not know a number."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for result in results:
        table.add_column(result.mode, justify="right", no_wrap=True)

    def add(label: str, cell: Callable[[Result], str | None]) -> None:
        cells = (cell(result) for result in results)
        table.add_row(label, *(unknown if text is None else text for text in cells))

    def add_ratio(value: Callable[[Result], float]) -> None:
        reference = next((value(result) for result in results if result.mode == _REFERENCE), 0.0)
        add(f"  to {_REFERENCE}", lambda it: f"{value(it) / reference:.2f}" if reference else None)

    add("losses and final parameters", lambda it: _verdict(results[0], it))
    add("loss, first step", lambda it: f"{it.losses[0]:.4f}")
    add("loss, last step", lambda it: f"{it.losses[-1]:.4f}")
    table.add_section()
    add("peak memory growth", lambda it: format_bytes(it.growth_bytes))
    add_ratio(lambda it: it.growth_bytes)
    add("step time, median", lambda it: f"{_median_seconds(it):.2f} s")
    add_ratio(_median_seconds)
    table.add_section()
    add("per step: saved by autograd", lambda it: _bytes(it.traffic.saved_bytes))
    add("  without weights and duplicates", lambda it: _bytes(it.traffic.unique_bytes))
    add("  moved out", lambda it: _bytes(it.traffic.moved_out_bytes))
    add("  moved in", lambda it: _bytes(it.traffic.moved_in_bytes))
    return table


def explain(results: Sequence[Result], directory: Path | None) -> list[str]:
    """What the table means. ``directory`` is the disk tier's, None where the tier is the host."""
    sentences: list[str] = []
    if len(results) > 1:
        found = differences(results)
        sentences.append(
            f"NOT EQUAL: {'; '.join(found)}."
            if found
            else "Every step's loss and all parameters after the last step are equal, bit for bit."
        )
    for result in results:
        if result.mode == "ebbtide":
            place = "host memory" if directory is None else f"disk, in {directory}"
            sentences.append(
                f"Ebbtide moved activations to {place}: at most "
                f"{format_bytes(result.traffic.peak_tier_bytes)} at a time."
            )
        if result.mode == "save_on_cpu":
            sentences.append("save_on_cpu has nothing to move: the tensors are on the CPU already.")
    sentences.append(
        "Memory growth is the peak of resident memory in training above that before its first "
        "step; weights, gradients and the optimizer's state are there by then."
    )
    if not all(result.peak_by_kernel for result in results):
        sentences.append("It was sampled, since the kernel does not tell it here.")
    return sentences


def _verdict(first: Result, result: Result) -> str | None:
    if result is first:
        return None
    return "DIFFERENT" if differences((first, result)) else "equal"


def _median_seconds(result: Result) -> float:
    return statistics.median(result.step_seconds)


def _bytes(nbytes: int | None) -> str | None:
    return None if nbytes is None else format_bytes(nbytes)
