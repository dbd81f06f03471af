"""Copies and bytes each way, storage by storage and in packs, for models with many small storages and with few.

    python benchmarks/copies.py            # on the accelerator, else on the test device

Everything is moved, so that the counts say what packing does and not what stays.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from on_accelerator.machine import Machine
from on_accelerator.networks import Decoder, DecoderSizes, Lstm, gpt2
from rich.console import Console
from rich.table import Table

import ebbtide.torch as ebb

EVERYTHING: dict[str, Any] = {
    "to": "host",
    "min_bytes": 0,
    "keep_last_bytes": 0,
    "in_flight_bytes": 0,
}
WORDS, LENGTH, SAMPLES = 128, 128, 4

Build = Callable[[str], tuple[torch.nn.Module, torch.Tensor]]


def lstm(device: str) -> tuple[torch.nn.Module, torch.Tensor]:
    return Lstm(256).to(device), torch.randn(16, 128, 256, device=device)


def decoder(device: str) -> tuple[torch.nn.Module, torch.Tensor]:
    model = Decoder(DecoderSizes(width=128, heads=4, layers=6, words=WORDS, length=LENGTH))
    return model.to(device), tokens(device)


def small_gpt2(device: str) -> tuple[torch.nn.Module, torch.Tensor]:
    return gpt2(LENGTH, tiny=True).to(device), tokens(device)


def tokens(device: str) -> torch.Tensor:
    return torch.randint(WORDS, (SAMPLES, LENGTH), device=device)


MODELS: dict[str, Build] = {
    "LSTM of cells, 128 steps": lstm,
    "decoder, 6 layers": decoder,
    "GPT-2, 2 layers": small_gpt2,
}


def count(build: Build, device: str, group_swap: bool) -> dict[str, int]:
    """What one step of training moved."""
    torch.manual_seed(0)
    model, batch = build(device)
    tide = ebb.offload(model, group_swap=group_swap, **EVERYTHING)
    with tide:
        loss = model(batch)
    loss.backward()
    stats = tide.stats()
    names = ("storages", "d2h_copies", "h2d_copies", "d2h_bytes", "h2d_bytes")
    return {name: getattr(stats, name) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the counts there too")
    options = parser.parse_args()
    torch.set_num_threads(1)

    device = Machine(dry=True).type
    counts: dict[str, dict[str, dict[str, int]]] = {}
    table = Table(title=f"copies out / in, on {device}")
    for column in ("model", "storages", "MiB out / in", "one by one", "packed", "MiB out / in"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for name, build in MODELS.items():
        single, packed = (count(build, device, group_swap) for group_swap in (False, True))
        gc.collect()
        counts[name] = {"one by one": single, "packed": packed}
        table.add_row(
            name,
            str(single["storages"]),
            mib(single),
            copies(single),
            copies(packed),
            mib(packed),
        )
    Console(width=110).print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(counts, indent=1) + "\n", encoding="utf-8")


def copies(counts: dict[str, int]) -> str:
    return f"{counts['d2h_copies']} / {counts['h2d_copies']}"


def mib(counts: dict[str, int]) -> str:
    return f"{counts['d2h_bytes'] / 2**20:.1f} / {counts['h2d_bytes'] / 2**20:.1f}"


if __name__ == "__main__":
    main()
