"""With default options, training a decoder from CPU memory to disk takes much less of that memory.

This file is also the program that is measured, in a process of its own: what other tests left in
memory would hide growth.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from model_training import Training
from zoo import Size

import ebbtide.torch as ebb
from ebbtide.demo.memory import PeakMemory

# Activations several times what the default options hold in memory; few operations per byte.
TRAINING = Training("llama", size=Size(layers=8, width=128, sequence=256, samples=20))
TIMEOUT_S = 300

MIB = 1 << 20


def measure(to: str | None) -> dict[str, Any]:
    torch.set_num_threads(1)
    model = TRAINING.make_model()
    tide = None if to is None else ebb.offload(model, to=to)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(number: int, samples: int) -> str:
        batch = {name: values[:samples] for name, values in TRAINING.batch(number).items()}
        with tide or nullcontext():
            loss, _ = TRAINING.forward(model, batch, number)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss.item().hex()

    # Gradients and the optimizer's state exist from here on.
    step(0, samples=1)
    with PeakMemory() as memory:
        loss = step(1, TRAINING.size.samples)
    moved = tide.stats().d2h_bytes if tide else 0
    return {"loss": loss, "growth_bytes": memory.growth_bytes, "moved_bytes": moved}


def run(*arguments: str) -> dict[str, Any]:
    path = os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, __file__, *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_growth() -> None:
    pytest.importorskip("transformers")
    with ThreadPoolExecutor() as threads:
        plain, offloaded = threads.map(lambda arguments: run(*arguments), [(), ("disk",)])
    assert offloaded["loss"] == plain["loss"]
    assert plain["growth_bytes"] > 300 * MIB
    assert offloaded["moved_bytes"] > 200 * MIB
    # The last bytes of forward, running copies and prefetches stay in memory: 160 MiB at most.
    assert offloaded["growth_bytes"] < 0.6 * plain["growth_bytes"], (plain, offloaded)


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1] if len(sys.argv) > 1 else None)))
