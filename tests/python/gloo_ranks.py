"""Two gloo ranks as processes of their own; what becomes of each case comes back through files."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

RANKS = 2


def run_cases(
    cases: Iterable[str],
    run_case: Callable[[str, int, DeviceMesh], None],
    rank: int,
    directory: str,
    timeout: timedelta,
) -> None:
    """All cases in this rank, and what became of each into a file."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{directory}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timeout)
    mesh = init_device_mesh("cpu", (RANKS,))
    results: dict[str, str] = {}
    for case in cases:
        try:
            run_case(case, rank, mesh)
            results[case] = "equal"
        except Exception:
            results[case] = traceback.format_exc()
    Path(directory, f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def results_of(run_rank: Callable[[int, str], None], directory: Path) -> list[dict[str, str]]:
    """What became of each case, for each rank."""
    torch.multiprocessing.spawn(run_rank, (str(directory),), nprocs=RANKS)
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(RANKS)]
