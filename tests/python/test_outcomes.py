"""What a run writes and prints at its end is the same whether one process ran the tests or workers shared them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import outcomes
import pytest

CONFTEST = """
from pathlib import Path
import outcomes
outcomes.ROOT = Path(__file__).parent
outcomes._BEHAVIOUR = outcomes.Outcomes(outcomes.ROOT / "behaviour", outcomes.ROOT / "build")
outcomes._ALL = (outcomes._BEHAVIOUR,)
pytest_plugins = ["outcomes"]
"""
FILES = {
    "behaviour/test_first.py": """
        import pytest

        @pytest.fixture
        def broken():
            yield
            raise ValueError

        @pytest.mark.parametrize("size", [1, 2])
        def test_size(size):
            if size == 2:
                pytest.skip("too large")

        def test_that_cannot_be_left(broken):
            pass
    """,
    "behaviour/test_second.py": """
        from outcomes import SECTION

        def test_name(record_property):
            record_property(f"{SECTION}what was seen", "two of three")
    """,
    "behaviour/test_third.py": """
        import pytest

        pytest.skip("nothing of it", allow_module_level=True)
    """,
    "test_elsewhere.py": """
        def test_it():
            pass
    """,
}
EXPECTED = {
    "test_first.py::test_size": {
        "1": {"outcome": "passed"},
        "2": {"outcome": "skipped", "reason": "too large"},
    },
    "test_first.py::test_that_cannot_be_left": {"": {"outcome": "failed"}},
    "test_second.py::test_name": {"": {"outcome": "passed"}},
    "test_third.py": {"": {"outcome": "skipped", "reason": "nothing of it"}},
}


@pytest.mark.parametrize(
    "workers", [[], ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]], ids=["one", "two"]
)
def test_outcomes_and_sections(workers: list[str], tmp_path: Path) -> None:
    (tmp_path / "behaviour").mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for name, text in FILES.items():
        (tmp_path / name).write_text(dedent(text))
    written = tmp_path / "build" / f"{outcomes.BACKEND}.json"
    written.parent.mkdir()
    written.write_text("of an earlier run")

    here = Path(outcomes.__file__).parent
    path = os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")])
    environment = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    environment.pop("EBBTIDE_BEHAVIOUR_TABLE", None)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *workers],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert "4 passed, 2 skipped" in done.stdout and "1 error in" in done.stdout, done.stdout
    assert json.loads(written.read_text()) == EXPECTED
    _, _, section = done.stdout.partition(" what was seen ")
    assert section.splitlines()[1] == "two of three", done.stdout
