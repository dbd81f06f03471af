"""`torch.distributed.pipelining` under torchrun, two gloo ranks: wrapped and chained layers against plain ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import DEVICE

if DEVICE != "cpu":
    pytest.skip("gloo has collectives for tensors of the CPU alone", allow_module_level=True)
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("torch was built without gloo", allow_module_level=True)

from pipelining_ranks import CASES, RANKS  # noqa: E402

SCRIPT = Path(__file__).with_name("pipelining_ranks.py")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What became of each case, for each rank. One start of torchrun serves all cases."""
    directory = tmp_path_factory.mktemp("pipelining")
    (directory / "spill").mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "EBBTIDE_ALLOW_TMPFS": "1"}
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", str(RANKS), SCRIPT, directory],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("case", CASES)
def test_equal(case: str, results: list[dict[str, Any]]) -> None:
    for rank in range(RANKS):
        assert results[rank][case] == "equal", f"rank {rank}: {results[rank][case]}"


def test_each_rank_has_a_spill_file_of_its_own(results: list[dict[str, Any]]) -> None:
    first, second = (set(result["spill files"]) for result in results)
    assert first and second
    assert not first & second


def test_each_rank_has_its_share_of_the_hosts_memory(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["host share"] == pytest.approx(1 / RANKS, rel=0.2)
