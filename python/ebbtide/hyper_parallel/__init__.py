"""HyperParallel's interface for offload and recomputation: a script moves over by changing its import."""

from __future__ import annotations

from ebbtide.hyper_parallel.manager import SwapManager
from ebbtide.hyper_parallel.pool import PinnedMemoryPool
from ebbtide.hyper_parallel.swap import (
    async_save_on_cpu,
    swap,
    swap_tensor_wrapper,
    swap_wrapper,
)
from ebbtide.hyper_parallel.totals import report, reset_stats, stats, synchronize
from ebbtide.modules import SwapWrapper
from ebbtide.policy import CheckpointPolicy

__all__ = [
    "CheckpointPolicy",
    "PinnedMemoryPool",
    "SwapManager",
    "SwapWrapper",
    "async_save_on_cpu",
    "report",
    "reset_stats",
    "stats",
    "swap",
    "swap_tensor_wrapper",
    "swap_wrapper",
    "synchronize",
]
