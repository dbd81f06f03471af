"""Errors of Ebbtide. Every text says the place, the numbers and the next step."""

from __future__ import annotations

__all__ = [
    "CorruptionError",
    "DeviceError",
    "EbbtideError",
    "HostMemoryError",
    "InplaceModificationError",
    "SpillError",
    "UsageError",
]


class EbbtideError(Exception):
    """Base of everything that Ebbtide raises of its own."""


class UsageError(EbbtideError, ValueError):
    """A wrong option, a wrong order of calls, or a call after fork or shutdown."""


class HostMemoryError(EbbtideError, MemoryError):
    """Host memory that was needed could not be had."""


class DeviceError(EbbtideError):
    """The device could not give memory for a restore; copies outside the device are kept."""


class SpillError(EbbtideError, OSError):
    """The disk tier failed; ``errno`` holds the cause where the system gave one."""


class CorruptionError(EbbtideError):
    """Bytes read from the disk tier are not those that were written."""


class InplaceModificationError(EbbtideError, RuntimeError):
    """A tensor needed for backward was changed in place after it was saved."""
