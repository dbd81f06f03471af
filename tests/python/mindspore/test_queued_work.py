"""MindSpore as it comes, behind its queue on the host: what a step has left is told once the queue is done."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import ebbtide

STEPS = """
import mindspore as ms, numpy as np
from mindspore import Tensor, nn, ops
import ebbtide.mindspore as ebb

net = nn.SequentialCell(*(nn.Dense(256, 256, activation="tanh") for _ in range(12)))
x = Tensor(np.random.default_rng(0).standard_normal((512, 256)), ms.float32)
tide = ebb.offload(net, to="disk", min_bytes=0, keep_last_bytes=0, in_flight_bytes=0)

def loss(x):
    with tide:
        y = net(x)
    return ops.mse_loss(y, x)

step = ms.value_and_grad(loss, None, net.trainable_params())
for _ in range(8):
    step(x)
    tide.synchronize()
    stats = tide.stats()
    held = stats.entries, stats.device_bytes, stats.disk_bytes
    assert held == (0, 0, 0), stats
assert stats.h2d_bytes > 0, stats
print("at rest after each")
"""


def test_nothing_is_held_once_a_step_is_waited_for() -> None:
    environment = dict(os.environ)
    environment["PYTHONPATH"] = str(Path(ebbtide.__file__).parents[1])
    found = subprocess.run(
        [sys.executable, "-c", STEPS], env=environment, capture_output=True, text=True, timeout=300
    )
    assert found.stdout.strip() == "at rest after each", found.stderr[-2000:]
