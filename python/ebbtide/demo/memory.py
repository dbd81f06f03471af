"""How far this process's memory grows while something runs."""

from __future__ import annotations

import ctypes
import gc
import threading
from pathlib import Path
from types import TracebackType

import psutil

__all__ = ["PeakMemory"]

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_RESET_PEAK = "5"  # proc(5): sets VmHWM to what is resident now
_SAMPLING_SECONDS = 0.002


class PeakMemory:
    """Measures the peak of resident memory between ``with`` and its end, above that at ``with``.

    The kernel keeps the peak where it can be reset (Linux); elsewhere a thread samples it, and a
    short peak may be missed. Pages of the page cache are not resident memory of a process.
    """

    def __init__(self) -> None:
        self.growth_bytes = 0
        """Peak minus start, in bytes; known after the ``with`` block."""
        self.by_kernel = False
        """Whether the kernel told the peak."""
        self._start_bytes = 0
        self._sampler: _Sampler | None = None

    def __enter__(self) -> PeakMemory:
        gc.collect()
        _give_back_free_memory()
        self._start_bytes = psutil.Process().memory_info().rss
        self.by_kernel = _reset_peak()
        if not self.by_kernel:
            self._sampler = _Sampler()
            self._sampler.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._sampler is None:
            peak = _peak_bytes() or 0
        else:
            peak = self._sampler.stop()
        self.growth_bytes = max(0, peak - self._start_bytes)


def _give_back_free_memory() -> None:
    """Memory that malloc keeps from before would hide growth."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc
    if trim is not None:
        trim(0)


def _reset_peak() -> bool:
    """Sets the kernel's peak to what is resident now; False where that does not work."""
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError:
        return False
    peak, resident = _peak_bytes(), psutil.Process().memory_info().rss
    # Some sandboxes take the write and do nothing.
    return peak is not None and peak <= resident + (16 << 20)


def _peak_bytes() -> int | None:
    try:
        text = _STATUS.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        if name == "VmHWM":
            return int(rest.split()[0]) << 10
    return None


class _Sampler(threading.Thread):
    def __init__(self) -> None:
        super().__init__(name="ebbtide-demo-memory", daemon=True)
        self._process = psutil.Process()
        self._ended = threading.Event()
        self._peak_bytes = 0

    def run(self) -> None:
        while not self._ended.wait(_SAMPLING_SECONDS):
            self._peak_bytes = max(self._peak_bytes, self._process.memory_info().rss)

    def stop(self) -> int:
        self._ended.set()
        self.join()
        return max(self._peak_bytes, self._process.memory_info().rss)
