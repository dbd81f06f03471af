"""Run by torchrun: `torch.distributed.pipelining` with the layers of each stage wrapped and chained, against plain.

python -m torch.distributed.run --standalone --nproc-per-node 2 pipelining_ranks.py DIRECTORY
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "torch")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from ranks import TIMEOUT  # noqa: E402
from support import assert_at_rest  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.pipelining import (  # noqa: E402
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch_support import assert_same_bits  # noqa: E402
from training import WIDTH, make_input, make_model  # noqa: E402

import ebbtide.hyper_parallel as hp  # noqa: E402
from ebbtide import OffloadConfig  # noqa: E402
from ebbtide.resolved import Resolved  # noqa: E402

RANKS = 2
MICRO_BATCHES = 4
BLOCKS = 3  # of each stage
SCHEDULES: dict[str, tuple[Any, int]] = {
    "gpipe": (ScheduleGPipe, 1),
    "1f1b": (Schedule1F1B, 1),
    "interleaved 1f1b": (ScheduleInterleaved1F1B, 2),
}
TIERS = ("host", "disk")
SWAPS = ("group_swap=off", "group_swap=on")
CASES = [
    f"{schedule}, {tier}, {swap}" for schedule in SCHEDULES for tier in TIERS for swap in SWAPS
]


def make_stage(index: int, stages: int) -> nn.Sequential:
    blocks = list(make_model(depth=BLOCKS * stages))
    return nn.Sequential(*blocks[BLOCKS * index : BLOCKS * (index + 1)])


def wrapped(stage: nn.Sequential, **options: Any) -> nn.Sequential:
    for index, block in enumerate(stage):
        stage[index] = hp.swap_wrapper(block, **options)
    for first, second in zip(stage, stage[1:], strict=False):
        hp.SwapManager().set_forward_prefetch_layer(first, second)
    return stage


def train(name: str, rank: int, wrap: Callable[[nn.Sequential], nn.Module]) -> list[torch.Tensor]:
    """Losses and gradients of three steps. What the last two moved is counted."""
    make_schedule, chunks = SCHEDULES[name]
    stages = [chunk * RANKS + rank for chunk in range(chunks)]
    modules = [wrap(make_stage(index, chunks * RANKS)) for index in stages]
    device = torch.device("cpu")
    pipeline = [
        PipelineStage(module, index, chunks * RANKS, device)
        for module, index in zip(modules, stages, strict=True)
    ]
    schedule = make_schedule(
        pipeline if chunks > 1 else pipeline[0], MICRO_BATCHES, loss_fn=nn.functional.mse_loss
    )
    found: list[torch.Tensor] = []
    for step in range(3):
        if step == 1:
            hp.reset_stats()  # the first step has a forward without backward, which finds out shapes
        losses: list[torch.Tensor] = []
        inputs = (make_input(MICRO_BATCHES * 4, seed=step),) if rank == 0 else ()
        target = {"target": make_input(MICRO_BATCHES * 4, seed=50), "losses": losses}
        schedule.step(*inputs, **(target if rank == RANKS - 1 else {}))
        found += [loss.detach() for loss in losses]
        parameters = [p for module in modules for p in module.parameters()]
        found += [p.grad.clone() for p in parameters]
        for parameter in parameters:
            parameter.grad = None
    assert len(found) > 0 and found[-1].numel() in (WIDTH, WIDTH * WIDTH)
    return found


def spill_files(directory: Path) -> list[int]:
    """Inodes of files without a name that this process has open on the directory's device."""
    device = directory.stat().st_dev
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            target, stat = os.readlink(link), link.stat()
        except OSError:
            continue
        if target.startswith(str(directory)) and target.endswith("(deleted)"):
            assert stat.st_dev == device
            found.append(stat.st_ino)
    return sorted(set(found))


def run_case(case: str, rank: int, directory: Path) -> None:
    name, tier, swap = case.split(", ")
    os.environ["EBBTIDE_TO"] = str(directory / "spill") if tier == "disk" else "host"
    options = {"group_swap": swap.endswith("on"), "cpu_pool": hp.PinnedMemoryPool("64MiB")}
    expected = train(name, rank, lambda stage: stage)
    found = train(name, rank, lambda stage: wrapped(stage, **options))
    assert_same_bits(found, expected)
    stats = hp.stats()
    assert stats.d2h_bytes > 0, stats
    assert stats.h2d_bytes == stats.d2h_bytes, stats
    assert (stats.spilled_bytes > 0) == (tier == "disk"), stats
    assert_at_rest(hp)


def host_share() -> float:
    """This rank's default cap on host memory as a part of what one process alone would have."""
    config = OffloadConfig.from_options(to="host")
    share = Resolved.from_config(config, "cpu", False).max_host_bytes
    ranks = os.environ.pop("LOCAL_WORLD_SIZE")
    alone = Resolved.from_config(config, "cpu", False).max_host_bytes
    os.environ["LOCAL_WORLD_SIZE"] = ranks
    return share / alone


def main() -> None:
    directory = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    rank = dist.get_rank()
    results: dict[str, Any] = {}
    for case in CASES:
        try:
            run_case(case, rank, directory)
            results[case] = "equal"
        except Exception:
            results[case] = traceback.format_exc()
        dist.barrier()
    results["host share"] = host_share()
    results["spill files"] = spill_files(directory / "spill")
    dist.barrier()  # as long as one has it open, no inode is issued again
    (directory / f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
