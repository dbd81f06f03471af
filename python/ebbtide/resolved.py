"""What is used on a machine: options with every default filled in. Sizes are bytes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ebbtide.config import OffloadConfig
from ebbtide.disk_directory import default_disk_directory, usable_directory
from ebbtide.host_memory import default_max_host_bytes

__all__ = ["Resolved"]

_KIB = 1 << 10
_MIB = 1 << 20
_GIB = 1 << 30

MIN_BYTES_HOST = 256 * _KIB
MIN_BYTES_DISK = 64 * _KIB
MIN_BYTES_PACKED = 64 * _KIB
PACK_BELOW_BYTES = 400_000  # one copy call costs about as much as moving this over PCIe 5

# Groups that stay on an accelerator, and that are loaded ahead, where nothing is said in bytes. For CPU tensors a group is
# too much of the memory that is to be relieved.
KEEP_LAST_GROUPS = 1
PREFETCH_GROUPS = 1

# With CPU tensors these amounts stand in the very memory that offload is to relieve: smaller ones.
ACCELERATOR_KEEP_LAST_BYTES = 128 * _MIB
CPU_KEEP_LAST_BYTES = 32 * _MIB
ACCELERATOR_PREFETCH_BYTES = 256 * _MIB
CPU_PREFETCH_BYTES = 64 * _MIB
ACCELERATOR_IN_FLIGHT_BYTES = 1 * _GIB
ACCELERATOR_IN_FLIGHT_DIVISOR = 10  # of device memory
CPU_IN_FLIGHT_BYTES = 64 * _MIB


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """What is used: an ``OffloadConfig`` on a machine. Sizes are bytes."""

    device_type: str
    tier: str
    """``"host"`` or ``"disk"``; from an accelerator, the disk stands behind host memory."""
    directory: Path | None
    """Where the disk tier is; None with tier ``"host"``."""
    min_bytes: int
    keep_last_bytes: int
    """With ``keep_last_groups``: only until a group has begun."""
    keep_last_groups: int | None
    """None: bytes alone decide."""
    prefetch_bytes: int
    """With ``prefetch_groups``: only outside groups."""
    prefetch_groups: int | None
    """None: bytes alone decide."""
    prefetch_to_peak: bool
    """``prefetch_bytes`` bounds all that is held, and not only what is loaded ahead; or forward's peak, if that is more."""
    in_flight_bytes: int
    max_host_bytes: int
    max_disk_bytes: int | None
    """None: no cap."""
    group_swap: bool
    pack_below_bytes: int
    """Storages with less to copy cross in packs; 0: none do."""
    allow_tmpfs: bool
    on_inplace: str
    only: str
    tune_malloc: bool

    @classmethod
    def from_config(
        cls, config: OffloadConfig, device_type: str, accelerator: bool, total_device_bytes: int = 0
    ) -> Resolved:
        """What of ``config`` is used on this machine, with every default filled in.

        Reads the state of the machine: free memory, control groups, mounts. Writes nothing.

        Args:
            config: what was asked for.
            device_type: whose tensors are offloaded, as the framework names it.
            accelerator: whether that device has memory of its own, apart from the host's.
            total_device_bytes: that memory in bytes; 0 where it is not known.

        Raises:
            UsageError: the disk directory cannot be used, or no default one was found.
        """
        to = config.to if config.to is not None else "host" if accelerator else "disk"
        directory: Path | None = None
        if to == "disk":
            directory = default_disk_directory(config.allow_tmpfs)
        elif to != "host":
            directory = usable_directory(Path(to), config.allow_tmpfs)

        in_flight_bytes = CPU_IN_FLIGHT_BYTES
        if accelerator:
            in_flight_bytes = ACCELERATOR_IN_FLIGHT_BYTES
            if total_device_bytes > 0:
                share = total_device_bytes // ACCELERATOR_IN_FLIGHT_DIVISOR
                in_flight_bytes = min(in_flight_bytes, share)

        min_bytes = MIN_BYTES_HOST
        if directory is not None:
            min_bytes = MIN_BYTES_DISK
        elif config.group_swap:
            min_bytes = MIN_BYTES_PACKED

        def nbytes(field: str, default: int) -> int:
            value = getattr(config, field)
            return default if value is None else int(value)

        def groups(what: str, default: int) -> int | None:
            if getattr(config, f"{what}_bytes") is not None:
                return None
            value: int | None = getattr(config, f"{what}_groups")
            return value if value is not None or not accelerator else default

        return cls(
            device_type=device_type,
            tier="host" if directory is None else "disk",
            directory=directory,
            min_bytes=nbytes("min_bytes", min_bytes),
            keep_last_bytes=nbytes(
                "keep_last_bytes",
                ACCELERATOR_KEEP_LAST_BYTES if accelerator else CPU_KEEP_LAST_BYTES,
            ),
            keep_last_groups=groups("keep_last", KEEP_LAST_GROUPS),
            prefetch_bytes=nbytes(
                "prefetch_bytes", ACCELERATOR_PREFETCH_BYTES if accelerator else CPU_PREFETCH_BYTES
            ),
            prefetch_groups=groups("prefetch", PREFETCH_GROUPS),
            prefetch_to_peak=config.prefetch_bytes is None,
            in_flight_bytes=nbytes("in_flight_bytes", in_flight_bytes),
            max_host_bytes=default_max_host_bytes()
            if config.max_host_bytes is None
            else nbytes("max_host_bytes", 0),
            max_disk_bytes=None if config.max_disk_bytes is None else nbytes("max_disk_bytes", 0),
            group_swap=config.group_swap,
            pack_below_bytes=PACK_BELOW_BYTES if config.group_swap else 0,
            allow_tmpfs=config.allow_tmpfs,
            on_inplace=config.on_inplace,
            only=config.only,
            tune_malloc=config.tune_malloc,
        )
