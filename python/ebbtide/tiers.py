"""Where one ``offload`` object moves bytes to: host memory, a file, or a file behind host memory; and their limits."""

from __future__ import annotations

import sys
import warnings
from typing import Literal

from ebbtide import _core, process
from ebbtide.framework import Framework
from ebbtide.pinned_pool import PinnedPool
from ebbtide.resolved import Resolved
from ebbtide.sizes import format_bytes

_NO_LIMIT = (1 << 64) - 1


class Tiers:
    def __init__(self, framework: Framework, options: Resolved) -> None:
        self.on_disk = options.tier == "disk"
        self._keep_last_storages = framework.keep_last_storages
        self.file: _core.SpillFile | None = None
        if options.directory is not None and self.on_disk:
            self.file = process.spill_file(options.directory, options.allow_tmpfs)
        self.max_host_bytes = options.max_host_bytes
        self.max_disk_bytes = (
            _NO_LIMIT if options.max_disk_bytes is None else options.max_disk_bytes
        )
        self.pinned: PinnedPool | None = None
        self.space: _core.BlockSpace
        self.backing: _core.BlockSpace | None = None
        if framework.streams is not None:
            # A device reaches files through host memory only.
            self.pinned = process.pinned_pool(framework.device_type, framework.streams)
            self.space, self.backing = self.pinned.space, self.file
        else:
            self.space = self.file if self.file is not None else process.host_pool()
        first_is_disk = self.space is self.file
        self.first: Literal["host", "disk"] = "disk" if first_is_disk else "host"

    def make_engine(self, options: Resolved) -> _core.Engine:
        return _core.Engine(
            self.space,
            self.backing,
            min_bytes=options.min_bytes,
            keep_last_bytes=options.keep_last_bytes,
            keep_last_groups=options.keep_last_groups,
            prefetch_bytes=options.prefetch_bytes,
            prefetch_groups=options.prefetch_groups,
            prefetch_to_peak=options.prefetch_to_peak,
            in_flight_bytes=options.in_flight_bytes,
            max_tier_bytes=self.max_disk_bytes if self.first == "disk" else self.max_host_bytes,
            max_backing_bytes=self.max_disk_bytes,
            pack_below_bytes=options.pack_below_bytes,
            keep_last_storages=self._keep_last_storages,
        )

    def grow(self, nbytes: int) -> bool:
        """More page-locked memory; False where there is none."""
        assert self.pinned is not None
        return self.pinned.grow(nbytes, self.max_host_bytes)

    def warn_full(self, nbytes: int, stats: _core.Stats, error: str) -> None:
        """A storage of so many bytes stayed on the device: there is no room, or ``error`` is why copies fail."""
        tier: str = self.first
        reason = "disk_full" if stats.kept["disk_full"] else "host_full"
        if error:
            cause, remedy = error, "once that is mended it is tried again"
        else:
            option = f"max_{tier}_bytes"
            limits = {"host": self.max_host_bytes, "disk": self.max_disk_bytes}
            cause = f"{format_bytes(stats.tier_bytes)} used of {format_bytes(limits[tier])} allowed"
            if self.on_disk and tier == "host":
                # What goes to disk comes through host memory.
                option, tier = "max_host_bytes or max_disk_bytes", "host and disk"
                used, limit = format_bytes(stats.backing_bytes), format_bytes(limits["disk"])
                cause += f" in host memory, {used} of {limit} on disk"
            remedy = f"raise {option}, or choose another tier with to="
        warnings.warn(
            f"[{tier} tier] no room for {format_bytes(nbytes)}: {cause}. What does not fit "
            f"stays on the device (kept['{reason}'] counts it): {remedy}",
            RuntimeWarning,
            stacklevel=_level_of_the_caller(),
        )


def _level_of_the_caller() -> int:
    """How many frames lie between the function that calls this and the user's code."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("ebbtide."):
        level, frame = level + 1, frame.f_back
    return level
