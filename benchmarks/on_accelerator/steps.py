"""Training steps of one model under every offloader, interleaved."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from on_accelerator import networks
from on_accelerator.budget import Budget
from on_accelerator.machine import Machine, is_out_of_memory
from on_accelerator.saved import union_bytes
from on_accelerator.variants import Variant, all_variants, ebbtide_variants

# Of activations in a step: enough to matter, and that every offloader's page-locked copy fits the host.
_MOST_BYTES = 8 << 30
_TINY_BYTES = 4 << 20

# So that something moves in a dry run.
TINY_OPTIONS = {"min_bytes": 4096, "in_flight_bytes": 1 << 17}
_TINY_HOST_BEFORE_DISK_BYTES = 1 << 20


def decoder(
    machine: Machine, disk: Path | None, tiny: bool, rounds: int, budget: Budget
) -> dict[str, Any]:
    sizes = networks.TINY_DECODER if tiny else decoder_sizes(machine)
    model = make_decoder(machine, sizes, tiny)
    return {"sizes": sizes.to_json()} | _measure(
        machine, "decoder", model, sizes.words, sizes.length, disk, tiny, rounds, budget
    )


def make_decoder(machine: Machine, sizes: networks.DecoderSizes, tiny: bool) -> nn.Module:
    torch.manual_seed(0)
    if tiny:
        return networks.Decoder(sizes).to(machine.device)
    with machine.device:  # the host would take long to make it
        return networks.Decoder(sizes).to(torch.bfloat16)


def decoder_sizes(machine: Machine) -> networks.DecoderSizes:
    return next(sizes for least, sizes in networks.DECODERS if machine.device_bytes >= least)


def gpt2(
    machine: Machine, disk: Path | None, tiny: bool, rounds: int, budget: Budget
) -> dict[str, Any]:
    length = 32 if tiny else 1024
    try:
        torch.manual_seed(0)
        model = networks.gpt2(length, tiny)
    except ImportError as error:
        return {"missing": f"transformers is not installed ({error})", "variants": {}}
    model = model.to(machine.device)
    if not tiny:
        model = model.to(torch.bfloat16)
    words = model.inner.config.vocab_size
    return _measure(machine, "gpt2", model, words, length, disk, tiny, rounds, budget)


def batch_for(
    machine: Machine, model: nn.Module, words: int, length: int, tiny: bool
) -> tuple[int, int]:
    """A number of samples whose activations are some of the device's memory and of the host's; and
    their bytes for one sample."""
    one = tokens_of(machine, words, 1, length)
    weights = [*model.parameters(), *model.buffers()]
    sample_bytes = union_bytes(lambda: model(one), weights, machine.type)
    target = min(_MOST_BYTES, machine.device_bytes // 5, machine.host_bytes // 10)
    if tiny:
        target = _TINY_BYTES
    return max(1, target // max(1, sample_bytes)), sample_bytes


def tokens_of(machine: Machine, words: int, batch: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(words, (batch, length), generator=generator).to(machine.device)


def _measure(
    machine: Machine,
    name: str,
    model: nn.Module,
    words: int,
    length: int,
    disk: Path | None,
    tiny: bool,
    rounds: int,
    budget: Budget,
) -> dict[str, Any]:
    batch, sample_bytes = batch_for(machine, model, words, length, tiny)
    tokens = tokens_of(machine, words, batch, length)
    options: dict[str, Any] = {}
    if tiny:
        options = {**TINY_OPTIONS, "host_before_disk_bytes": _TINY_HOST_BEFORE_DISK_BYTES}
    variants = all_variants(model, machine.type, disk, **options)
    rows = interleaved(machine, name, model, tokens, variants, rounds, budget)
    plain = rows["no offload"].get("step_s")
    for row in rows.values():
        if (step_s := row.get("step_s")) is not None:
            row["tokens_per_s"] = tokens.numel() / step_s
            row["of_no_offload"] = step_s / plain if plain else None
    del variants, model
    machine.clean()
    return {
        "batch": batch,
        "length": length,
        "tokens": tokens.numel(),
        "saved_bytes_per_sample": sample_bytes,
        "variants": rows,
    }


def lstm(machine: Machine, tiny: bool, rounds: int, budget: Budget) -> dict[str, Any]:
    """Some 900 storages, each smaller than what one copy call costs: copies in packs and one by one."""
    steps, batch, width = (12, 4, 32) if tiny else (100, 64, 512)
    torch.manual_seed(0)
    model = networks.Lstm(width).to(machine.device)
    x = torch.randn(batch, steps, width, device=machine.device)
    options: dict[str, Any] = {"min_bytes": 0, "keep_last_bytes": 0}
    if tiny:
        options["in_flight_bytes"] = 0
    none = all_variants(model, machine.type, None)[:1]
    ours = ebbtide_variants(model, machine.type, None, **options)[:2]
    rows = interleaved(machine, "lstm", model, x, none + ours, rounds, budget)
    machine.clean()
    return {"steps": steps, "batch": batch, "width": width, "variants": rows}


# --- one model, all variants


def interleaved(
    machine: Machine,
    name: str,
    model: nn.Module,
    batch: torch.Tensor,
    variants: Sequence[Variant],
    rounds: int,
    budget: Budget,
) -> dict[str, dict[str, Any]]:
    """Medians and raw steps by variant. One that fails says so, and the rest go on."""
    rows: dict[str, dict[str, Any]] = {variant.name: {} for variant in variants}
    runs = []
    for variant in variants:
        row = rows[variant.name]
        if variant.enter is None:
            row["missing"] = variant.missing
        elif budget.allows(0, f"{name}: {variant.name}"):
            # Alone first: what it takes of the host, and whether it still allocates in its second step.
            machine.clean()
            pinned = machine.pinned_bytes()
            first = _try(machine, model, batch, variant, row)
            second = _try(machine, model, batch, variant, row)
            if first is None or second is None:
                continue
            row["first_steps"] = [first, second]
            after = machine.pinned_bytes()
            row["pinned_bytes"] = None if pinned is None else after - pinned
            row["host_allocations_after_first"] = second["host_allocations"]
            row["device_allocations_after_first"] = second["device_allocations"]
            runs.append(variant)
        else:
            row["missing"] = "cut: no time left"
    for round_ in range(rounds + 1):
        expected_s = sum(rows[variant.name]["first_steps"][1]["seconds"] for variant in runs)
        if not budget.allows(expected_s, f"{name}: rounds {max(1, round_)} to {rounds}"):
            break
        for variant in list(runs):
            row = rows[variant.name]
            found = _try(machine, model, batch, variant, row)
            if found is None:
                runs.remove(variant)
            elif round_ > 0:  # in the one before that pools fill
                row.setdefault("rounds", []).append(found)
    for row in rows.values():
        _summarise(row)
    model.zero_grad(set_to_none=True)
    return rows


def _try(
    machine: Machine, model: nn.Module, batch: torch.Tensor, variant: Variant, row: dict[str, Any]
) -> dict[str, Any] | None:
    try:
        return one_step(machine, model, batch, variant)
    except Exception as error:
        kind = "out of memory" if is_out_of_memory(error) else type(error).__name__
        row["failed"] = f"{kind}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
    # Out of the handler: its traceback held the step's tensors.
    machine.clean()
    return None


def one_step(
    machine: Machine, model: nn.Module, batch: torch.Tensor, variant: Variant
) -> dict[str, Any]:
    """A forward and a backward; gradients are there before, so that growth is activations."""
    assert variant.enter is not None
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    model.zero_grad(set_to_none=False)
    torch.accelerator.synchronize()
    machine.races()
    tide = variant.tide
    stats = tide.stats() if tide is not None else None
    host, device = machine.host_allocations(), machine.device_allocations()
    machine.reset_peak()
    before = machine.allocated_bytes()
    started = time.perf_counter()
    with variant.enter():
        loss = model(batch)
    forward_s = time.perf_counter() - started
    loss.backward()
    loss = loss.detach()
    torch.accelerator.synchronize()
    seconds = time.perf_counter() - started
    found: dict[str, Any] = {
        "seconds": seconds,
        "forward_call_s": forward_s,
        "peak_growth_bytes": machine.peak_bytes() - before,
        "host_allocations": _grown(machine.host_allocations(), host),
        "device_allocations": _grown(machine.device_allocations(), device),
        "loss": float(loss),
        "races": machine.races(),
    }
    if tide is not None and stats is not None:
        now = tide.stats()
        for field in (
            *("exposed_wait_s", "d2h_bytes", "h2d_bytes", "d2h_copies", "h2d_copies"),
            *("prefetch_hits", "prefetch_misses", "live_hits", "spilled_bytes", "storages"),
        ):
            found[field] = getattr(now, field) - getattr(stats, field)
        found["kept"] = {k: v - stats.kept.get(k, 0) for k, v in now.kept.items()}
        found["host_reserved_bytes"] = now.host_reserved_bytes
    return found


def _grown(now: int | None, before: int | None) -> int | None:
    return None if now is None or before is None else now - before


def _summarise(row: dict[str, Any]) -> None:
    rounds = row.get("rounds")
    if not rounds:
        return
    row["step_s"] = statistics.median(step["seconds"] for step in rounds)
    row["peak_growth_bytes"] = max(step["peak_growth_bytes"] for step in rounds)
    row["races"] = sum(step["races"] for step in rounds)
    for field in ("d2h_copies", "h2d_copies", "d2h_bytes", "h2d_bytes", "exposed_wait_s"):
        if field in rounds[0]:
            row[field] = statistics.median(step[field] for step in rounds)
