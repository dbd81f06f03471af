"""What README.md shows is what runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_example_in_the_readme_is_the_one_that_runs() -> None:
    command = [sys.executable, ROOT / "tools" / "update_readme.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_example_trains_and_reports_moved_bytes() -> None:
    pytest.importorskip("torch", reason="the example needs torch")
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "one_line.py"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "moved out (D2H)            39" in done.stdout


@pytest.mark.parametrize("text", ["README.md", "docs/design.md", "docs/contributing.md"])
def test_every_link_of_the_docs_leads_somewhere(text: str) -> None:
    import re

    path = ROOT / text
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", path.read_text()):
        assert (path.parent / target).exists(), f"{text} links to {target}"
