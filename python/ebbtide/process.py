"""What the whole process shares: worker threads, the host pool, spill files; and the rules of fork and shutdown.

Everything is made at first use and reused by every ``offload`` object. After a fork the child may not use what the
parent made: calls raise UsageError and destructors do nothing.
"""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path

from ebbtide import _core
from ebbtide.errors import UsageError
from ebbtide.framework import Streams
from ebbtide.pinned_pool import PinnedPool

WORKER_THREADS = 1
QUEUE_DEPTH = 64
INLINE_COPY_BYTES = 32 << 10
MALLOC_THRESHOLD_BYTES = 64 << 10

_executor: _core.HostExecutor | None = None
_host_pool: _core.HostPool | None = None
_pinned_pools: dict[str, PinnedPool] = {}
_spill_files: dict[tuple[str, bool], _core.SpillFile] = {}
_malloc_fixed = False
_forked = False
_finished = False


def executor() -> _core.HostExecutor:
    """The worker threads for copies between host memory and files."""
    global _executor
    require_usable("executor")
    if _executor is None:
        _executor = _core.HostExecutor(WORKER_THREADS, QUEUE_DEPTH, INLINE_COPY_BYTES)
    return _executor


def host_pool() -> _core.HostPool:
    """The host tier's memory."""
    global _host_pool
    require_usable("host_pool")
    if _host_pool is None:
        _host_pool = _core.HostPool()
    return _host_pool


def pinned_pool(device_type: str, streams: Streams) -> PinnedPool:
    """Page-locked host memory for copies from and to this kind of device."""
    require_usable("pinned_pool")
    pool = _pinned_pools.get(device_type)
    return pool if pool is not None else _pinned_pools.setdefault(device_type, PinnedPool(streams))


def spill_file(directory: Path, allow_tmpfs: bool) -> _core.SpillFile:
    """The one spill file in this directory. Raises SpillError where it cannot be made."""
    require_usable("spill_file")
    key = (os.path.realpath(directory), allow_tmpfs)
    if key not in _spill_files:
        _spill_files[key] = _core.SpillFile(*key)
    return _spill_files[key]


def fix_malloc_threshold() -> None:
    """Let freed activations leave the process, by a fixed mmap threshold of glibc's malloc. Once per process."""
    global _malloc_fixed
    if not _malloc_fixed:
        _malloc_fixed = True
        _core.fix_malloc_threshold(MALLOC_THRESHOLD_BYTES)


def trim() -> int:
    """Give unused host memory and disk blocks back to the system; returns the bytes of host memory given back."""
    require_usable("trim")
    for file in _spill_files.values():
        file.trim()
    freed = sum(pool.trim() for pool in _pinned_pools.values())
    return freed + (_host_pool.trim() if _host_pool is not None else 0)


def usable() -> bool:
    """False after a fork in the child, and once the interpreter shuts down."""
    return not (_forked or _finished or sys.is_finalizing())


def require_usable(place: str) -> None:
    if _forked:
        raise UsageError(
            f"[{place}] process {os.getpid()} was forked from one that had used Ebbtide: "
            "start it with 'spawn' or 'forkserver', or fork before the first use"
        )
    if _finished:
        raise UsageError(f"[{place}] the interpreter is shutting down")


def _after_fork_in_child() -> None:
    global _forked
    _forked = bool(_executor or _host_pool or _pinned_pools or _spill_files)
    if _forked:
        _core.stop_destructors()
    # Its threads are not here: joining them would hang.
    _core.keep_forever(_executor)


def _at_exit() -> None:
    global _finished
    _finished = True
    _core.stop_destructors()
    if _executor is not None and not _forked:
        _executor.shutdown()


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_at_exit)
