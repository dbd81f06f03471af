"""Copies code and output between the markers of README.md, so that they cannot drift.

python tools/update_readme.py            # write the example's code
python tools/update_readme.py --check    # fail if README.md differs
python tools/update_readme.py --run      # also run the example and write what it prints
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
EXAMPLE = ROOT / "examples" / "one_line.py"


def example_code() -> str:
    """What stands between the marks of the example, with the import a reader needs."""
    between = EXAMPLE.read_text().split("# [readme]\n")[1].strip()
    return f"```python\nimport ebbtide.torch as ebb\n\n{between}\n```"


def example_output() -> str:
    done = subprocess.run([sys.executable, EXAMPLE], check=True, capture_output=True, text=True)
    return f"```\n{done.stdout.strip()}\n```"


def fill(text: str, mark: str, content: str) -> str:
    """``text`` with ``content`` between the two marks."""
    pattern = re.compile(rf"(<!-- {mark} -->\n).*?(<!-- {mark} -->)", re.DOTALL)
    filled, count = pattern.subn(lambda match: f"{match[1]}{content}\n{match[2]}", text)
    if count != 1:
        raise SystemExit(f"{README}: {count} blocks marked {mark!r}, 1 expected")
    return filled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--run", action="store_true")
    options = parser.parse_args()
    text = README.read_text()
    filled = fill(text, "example", example_code())
    if options.run:
        filled = fill(filled, "report", example_output())
    if options.check and filled != text:
        raise SystemExit(
            f"{README} and {EXAMPLE} differ: run '{sys.executable} tools/update_readme.py'"
        )
    if not options.check:
        README.write_text(filled)


if __name__ == "__main__":
    main()
