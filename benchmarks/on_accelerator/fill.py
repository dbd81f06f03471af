"""The largest batch that fits, without and with Ebbtide."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import ebbtide.torch as ebb
from on_accelerator import networks
from on_accelerator.budget import Budget
from on_accelerator.machine import Machine, is_out_of_memory
from on_accelerator.steps import (
    TINY_OPTIONS,
    batch_for,
    decoder_sizes,
    make_decoder,
    one_step,
    tokens_of,
)
from on_accelerator.variants import Variant

_TRIES = 12
_LONGEST = 512
_TINY_FREE_BYTES = 16 << 20


def measure(machine: Machine, tiny: bool, budget: Budget) -> dict[str, Any]:
    """The decoder, under a limit to device memory that leaves the host room for what moves."""
    sizes = networks.TINY_DECODER if tiny else decoder_sizes(machine)
    # Short samples: the batch tells more.
    sizes = replace(sizes, length=min(sizes.length, _LONGEST))
    model = make_decoder(machine, sizes, tiny)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    batch, sample_bytes = batch_for(machine, model, sizes.words, sizes.length, tiny)
    machine.clean()
    taken = machine.allocated_bytes()
    free = _TINY_FREE_BYTES if tiny else machine.host_bytes // 6
    limit_bytes: int | None = min(machine.device_bytes * 9 // 10, taken + free)
    if not machine.limit(limit_bytes):
        limit_bytes = None
    options = TINY_OPTIONS if tiny else {}
    tide = ebb.offload(model, device=machine.type, to="host", **options)
    variants = {
        "no offload": Variant("no offload", torch.enable_grad),
        "Ebbtide": Variant("Ebbtide", lambda: tide, tide=tide),
    }
    found: dict[str, Any] = {
        "sizes": sizes.to_json(),
        "limit_bytes": limit_bytes,
        "weights_and_gradients_bytes": taken,
        "saved_bytes_per_sample": sample_bytes,
    }
    # From half of what its saved tensors would fill.
    start = max(1, free // max(1, sample_bytes) // 2)
    try:
        for name, variant in variants.items():

            def fits(size: int, variant: Variant = variant) -> bool:
                tokens = tokens_of(machine, sizes.words, size, sizes.length)
                try:
                    one_step(machine, model, tokens, variant)
                    return True
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
                return False

            found[name] = search(fits, start, machine.collect, budget, name)
    finally:
        machine.limit(None)
        machine.clean()
    plain, ours = (found[name]["largest"] for name in variants)
    found["ratio"] = ours / plain if plain else None
    return found


def search(
    fits: Callable[[int], bool], start: int, collect: Callable[[], None], budget: Budget, name: str
) -> dict[str, Any]:
    """Doubles to the first that does not fit, then halves the gap, in bounded tries."""
    tries: list[dict[str, Any]] = []
    largest, failing, size, last_s = 0, None, start, 0.0
    while len(tries) < _TRIES and budget.allows(2.5 * last_s, f"fill: tries of {name}"):
        started = time.perf_counter()
        try:
            fitted = fits(size)
            error = ""
        except Exception as failure:
            fitted, error = False, f"{type(failure).__name__}: {failure}"[:300]
        last_s = time.perf_counter() - started
        tries.append({"batch": size, "fits": fitted, "seconds": last_s, "error": error})
        collect()
        if error:
            break
        if fitted:
            largest = max(largest, size)
        else:
            failing = size if failing is None else min(failing, size)
        if failing is None:
            size *= 2
        elif failing - largest <= max(1, largest // 20):
            break
        else:
            size = (largest + failing) // 2
    exact = failing is not None and failing - largest <= max(1, largest // 20)
    return {"largest": largest, "exact": exact, "tries": tries}
