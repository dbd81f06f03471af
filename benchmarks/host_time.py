"""Host time per saved tensor: what hooks cost when everything is kept and when everything is offloaded.

All variants run interleaved in one process, the median over the rounds is printed: compare the ratios, not the
microseconds of different runs. ``identity`` returns a detached alias and does nothing else: the least a correct hook
can cost.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import ebbtide.torch as ebb


def chain(x: torch.Tensor, length: int) -> torch.Tensor:
    """Every step saves one tensor of its own storage."""
    for _ in range(length):
        x = torch.sin(x)
    return x


def once(context: AbstractContextManager[Any], x: torch.Tensor, length: int) -> tuple[float, float]:
    """Microseconds per saved tensor in forward and in backward."""
    gc.collect()
    gc.disable()
    started = time.perf_counter()
    with context:
        y = chain(x, length)
    between = time.perf_counter()
    y.sum().backward()
    ended = time.perf_counter()
    gc.enable()
    return (between - started) / length * 1e6, (ended - between) / length * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=1000, help="saved tensors per round")
    parser.add_argument(
        "--elements", type=int, default=64, help="elements of each tensor (4 bytes)"
    )
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)

    kept = ebb.offload(min_bytes="1GiB", to="host")
    to_host = ebb.offload(min_bytes=0, keep_last_bytes=0, to="host")
    to_disk = ebb.offload(min_bytes=0, keep_last_bytes=0, to="disk")
    variants: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "no hooks": contextlib.nullcontext,
        "identity": lambda: saved_tensors_hooks(lambda t: t.detach(), lambda t: t),
        "save_on_cpu": save_on_cpu,
        "ebbtide, everything kept": lambda: kept,
        "ebbtide, everything to host": lambda: to_host,
        "ebbtide, everything to disk": lambda: to_disk,
    }
    x = torch.randn(options.elements, requires_grad=True)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for _ in range(options.rounds):
        for name, make in variants.items():
            times[name].append(once(make(), x, options.length))

    table = Table(
        title=f"host time per saved tensor ({options.elements * 4} bytes), microseconds, median"
    )
    for column in ("hooks", "forward", "backward", "sum", "above identity"):
        table.add_column(column, justify="left" if column == "hooks" else "right")
    medians = {
        name: tuple(statistics.median(part) for part in zip(*rows, strict=True))
        for name, rows in times.items()
    }
    base = sum(medians["identity"])
    for name, (forward, backward) in medians.items():
        total = forward + backward
        table.add_row(
            name, f"{forward:.2f}", f"{backward:.2f}", f"{total:.2f}", f"{total - base:+.2f}"
        )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
