"""Compiles the test device and PyTorch's shell around it with plain g++.

Objects and the library are kept under ``build/device`` of the repository, each by a hash of all
that goes into it, so a process that finds the library there starts at once.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

SOURCES = Path(__file__).resolve().parent.parent
CACHE = SOURCES.parent.parent / "build" / "device"
JOBS = 2


class DeviceUnavailable(ImportError):
    """The test device cannot be built here; the message holds the compiler's own."""


def library() -> Path:
    """The path of the built library; builds it when no process has done so yet.

    Raises:
        DeviceUnavailable: without a compiler, or when it refuses the sources or torch's headers.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise DeviceUnavailable("no g++ here (CXX names another compiler)")
    objects = _objects(compiler)
    built = CACHE / f"_tide_{_hash(*map(str, objects.values()), *_link_flags())}.so"
    if not built.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with (CACHE / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not built.exists():
                _build(compiler, objects, built)
    return built


def _objects(compiler: str) -> dict[Path, Path]:
    """The object for each source."""

    def headers(source: Path) -> bytes:
        # The shell sees one header of the device, the device none of the shell.
        shell = source.stem.startswith("torch_")
        names = ["device.h", *(path.name for path in SOURCES.glob("torch_*.h"))]
        seen = [path for path in SOURCES.glob("*.h") if (path.name in names) == shell]
        return b"".join(path.read_bytes() for path in sorted([*seen, SOURCES / "device.h"]))

    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
    flags = _hash(torch.__version__, version.stdout, *_compile_flags())
    sources = [path for path in SOURCES.glob("*.cc") if not path.stem.endswith("_test")]
    # Those that see most of torch first: they take longest.
    sources.sort(key=lambda path: (not path.stem.startswith("torch_"), path.name))
    return {
        path: CACHE / "objects" / f"{path.stem}_{_hash(flags, path.read_bytes(), headers(path))}.o"
        for path in sources
    }


def _hash(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:16]


def _torch_folder() -> Path:
    return Path(torch.__file__).parent


def _compile_flags() -> list[str]:
    include = _torch_folder() / "include"
    return [
        "-std=c++20",
        "-O1",
        "-fPIC",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-isystem{include}",
        f"-isystem{include / 'torch' / 'csrc' / 'api' / 'include'}",
        f"-isystem{sysconfig.get_path('include')}",
    ]


def _link_flags() -> list[str]:
    libraries = _torch_folder() / "lib"
    return [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lc10", "-ltorch_cpu", "-ltorch"]


def _build(compiler: str, objects: dict[Path, Path], built: Path) -> None:
    def compile_one(pair: tuple[Path, Path]) -> None:
        source, target = pair
        if not target.exists():
            _run([compiler, *_compile_flags(), "-c", str(source)], target)

    (CACHE / "objects").mkdir(exist_ok=True)
    with ThreadPoolExecutor(JOBS) as pool:
        list(pool.map(compile_one, objects.items()))
    _run([compiler, "-shared", "-pthread", *map(str, objects.values()), *_link_flags()], built)


def _run(command: list[str], target: Path) -> None:
    partial = target.with_suffix(".partial")
    done = subprocess.run([*command, "-o", str(partial)], capture_output=True, text=True)
    if done.returncode != 0:
        raise DeviceUnavailable(f"{' '.join(command)}\n{done.stderr[-4000:]}")
    partial.rename(target)
