"""The device that is measured, what it is, and what it says of its memory."""

from __future__ import annotations

import contextlib
import gc
import importlib
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import torch

import ebbtide
import ebbtide.torch as ebb

ROOT = Path(__file__).resolve().parents[2]
_LIBRARIES = ("torch", "transformers", "torchtune", "trl", "accelerate", "triton", "numpy")


class NoDevice(Exception):
    """There is nothing to measure on."""


class Machine:
    """The first accelerator; for a dry run, where there is none, the test device."""

    def __init__(self, dry: bool) -> None:
        self.test_device: ModuleType | None = None
        if dry and not torch.accelerator.is_available():
            sys.path.append(str(ROOT / "tests" / "device"))
            importlib.import_module("tide_device")
        if not torch.accelerator.is_available():
            raise NoDevice("this torch finds no accelerator here: --dry-run tries the test device")
        self.type = str(torch.accelerator.current_accelerator().type)
        if "tide_device" in sys.modules:
            self.test_device = sys.modules["tide_device"].control
        self.device = torch.device(self.type, 0)
        self.module = torch.get_device_module(self.type)
        self.device_bytes = self._device_bytes()
        self.host_bytes = int(psutil.virtual_memory().available)

    def _device_bytes(self) -> int:
        properties = getattr(self.module, "get_device_properties", None)
        if properties is not None:
            return int(properties(0).total_memory)
        if self.test_device is not None:
            return int(self.test_device.options().capacity_bytes)
        return 16 << 30

    def describe(self) -> dict[str, Any]:
        properties = getattr(self.module, "get_device_properties", None)
        return {
            "device": self.type,
            "properties": str(properties(0)) if properties is not None else "",
            "device_bytes": self.device_bytes,
            "devices": torch.accelerator.device_count(),
            "driver": _driver(),
            "toolkit": {
                name: str(value)
                for name in ("cuda", "hip", "xpu")
                if (value := getattr(torch.version, name, None))
            },
            "host": platform.platform(),
            "processor": platform.processor() or platform.machine(),
            "cores": psutil.cpu_count(),
            "host_bytes": psutil.virtual_memory().total,
            "host_available_bytes": self.host_bytes,
            "python": platform.python_version(),
            "ebbtide": ebbtide.__version__,
            "libraries": {name: _version(name) for name in _LIBRARIES},
        }

    # --- memory

    def _memory(self, name: str) -> Any:
        return getattr(torch.accelerator, name, None) or getattr(self.module, name)

    def reset_peak(self) -> None:
        self._memory("reset_peak_memory_stats")()

    def allocated_bytes(self) -> int:
        return int(self._memory("memory_allocated")())

    def peak_bytes(self) -> int:
        return int(self._memory("max_memory_allocated")())

    def device_allocations(self) -> int | None:
        """Calls to the driver for device memory so far."""
        if self.test_device is not None:
            return None  # every tensor is one there
        return self._memory("memory_stats")().get("num_device_alloc")

    def pinned_bytes(self) -> int | None:
        """Page-locked memory that torch holds, Ebbtide's in it; None where it does not say."""
        if self.test_device is not None:
            return int(self.test_device.memory().pinned_bytes)
        stats = self._host_stats()
        for name in ("reserved_bytes.current", "segment_bytes.current", "allocated_bytes.current"):
            if name in stats:
                return int(stats[name])
        return None

    def host_allocations(self) -> int | None:
        """Page-locked allocations by the system so far."""
        if self.test_device is not None:
            return int(self.test_device.memory().pin_allocations)
        return self._host_stats().get("num_host_alloc")

    def _host_stats(self) -> dict[str, int]:
        query = getattr(self.module, "host_memory_stats", None)
        return dict(query()) if query is not None else {}

    def limit(self, nbytes: int | None) -> bool:
        """Sets a limit to device memory, or takes it away; False where that cannot be done."""
        if self.test_device is not None:
            self.test_device.set_limit(0, nbytes)
            return True
        fraction = getattr(self.module, "set_per_process_memory_fraction", None)
        if fraction is None:
            return False
        fraction(1.0 if nbytes is None else min(1.0, nbytes / self.device_bytes))
        return True

    def collect(self) -> None:
        """Gives back device memory that nobody uses."""
        gc.collect()
        torch.accelerator.synchronize()
        self.module.empty_cache()

    def clean(self) -> None:
        """That, and page-locked memory of Ebbtide and torch."""
        self.collect()
        ebb.trim()
        empty_host = getattr(torch.accelerator, "empty_host_cache", None)
        empty_host = empty_host or getattr(torch._C, "_host_emptyCache", None)
        if empty_host is not None and self.test_device is None:
            with contextlib.suppress(RuntimeError):
                empty_host()

    def races(self) -> int:
        """Found since the last call; only the test device looks for them."""
        if self.test_device is None:
            return 0
        found = len(self.test_device.races())
        self.test_device.clear_races()
        return found


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _driver() -> str:
    commands = (
        [
            "nvidia-smi",
            "--query-gpu=driver_version,name,pcie.link.gen.max",
            "--format=csv,noheader",
        ],
        ["rocm-smi", "--showdriverversion"],
        ["npu-smi", "info"],
    )
    for command in commands:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
            return done.stdout.strip()
    return ""


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError, ebbtide.DeviceError)):
        return True
    return isinstance(error, RuntimeError) and "out of memory" in str(error).lower()
