"""Two gloo ranks: DDP, FSDP2 and tensor parallelism, the context around and inside, checkpointed or not.

Each case compares losses, gradients and new weights with the run without Ebbtide, on each rank, and has no weight
offered for offload: sharded, gathered or cast.
"""

from __future__ import annotations

import pytest
import torch

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("torch was built without gloo", allow_module_level=True)

from gloo_ranks import RANKS, results_of  # noqa: E402
from ranks import CASES, run_rank  # noqa: E402


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What became of each case, for each rank. One start of the ranks serves all cases."""
    return results_of(run_rank, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", CASES)
def test_equal(case: str, results: list[dict[str, str]]) -> None:
    for rank in range(RANKS):
        assert results[rank][case] == "equal", f"rank {rank}: {results[rank][case]}"
