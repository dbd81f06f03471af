"""Ebbtide passes every check of the comparison of offloaders in every case, and the comparison can tell.

One run of ``benchmarks/peers`` in a process of its own: it forks, which this one, with its threads, must not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
sys.path.append(str(BENCHMARKS))

from peers.cases import all_cases  # noqa: E402

EBBTIDE = ("Ebbtide", "Ebbtide group_swap")
CASES = [case.name for case in all_cases()]
# Per check, a case in which `save_on_cpu` cannot pass it.
BLIND_WITHOUT = {
    "right": "written after it was saved",
    "at_bound": "x * x",
    "keeps_aliases": "x and x.t()",
}

Results = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("peers") / "peers.json"
    offloaders = ",".join(["no offload", "save_on_cpu", *EBBTIDE])
    path_of_modules = os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "peers", "--only", offloaders, "--json", str(path)],
        env={**os.environ, "PYTHONPATH": path_of_modules.rstrip(os.pathsep)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    entries = json.loads(path.read_text(encoding="utf-8"))["results"]
    return {(entry["case"], entry["offloader"]): entry for entry in entries}


@pytest.mark.parametrize("offloader", EBBTIDE)
@pytest.mark.parametrize("case", CASES)
def test_ebbtide_passes(results: Results, case: str, offloader: str) -> None:
    found = results[case, offloader]
    assert found["right"], found["outcome"]
    assert found["at_bound"], found
    assert found["frees"] is not False, found
    assert found["keeps_aliases"] is not False, found
    assert found["no_race"], found["races"]
    assert found["at_rest"], found
    if found["frees"]:
        # What was freed has really moved.
        assert found["copies"]["d2h_bytes"] > 0, found


@pytest.mark.parametrize(("check", "case"), BLIND_WITHOUT.items())
def test_the_comparison_tells(results: Results, check: str, case: str) -> None:
    assert results[case, "save_on_cpu"][check] is False
    assert results[case, "no offload"][check] is True or check == "keeps_aliases"


def test_only_offload_frees(results: Results) -> None:
    asked = [case for case in CASES if results[case, "no offload"]["frees"] is not None]
    assert len(asked) > len(CASES) // 2
    assert not any(results[case, "no offload"]["frees"] for case in asked)
    assert all(results[case, "save_on_cpu"]["frees"] for case in asked)
