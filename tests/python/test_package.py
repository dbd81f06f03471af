"""The package: what it exports, and what its import leaves alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import ebbtide


def test_what_the_package_exports() -> None:
    assert ebbtide.__version__ == "0.1.0"
    for name in ebbtide.__all__:
        assert hasattr(ebbtide, name)


def test_import_loads_no_framework() -> None:
    script = (
        "import sys, ebbtide, ebbtide.report\n"
        "assert not {'torch', 'mindspore', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    path = str(Path(ebbtide.__file__).parents[1])
    environ = {**os.environ, "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", script], check=True, env=environ)
