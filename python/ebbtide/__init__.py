"""Offloads the activations that autograd saves, storage by storage, and brings them back in time.

Import ``ebbtide.torch`` to use it; this package names what does not depend on a framework.
Importing it touches no accelerator, stream, thread or pinned memory.
"""

from __future__ import annotations

from ebbtide.config import OffloadConfig
from ebbtide.errors import (
    CorruptionError,
    DeviceError,
    EbbtideError,
    HostMemoryError,
    InplaceModificationError,
    SpillError,
    UsageError,
)
from ebbtide.policy import CheckpointPolicy

__version__ = "0.1.0"

__all__ = [
    "CheckpointPolicy",
    "CorruptionError",
    "DeviceError",
    "EbbtideError",
    "HostMemoryError",
    "InplaceModificationError",
    "OffloadConfig",
    "SpillError",
    "UsageError",
    "__version__",
]
