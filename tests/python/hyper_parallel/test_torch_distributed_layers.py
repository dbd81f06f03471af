"""Wrapped and chained layers inside of DDP and FSDP2, two gloo ranks: equal, and exactly the activations moved."""

from __future__ import annotations

import pytest
import torch
from support import DEVICE

if DEVICE != "cpu":
    pytest.skip("gloo has collectives for tensors of the CPU alone", allow_module_level=True)
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("torch was built without gloo", allow_module_level=True)

from gloo_ranks import RANKS, results_of  # noqa: E402
from hyper_ranks import CASES, run_rank  # noqa: E402


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What became of each case, for each rank. One start of the ranks serves all cases."""
    return results_of(run_rank, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", CASES)
def test_equal(case: str, results: list[dict[str, str]]) -> None:
    for rank in range(RANKS):
        assert results[rank][case] == "equal", f"rank {rank}: {results[rank][case]}"
