"""HyperParallel's interface for offload and recomputation: a script moves over by changing its import."""

from __future__ import annotations

from ebbtide.hyper_parallel.checkpoint import (
    checkpoint,
    checkpoint_wrapper,
    create_selective_checkpoint_contexts,
)
from ebbtide.hyper_parallel.exclude import checkpoint_exclude_wrapper
from ebbtide.hyper_parallel.manager import SwapManager
from ebbtide.hyper_parallel.pool import PinnedMemoryPool
from ebbtide.hyper_parallel.swap import (
    async_save_on_cpu,
    swap,
    swap_tensor_wrapper,
    swap_wrapper,
)
from ebbtide.hyper_parallel.totals import report, reset_stats, stats, synchronize
from ebbtide.modules import CheckpointExcludeWrapper, CheckpointWrapper, SwapWrapper
from ebbtide.policy import CheckpointPolicy

__all__ = [
    "CheckpointExcludeWrapper",
    "CheckpointPolicy",
    "CheckpointWrapper",
    "PinnedMemoryPool",
    "SwapManager",
    "SwapWrapper",
    "async_save_on_cpu",
    "checkpoint",
    "checkpoint_exclude_wrapper",
    "checkpoint_wrapper",
    "create_selective_checkpoint_contexts",
    "report",
    "reset_stats",
    "stats",
    "swap",
    "swap_tensor_wrapper",
    "swap_wrapper",
    "synchronize",
]
