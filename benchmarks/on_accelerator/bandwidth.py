"""What the link between device and page-locked host memory gives, and how much of it Ebbtide's copies reach."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

import ebbtide.torch as ebb
from on_accelerator.budget import Budget
from on_accelerator.machine import Machine

_MIB = 1 << 20
_REPEATS = 5


def measure(machine: Machine, tiny: bool, budget: Budget) -> list[dict[str, Any]]:
    """One entry for each size of a copy. GB/s are 10⁹ bytes a second."""
    sizes = [64 << 10, _MIB] if tiny else [_MIB // 2, 4 * _MIB, 32 * _MIB, 256 * _MIB]
    total = 4 * _MIB if tiny else min(2 << 30, machine.device_bytes // 8, machine.host_bytes // 8)
    rows = []
    for nbytes in sizes:
        if not budget.allows(0 if tiny else 5, f"bandwidth at {nbytes} bytes"):
            continue
        count = max(2, min(200, total // nbytes))
        row = {"nbytes": nbytes, "copies": count}
        row |= _of_torch(machine, nbytes, count) | _of_ebbtide(machine, nbytes, count)
        for way in ("d2h", "h2d"):
            row[f"ebbtide_{way}_share"] = row[f"ebbtide_{way}_gb_per_s"] / row[f"{way}_gb_per_s"]
        rows.append(row)
        machine.clean()
    return rows


def _of_torch(machine: Machine, nbytes: int, count: int) -> dict[str, float]:
    """``copy_`` between one pair of buffers each way, on a stream each."""
    host = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    device = [torch.empty(nbytes, dtype=torch.uint8, device=machine.device) for _ in range(2)]
    streams = [torch.Stream(device=machine.device) for _ in range(2)]

    def seconds(out: bool, back: bool) -> float:
        torch.accelerator.synchronize()
        started = time.perf_counter()
        for _ in range(count):
            if out:
                with streams[0]:
                    host[0].copy_(device[0], non_blocking=True)
            if back:
                with streams[1]:
                    device[1].copy_(host[1], non_blocking=True)
        torch.accelerator.synchronize()
        return time.perf_counter() - started

    def rate(out: bool, back: bool) -> float:
        seconds(out, back)
        took = statistics.median(seconds(out, back) for _ in range(_REPEATS))
        return nbytes * count / took / 1e9

    return {
        "d2h_gb_per_s": rate(True, False),
        "h2d_gb_per_s": rate(False, True),
        "each_of_both_gb_per_s": rate(True, True),
    }


def _of_ebbtide(machine: Machine, nbytes: int, count: int) -> dict[str, float]:
    """A chain that saves one storage of this size at each step and computes next to nothing."""
    tide = ebb.offload(device=machine.type, to="host", min_bytes=0, keep_last_bytes=0)
    x = torch.ones(nbytes // 4, device=machine.device, requires_grad=True)
    rates: dict[str, list[float]] = {"d2h": [], "h2d": []}
    for _ in range(_REPEATS + 1):
        before = tide.stats()
        torch.accelerator.synchronize()
        started = time.perf_counter()
        with tide:
            y = x
            for _ in range(count):
                y = y.sin()
        tide.synchronize()
        forward_s = time.perf_counter() - started
        started = time.perf_counter()
        torch.autograd.grad(y, x, torch.ones_like(y))
        del y
        torch.accelerator.synchronize()
        backward_s = time.perf_counter() - started
        after = tide.stats()
        rates["d2h"].append((after.d2h_bytes - before.d2h_bytes) / forward_s / 1e9)
        rates["h2d"].append((after.h2d_bytes - before.h2d_bytes) / backward_s / 1e9)
    return {f"ebbtide_{way}_gb_per_s": statistics.median(found[1:]) for way, found in rates.items()}
