#!/usr/bin/env python3
"""Make sure that the environment of this Python has a torch that Ebbtide supports.

An importable torch in the supported range is kept. Otherwise one version is installed, as the CPU
build unless the machine has an NVIDIA GPU. For Linux the package index serves that version with
several GB of CUDA libraries, so the order is:

1. plain ``pip install``, when pip would take a build without CUDA anyway (a configured mirror or
   wheel folder, macOS) or when a GPU is there to use it;
2. PyTorch's own CPU index;
3. plain again, if that index cannot be reached: a large download, but one that works.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement
from requirements import read_requirements

DEFAULT_VERSION = "2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# An index that cannot be reached should be given up within seconds, not minutes.
CPU_INDEX_OPTIONS = ["--index-url", CPU_INDEX, "--retries", "1", "--timeout", "20"]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def supported_version_installed() -> str | None:
    """The version of the torch in this environment, None if absent, too old or not importable."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None
    (requirement,) = map(Requirement, read_requirements("torch"))
    if not requirement.specifier.contains(version, prereleases=True):
        return None
    importable = subprocess.run([sys.executable, "-c", "import torch"], capture_output=True)
    return version if importable.returncode == 0 else None


def has_nvidia_gpu() -> bool:
    if shutil.which("nvidia-smi") is None:
        return False
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return listing.returncode == 0 and "GPU" in listing.stdout


def needs_cuda(report: dict) -> bool:
    """Whether the one package in pip's installation report asks for CUDA libraries here."""
    info = report["install"][0]["metadata"]
    if "+cpu" in info["version"]:
        return False
    asked = map(Requirement, info.get("requires_dist", []))
    applicable = [r.name for r in asked if r.marker is None or r.marker.evaluate({"extra": ""})]
    return any(name.startswith(("nvidia-", "cuda-")) for name in applicable)


def plain_needs_cuda(version: str) -> bool:
    """Ask pip, without installing, what a plain installation would take. Unknown counts as CUDA."""
    if platform.system() != "Linux":
        return False
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        probe = [*PIP, "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps"]
        probe += ["--report", str(report), f"torch=={version}"]
        if subprocess.run(probe, capture_output=True).returncode != 0:
            return True
        return needs_cuda(json.loads(report.read_text(encoding="utf-8")))


def candidates(version: str) -> list[list[str]]:
    """Option lists for ``pip install``, first choice first."""
    if has_nvidia_gpu() or not plain_needs_cuda(version):
        return [[]]
    return [CPU_INDEX_OPTIONS, []]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--version", default=DEFAULT_VERSION, help="default: %(default)s")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, run none")
    arguments = parser.parse_args()

    present = supported_version_installed()
    if present is not None and not arguments.dry_run:
        print(f"torch {present} is there already: kept")
        return 0
    for options in candidates(arguments.version):
        command = [*PIP, "install", *options, f"torch=={arguments.version}"]
        print("+", " ".join(command), flush=True)
        if not arguments.dry_run and subprocess.run(command).returncode == 0:
            return 0
    if arguments.dry_run:
        return 0
    print(
        f"[install_torch] torch {arguments.version} could not be installed: install any torch in "
        f"the range {read_requirements('torch')[0]!r} into this environment and run again",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
