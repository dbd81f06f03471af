"""Host time per saved tensor on a device with streams: Ebbtide beside torchtune's and TRL's offloaders.

    python benchmarks/host_time_device.py            # on the accelerator, else on the test device

All variants run interleaved in one process and the medians over the rounds are printed: compare what stands above a
baseline, not the microseconds of different runs. The time is the processor time of this process, all its
threads together, so that other processes disturb it less. Two baselines bound what hooks can cost:

* ``identity`` returns a detached alias;
* ``raw copies`` makes each tensor's copy out and back, with torch's streams and events and nothing else. Once
  from page-locked memory made before, as Ebbtide's is, and once made for each tensor, as the other offloaders do.

What the device itself needs for copies and allocations is in the baseline too, and not in the difference.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from host_time import chain
from rich.console import Console
from rich.table import Table
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import ebbtide.torch as ebb

ROOT = Path(__file__).resolve().parents[1]
NEVER = 1 << 40  # bytes that no tensor here has
STASH = 5  # tensors that torchtune's and TRL's offloaders hold back by default

Enter = Callable[[], AbstractContextManager[Any]]


class RawCopies:
    """The copies that an offloader has to make, in the fewest calls that are right."""

    def __init__(self, length: int, elements: int, pooled: bool) -> None:
        self._copies = torch.Stream(device=torch.accelerator.current_accelerator())
        self._pool = [pinned(elements) for _ in range(length)] if pooled else []
        self._next = 0
        self._pooled = pooled

    def enter(self) -> AbstractContextManager[Any]:
        self._next = 0
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Event]:
        if self._pooled:
            host = self._pool[self._next]
            self._next += 1
        else:
            host = pinned(tensor.numel())
        copies = self._copies
        copies.wait_stream(torch.accelerator.current_stream())
        with copies:
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(copies)
        return host, copies.record_event()

    def _unpack(self, saved: tuple[torch.Tensor, torch.Event]) -> torch.Tensor:
        host, done = saved
        copies, current = self._copies, torch.accelerator.current_stream()
        tensor = torch.empty_like(host, device=copies.device)
        copies.wait_stream(current)
        with copies:
            copies.wait_event(done)
            tensor.copy_(host, non_blocking=True)
        current.wait_stream(copies)
        tensor.record_stream(copies)
        return tensor


def pinned(elements: int) -> torch.Tensor:
    return torch.empty(elements, pin_memory=True)


def peers(device: str) -> dict[str, Callable[..., AbstractContextManager[Any]]]:
    """The other offloaders' classes that are installed here."""
    found: dict[str, Callable[..., AbstractContextManager[Any]]] = {}
    with contextlib.suppress(Exception):
        from peers.offloaders import _torchtune_module

        found["torchtune"] = _torchtune_module(device).OffloadActivations
    with contextlib.suppress(Exception):
        from accelerate import PartialState
        from trl.models.activation_offloading import OffloadActivations

        PartialState()
        found["TRL"] = OffloadActivations
    return found


def make_variants(device: str, length: int, elements: int) -> dict[str, tuple[str, Enter]]:
    """By name: the baseline, and what to enter."""
    # The others hold the last tensors back too.
    held_back = STASH * elements * 4
    everything: dict[str, Any] = {"min_bytes": 0, "keep_last_bytes": held_back, "to": "host"}

    def always(context: AbstractContextManager[Any]) -> Enter:
        return lambda: context

    variants: dict[str, tuple[str, Enter]] = {
        "no hooks": ("identity", contextlib.nullcontext),
        "identity": ("", lambda: saved_tensors_hooks(lambda t: t.detach(), lambda t: t)),
        "raw copies": ("", RawCopies(length, elements, pooled=True).enter),
        "raw copies, pinned each": ("", RawCopies(length, elements, pooled=False).enter),
        "kept: Ebbtide": ("identity", always(ebb.offload(min_bytes=NEVER, to="host"))),
    }
    others = peers(device)
    for name, make in others.items():
        variants[f"kept: {name}"] = ("identity", always(make(min_offload_size=NEVER)))
    variants["moved: Ebbtide"] = ("raw copies", always(ebb.offload(**everything)))
    variants["moved: Ebbtide group_swap"] = (
        "raw copies",
        always(ebb.offload(**everything, group_swap=True)),
    )
    for name, make in others.items():
        variants[f"moved: {name}"] = ("raw copies, pinned each", always(make(min_offload_size=0)))
    variants["moved: save_on_cpu"] = (
        "raw copies, pinned each",
        lambda: save_on_cpu(pin_memory=True, device_type=device),
    )
    return variants


def once(context: AbstractContextManager[Any], x: torch.Tensor, length: int) -> tuple[float, float]:
    """Microseconds of processor time per saved tensor in forward and in backward.

    In between the device catches up: what was moved out has left when backward begins.
    """
    gc.collect()
    gc.disable()
    started = time.process_time()
    with context:
        y = chain(x, length)
    forward = time.process_time() - started
    torch.accelerator.synchronize()
    started = time.process_time()
    y.sum().backward()
    torch.accelerator.synchronize()
    backward = time.process_time() - started
    gc.enable()
    return forward / length * 1e6, backward / length * 1e6


def measure(
    variants: dict[str, tuple[str, Enter]], x: torch.Tensor, length: int, rounds: int
) -> dict[str, tuple[float, float]]:
    """Medians over the rounds: microseconds per saved tensor in forward and in backward."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for round_ in range(rounds + 1):
        for name, (_, enter) in variants.items():
            found = once(enter(), x, length)
            if round_ > 0:  # before that pools are empty
                times[name].append(found)
    return {
        name: (statistics.median(row[0] for row in rows), statistics.median(row[1] for row in rows))
        for name, rows in times.items()
    }


def show(
    medians: dict[str, tuple[float, float]], variants: dict[str, tuple[str, Enter]], title: str
) -> None:
    table = Table(title=title)
    for column in ("hooks", "forward", "backward", "sum", "baseline", "above it"):
        table.add_column(
            column, justify="left" if column in ("hooks", "baseline") else "right", no_wrap=True
        )
    for name, (forward, backward) in medians.items():
        base = variants[name][0]
        above = f"{forward + backward - sum(medians[base]):+.1f}" if base else ""
        row = (f"{forward:.1f}", f"{backward:.1f}", f"{forward + backward:.1f}")
        table.add_row(name, *row, base, above)
    Console(width=110).print(table)


def device_type() -> str:
    """The accelerator; where there is none the test device, without its checks."""
    if not torch.accelerator.is_available():
        sys.path.append(str(ROOT / "tests" / "device"))
        from tide_device import control

        control.set_checking(False)
        control.options(poison=False)
    return str(torch.accelerator.current_accelerator().type)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=500, help="saved tensors per round")
    parser.add_argument("--elements", type=int, default=1024, help="of each tensor (4 bytes)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--only", default="", help="variants with this in their name, and baselines"
    )
    parser.add_argument("--json", type=Path, help="write the medians there too")
    options = parser.parse_args()
    torch.set_num_threads(1)

    device = device_type()
    variants = make_variants(device, options.length, options.elements)
    if options.only:
        bases = {base for base, _ in variants.values()}
        variants = {
            name: variant
            for name, variant in variants.items()
            if name in bases or options.only in name
        }
    x = torch.randn(options.elements, device=device, requires_grad=True)
    medians = measure(variants, x, options.length, options.rounds)
    title = f"host time per saved tensor ({options.elements * 4} bytes) on {device}, µs, median"
    show(medians, variants, title)
    if options.json is not None:
        options.json.write_text(json.dumps(medians, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
