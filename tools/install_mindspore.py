#!/usr/bin/env python3
"""Make sure that the environment of this Python has a MindSpore that Ebbtide supports, if one can be had.

MindSpore has no build for some Pythons and machines, so a failure here fails nothing: the reason is printed and written to
``mindspore-unavailable`` in the environment, and what is to be run with MindSpore is skipped.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

from requirements import read_requirements

# An index that cannot be reached should be given up within a minute or two.
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
INSTALL = [*PIP, "install", "--quiet", "--retries", "1", "--timeout", "60"]
REASON = Path(sys.prefix) / "mindspore-unavailable"


def failure_of(command: list[str]) -> str | None:
    """The last line that the command complains with; None if it does not fail."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode == 0:
        return None
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    return lines[-1] if lines else f"exit status {done.returncode}"


def main() -> int:
    wanted = read_requirements("runtime", "test", "mindspore", "mindspore-test")
    reason = failure_of([*INSTALL, *wanted])
    doing = "installed"
    if reason is None:
        reason = failure_of([sys.executable, "-c", "import mindspore; mindspore.Tensor([1.0]) + 1"])
        doing = "run"
    if reason is None:
        REASON.unlink(missing_ok=True)
        return 0
    here = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    text = (
        f"MINDSPORE CANNOT BE {doing.upper()} HERE ({here}), nothing was tested with it: {reason}"
    )
    REASON.write_text(text + "\n", encoding="utf-8")
    print(text, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
