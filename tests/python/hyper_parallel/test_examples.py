"""The example scripts: equal losses and weights with and without, and a table of what moved."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BACKEND = os.environ.get("EBBTIDE_TEST_BACKEND", "torch-cpu")
FRAMEWORK = BACKEND.partition("-")[0]
SCRIPT = Path(__file__).resolve().parents[3] / "examples" / f"hyper_parallel_{FRAMEWORK}.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
WAYS = {
    "host": {"EBBTIDE_TO": "host"},
    "disk": {"EBBTIDE_TO": "disk", "EBBTIDE_ALLOW_TMPFS": "1"},
}

pytestmark = pytest.mark.skipif(
    BACKEND == "torch-tide", reason="the test device lives in the process that has loaded it"
)


def run(path: Path, *options: str, runner: list[str] | None = None, **environment: str) -> str:
    """What the script prints; its results are in files that begin with ``path``."""
    done = subprocess.run(
        [sys.executable, *(runner or []), SCRIPT, *options, "--steps", "2", "--json", path],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOG_v": "3", **environment},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def results(path: Path, ranks: int = 1) -> list[dict[str, object]]:
    return [json.loads(Path(f"{path}.{rank}").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    path = tmp_path_factory.mktemp("example") / "plain"
    run(path, "--plain")
    return results(path)


@pytest.mark.parametrize(
    ("options", "way"),
    [
        pytest.param([], "host", id="group_swap=off-host"),
        pytest.param([], "disk", id="group_swap=off-disk", marks=pytest.mark.slow),
        pytest.param(["--group-swap"], "host", id="group_swap=on-host", marks=pytest.mark.slow),
        pytest.param(["--group-swap"], "disk", id="group_swap=on-disk"),
    ],
)
def test_equal_and_reported(
    plain: list[dict[str, object]], tmp_path: Path, options: list[str], way: str
) -> None:
    printed = run(tmp_path / "swapped", *options, **WAYS[way])
    assert results(tmp_path / "swapped") == plain
    assert "peak memory" in printed
    assert "moved out (D2H)" in printed and "moved in (H2D)" in printed


@pytest.mark.slow
@pytest.mark.skipif(FRAMEWORK != "torch", reason="fully_shard and torchrun are PyTorch's")
@pytest.mark.parametrize("options", [[], ["--group-swap"]], ids=["group_swap=off", "group_swap=on"])
def test_equal_under_torchrun(tmp_path: Path, options: list[str]) -> None:
    run(tmp_path / "plain", "--plain", runner=TORCHRUN)
    run(tmp_path / "swapped", *options, runner=TORCHRUN, **WAYS["host"])
    assert results(tmp_path / "swapped", 2) == results(tmp_path / "plain", 2)
