"""Host time per saved tensor on MindSpore, beside a pair of hooks that does nothing else than keep the tensor.

All variants run interleaved in one process, and the median over the rounds is printed: compare the ratios, not the
microseconds of different runs. Forward and backward together.
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

import mindspore
import numpy as np
from mindspore import Tensor, mint, ops, saved_tensors_hooks
from rich.console import Console
from rich.table import Table

import ebbtide.mindspore as ebb


def once(gradient: Any, context: AbstractContextManager[Any], x: Tensor, length: int) -> float:
    """Microseconds per saved tensor."""
    gc.collect()
    gc.disable()
    started = time.perf_counter()
    with context:
        gradient(x).asnumpy()
    ended = time.perf_counter()
    gc.enable()
    return (ended - started) / length * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=300, help="saved tensors per round")
    parser.add_argument("--elements", type=int, default=64, help="of each tensor (4 bytes)")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    mindspore.runtime.launch_blocking()

    def chain(x: Tensor) -> Tensor:
        for _ in range(options.length):
            x = mint.sin(x)  # saves its input
        return x.sum()

    kept = ebb.offload(min_bytes="1GiB", to="host")
    to_host = ebb.offload(min_bytes=0, keep_last_bytes=0, to="host")
    to_disk = ebb.offload(min_bytes=0, keep_last_bytes=0, to="disk")
    variants: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "no hooks": contextlib.nullcontext,
        "identity": lambda: saved_tensors_hooks(ops.stop_gradient, lambda tensor: tensor),
        "ebbtide, everything kept": lambda: kept,
        "ebbtide, everything to host": lambda: to_host,
        "ebbtide, everything to disk": lambda: to_disk,
    }
    x = Tensor(np.random.default_rng(0).normal(size=options.elements).astype(np.float32))
    gradient = mindspore.grad(chain)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(options.rounds):
        for name, make in variants.items():
            times[name].append(once(gradient, make(), x, options.length))

    table = Table(title=f"host time per saved tensor ({options.elements * 4} bytes), median")
    for column in ("hooks", "microseconds", "above identity", "of identity"):
        table.add_column(column, justify="left" if column == "hooks" else "right")
    medians = {name: statistics.median(found) for name, found in times.items()}
    for name, found in medians.items():
        above, ratio = found - medians["identity"], found / medians["identity"]
        table.add_row(name, f"{found:.1f}", f"{above:+.1f}", f"{ratio:.2f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
