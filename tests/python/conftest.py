"""A process is for one framework on one device. Bits depend on the number of threads: one for every test."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from pathlib import Path

import pytest

# These tests are about the device of their backend, also on a machine with an accelerator.
sys.path.insert(0, str(Path(__file__).parent))

from support import BACKEND, BACKENDS, DEVICE, FRAMEWORK  # noqa: E402

os.environ.setdefault("EBBTIDE_DEVICE", DEVICE)

pytest_plugins = ["outcomes"]

_FOLDERS = {"behaviour", "benchmarks", "device", "hyper_parallel", "mindspore", "models", "torch"}
# What needs no framework is run with torch on the CPU.
_OF_BACKEND = {
    "torch-cpu": {"test_*.py", "behaviour", "benchmarks", "hyper_parallel", "models", "torch"},
    "torch-tide": {"behaviour", "device", "hyper_parallel", "models", "torch"},
    "mindspore-cpu": {"behaviour", "hyper_parallel", "mindspore"},
}

if BACKEND not in BACKENDS:
    raise pytest.UsageError(f"EBBTIDE_TEST_BACKEND={BACKEND}: give {', '.join(BACKENDS)}")
_OTHER = {"torch": "mindspore", "mindspore": "torch"}[FRAMEWORK]


class _WithoutOther(MetaPathFinder):
    """Nobody loads the other framework, or takes the folder of its tests, a namespace package of its name, for it."""

    def find_spec(self, name: str, *_: object) -> None:
        if name.split(".")[0] == _OTHER:
            raise ModuleNotFoundError(f"this process is for {FRAMEWORK}", name=name)


sys.meta_path.insert(0, _WithoutOther())

# The folder of a framework's tests is a namespace package of its name: what is installed has a file.
_spec = find_spec(FRAMEWORK)
if _spec is None or _spec.origin is None:
    collect_ignore_glob = sorted(_FOLDERS | ({"test_*.py"} - _OF_BACKEND[BACKEND]))
    _left_out = f"{FRAMEWORK} is not installed"
else:
    collect_ignore_glob = sorted((_FOLDERS | {"test_*.py"}) - _OF_BACKEND[BACKEND])
    _left_out = f"with EBBTIDE_TEST_BACKEND={BACKEND}"
    if FRAMEWORK == "torch":
        import torch

        torch.set_num_threads(1)
    else:
        import mindspore

        # Work is done when the call returns, as on torch's CPU; what is held can then be told.
        mindspore.runtime.launch_blocking()


# Workers take files in order, each as a whole: with one of these as the last, all others would wait for it.
_LONG = [
    Path(__file__).parent / name
    for name in (
        "models/test_traffic.py",
        "device/test_peers.py",
        "device/test_random_schedules.py",
        "device/test_accelerator_benchmark.py",
        "behaviour/test_random_aliases.py",
        "hyper_parallel/test_torch_compile.py",
        "models/test_recomputed_models.py",
        "mindspore/test_models.py",
        "torch/test_fork_and_shutdown.py",
        "torch/test_operator_library.py",
        "device/test_faults.py",
        "hyper_parallel/test_torch_recompute_compiled.py",
    )
]
assert all(path.exists() for path in _LONG), "a file of tests has another name now"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        place = {path: number for number, path in enumerate(_LONG)}
        items.sort(key=lambda item: place.get(item.path, len(_LONG)))


def pytest_report_header() -> str:
    return f"{_left_out}, {', '.join(collect_ignore_glob)} are left out"


@pytest.fixture
def without_options_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("EBBTIDE_"):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def one_framework() -> Iterator[None]:
    yield
    assert _OTHER not in sys.modules, f"{_OTHER} is in a process that is for {FRAMEWORK}"
