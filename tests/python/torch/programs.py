"""Programs that run in an interpreter of their own: for signals, forks, limits and shutdown."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

TIMEOUT_S = 90  # a hang fails the test; nothing waits for it to pass

PRELUDE = """
import torch
torch.set_num_threads(1)
import ebbtide.torch as ebb
from ebbtide import *
from support import *
from torch_support import *
from training import *
"""


def start(source: str, *arguments: str, prelude: str = PRELUDE) -> subprocess.Popen[str]:
    """Starts ``source`` with what the tests share already imported; ``sys.argv[1:]`` as given."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-c", prelude + textwrap.dedent(source), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore::DeprecationWarning"},
    )


def run(source: str, *arguments: str, prelude: str = PRELUDE) -> str:
    """Runs ``source`` to its end; returns what it printed. It must exit with 0 and a silent stderr."""
    process = start(source, *arguments, prelude=prelude)
    try:
        out, errors = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the children that hang
        out, errors = process.communicate()
        raise AssertionError(f"hangs after {TIMEOUT_S} s\n{out}\n{errors}") from None
    assert process.returncode == 0, f"exit {process.returncode}\n{out}\n{errors}"
    assert errors == "", errors
    return out
