"""Options: what users may write, checked in one place, and what follows from it on a machine.

``OffloadConfig`` holds what was asked for, ``Resolved`` what is used. Sizes are bytes everywhere.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ebbtide.disk_directory import default_disk_directory, usable_directory
from ebbtide.errors import UsageError
from ebbtide.host_memory import default_max_host_bytes
from ebbtide.sizes import SHOWN, parse_bytes

__all__ = ["OffloadConfig", "Resolved", "environment_name"]

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


def environment_name(field: str) -> str | None:
    """The environment variable that sets ``field``; None for ``policy``, which has none."""
    return None if field == "policy" else f"EBBTIDE_{field.upper()}"


Size = int | str


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """What the user asked for. None means the default, which ``resolve`` takes from the machine.

    Made by ``OffloadConfig(...)``, from arguments alone, or by ``OffloadConfig.from_options``, from
    arguments and the environment. Either way every value is checked; sizes are then ints and
    directories absolute paths. Immutable.

    Raises:
        UsageError: naming the field or the environment variable, the value, and what is allowed.
    """

    to: str | os.PathLike[str] | None = None
    """``"host"`` (``"cpu"``), ``"disk"`` (``"nvme"``), or a directory on a disk.

    From an accelerator the way to disk leads through pinned host memory: what finds room under
    ``max_host_bytes`` stays there, the rest goes on to the file. CPU tensors go to disk directly.

    Default: host on accelerators, disk for CPU tensors."""
    device: str | None = None
    """Whose tensors are offloaded, such as ``"cuda"``. Default: the accelerator, else ``"cpu"``."""
    min_bytes: Size | None = None
    """Smaller storages stay. Default: 256 KiB, to disk or with ``group_swap`` 64 KiB."""
    keep_last_bytes: Size | None = None
    """The last so many bytes of forward are never copied, whatever the groups.

    Default: ``keep_last_groups``; until a group has begun 128 MiB, CPU tensors 32 MiB."""
    keep_last_groups: int | None = None
    """The last so many groups of forward are never copied; not together with ``keep_last_bytes``.

    0: a group is copied when it has ended. Default: 1 on accelerators, unless ``keep_last_bytes``
    is given."""
    prefetch_bytes: Size | None = None
    """Bound on bytes loading, or loaded and not yet asked for, whatever the groups.

    Default: ``prefetch_groups``; outside groups what keeps all that is held below 256 MiB (CPU
    tensors: 64 MiB), or below what forward held at its peak."""
    prefetch_groups: int | None = None
    """With a group, so many groups before it are loaded; not together with ``prefetch_bytes``.

    More are, while no more is held on the device than forward held at its peak. 0: only the rest of
    the group that is asked for. Default: 1 on accelerators, unless ``prefetch_bytes`` is given."""
    in_flight_bytes: Size | None = None
    """Bound on bytes of storages held only because their copy is running, or was when the backward
    began that is about to ask for them.

    Default: 1 GiB or a tenth of the device's memory, whichever is less; CPU tensors 64 MiB."""
    max_host_bytes: Size | None = None
    """Hard cap on host memory of this process.

    Beyond it storages stay on the device; from an accelerator to disk, they go on to the file.
    Default: half of what is free, shared by the local ranks."""
    group_swap: bool = False
    """Small storages of a group cross in packs: the same bytes in fewer copies."""
    policy: Callable[[Any], object] | None = None
    """``policy(tensor)`` answers a ``CheckpointPolicy``: MUST_SWAP or MUST_SAVE."""
    only: str = "saved"
    """``"saved"``: all that autograd saves; ``"layer_inputs"``: inputs of checkpointed regions."""
    on_inplace: str = "error"
    """After a write to a saved tensor: ``"error"`` raises, ``"saved"`` uses a completed copy."""
    allow_tmpfs: bool = False
    """Accept a disk directory that is really in memory."""
    max_device_memory: Size | None = None
    """Not available in this release."""
    max_slowdown: float | str | None = None
    """Not available in this release."""
    max_disk_bytes: Size | None = None
    """Cap on the disk tier of this process. Default: none."""
    tune_malloc: bool = True
    """With CPU tensors, fix glibc's mmap threshold so that freed memory leaves the process."""

    def __post_init__(self) -> None:
        given = {item.name: getattr(self, item.name) for item in fields(self)}
        for name, value in _checked(given, {}).items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_options(cls, **options: object) -> OffloadConfig:
        """A configuration from keyword arguments; None and absent ones come from the environment.

        The environment variable of a field is ``EBBTIDE_`` and its name in capitals; an empty one
        is not set. Booleans are written 1, 0, true, false, yes, no, on, off.

        Raises:
            UsageError: an unknown option (with the closest names), a wrong value, options that
                exclude each other, or one that this release does not have.
        """
        names = [item.name for item in fields(cls)]
        for option in options:
            if option not in names:
                raise _unknown_option(option, names)
        given: dict[str, Any] = {}
        places: dict[str, str] = {}
        for name in names:
            given[name] = options.get(name)
            variable = environment_name(name)
            if any(options.get(other) is not None for other in _opposites(name)):
                continue  # an argument counts more than the environment, also than its opposite there
            if given[name] is None and variable and (text := os.environ.get(variable, "").strip()):
                given[name], places[name] = text, variable
        return cls(**_checked(given, places))

    @classmethod
    def from_arguments(cls, config: object, options: Mapping[str, object]) -> OffloadConfig:
        """What ``offload(config=..., **options)`` was called with: one or the other.

        Raises:
            UsageError: both, or ``config`` is something else; and as ``from_options``.
        """
        if config is None:
            return cls.from_options(**options)
        if options:
            raise UsageError(
                f"[offload] config= and {', '.join(sorted(options))}= given: put all of them into the config"
            )
        if not isinstance(config, cls):
            raise UsageError(
                f"[offload] config is a {type(config).__name__}: pass an ebbtide.OffloadConfig, or options by name"
            )
        return config

    def resolve(self, device_type: str, accelerator: bool, total_device_bytes: int = 0) -> Resolved:
        """What is used on this machine, with every default filled in.

        Reads the state of the machine: free memory, control groups, mounts. Writes nothing.

        Args:
            device_type: whose tensors are offloaded, as the framework names it.
            accelerator: whether that device has memory of its own, apart from the host's.
            total_device_bytes: that memory in bytes; 0 where it is not known.

        Raises:
            UsageError: the disk directory cannot be used, or no default one was found.
        """
        to = self.to if self.to is not None else "host" if accelerator else "disk"
        directory: Path | None = None
        if to == "disk":
            directory = default_disk_directory(self.allow_tmpfs)
        elif to != "host":
            directory = usable_directory(Path(to), self.allow_tmpfs)

        in_flight_bytes = CPU_IN_FLIGHT_BYTES
        if accelerator:
            in_flight_bytes = ACCELERATOR_IN_FLIGHT_BYTES
            if total_device_bytes > 0:
                share = total_device_bytes // ACCELERATOR_IN_FLIGHT_DIVISOR
                in_flight_bytes = min(in_flight_bytes, share)

        min_bytes = MIN_BYTES_HOST
        if directory is not None:
            min_bytes = MIN_BYTES_DISK
        elif self.group_swap:
            min_bytes = MIN_BYTES_PACKED

        def nbytes(field: str, default: int) -> int:
            value = getattr(self, field)
            return default if value is None else int(value)

        def groups(what: str, default: int) -> int | None:
            if getattr(self, f"{what}_bytes") is not None:
                return None
            value: int | None = getattr(self, f"{what}_groups")
            return value if value is not None or not accelerator else default

        return Resolved(
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
            prefetch_to_peak=self.prefetch_bytes is None,
            in_flight_bytes=nbytes("in_flight_bytes", in_flight_bytes),
            max_host_bytes=default_max_host_bytes()
            if self.max_host_bytes is None
            else nbytes("max_host_bytes", 0),
            max_disk_bytes=None if self.max_disk_bytes is None else nbytes("max_disk_bytes", 0),
            group_swap=self.group_swap,
            pack_below_bytes=PACK_BELOW_BYTES if self.group_swap else 0,
            allow_tmpfs=self.allow_tmpfs,
            on_inplace=self.on_inplace,
            only=self.only,
            tune_malloc=self.tune_malloc,
        )


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


# --- checks of single values: (value as given, place) -> value as kept


def _parse_to(value: object, place: str) -> str | Path:
    if isinstance(value, str):
        word = value.strip().lower()
        if word in ("host", "cpu"):
            return "host"
        if word in ("disk", "nvme"):
            return "disk"
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if isinstance(path, str) and path.strip():
        expanded = os.path.expanduser(path)
        is_path = os.sep in expanded or (os.altsep is not None and os.altsep in expanded)
        if is_path or os.path.isdir(expanded):
            return Path(os.path.abspath(expanded))
    raise UsageError(
        f'[{place}] {SHOWN.repr(value)} is no tier: give "host" (or "cpu"), "disk" (or "nvme"), '
        'or a directory on a disk: an existing one, or a path with a separator such as "./spill"'
    )


def _parse_device(value: object, place: str) -> str:
    # Frameworks' own device objects print as their names do.
    named = isinstance(value, str) or isinstance(getattr(value, "type", None), str)
    text = str(value).strip() if named else ""
    if not re.fullmatch(r"[A-Za-z_]\w*(:\d+)?", text, re.ASCII):
        raise UsageError(
            f"[{place}] {SHOWN.repr(value)} is no device: "
            'give a name such as "cuda", "npu:1" or "cpu"'
        )
    return text


def _parse_count(value: object, place: str) -> int:
    number: object = value
    if isinstance(value, str) and value.strip().isdecimal():
        number = int(value)
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise UsageError(f"[{place}] {SHOWN.repr(value)} is no count: give a whole number from 0")
    return number


def _parse_ratio(value: object, place: str) -> float:
    number = math.nan
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            pass
    if not math.isfinite(number) or number < 0:
        raise UsageError(f"[{place}] {SHOWN.repr(value)} is no ratio: give a number such as 1.1")
    return number


def _parse_bool(value: object, place: str) -> bool:
    if isinstance(value, bool):
        return value
    word = value.strip().lower() if isinstance(value, str) else ""
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise UsageError(f"[{place}] {SHOWN.repr(value)} is no boolean: give True or False")


def _parse_choice(*choices: str) -> Callable[[object, str], str]:
    def parse(value: object, place: str) -> str:
        word = value.strip().lower() if isinstance(value, str) else None
        if word not in choices:
            allowed = " or ".join(f'"{choice}"' for choice in choices)
            raise UsageError(f"[{place}] {SHOWN.repr(value)} is not known: give {allowed}")
        return word

    return parse


def _parse_policy(value: object, place: str) -> Callable[[Any], object]:
    if not callable(value):
        raise UsageError(
            f"[{place}] {SHOWN.repr(value)} cannot be called: "
            "give a function that takes a tensor and returns a CheckpointPolicy"
        )
    return value


_CHECKS: Mapping[str, Callable[[object, str], object]] = {
    "to": _parse_to,
    "device": _parse_device,
    "min_bytes": parse_bytes,
    "keep_last_bytes": parse_bytes,
    "keep_last_groups": _parse_count,
    "prefetch_bytes": parse_bytes,
    "prefetch_groups": _parse_count,
    "in_flight_bytes": parse_bytes,
    "max_host_bytes": parse_bytes,
    "group_swap": _parse_bool,
    "policy": _parse_policy,
    "only": _parse_choice("saved", "layer_inputs"),
    "on_inplace": _parse_choice("error", "saved"),
    "allow_tmpfs": _parse_bool,
    "max_device_memory": parse_bytes,
    "max_slowdown": _parse_ratio,
    "max_disk_bytes": parse_bytes,
    "tune_malloc": _parse_bool,
}

# Two ways to say one thing.
_EXCLUSIVE = (("keep_last_bytes", "keep_last_groups"), ("prefetch_bytes", "prefetch_groups"))


def _opposites(name: str) -> Iterator[str]:
    for pair in _EXCLUSIVE:
        if name in pair:
            yield from (other for other in pair if other != name)


_NOT_AVAILABLE = ("max_device_memory", "max_slowdown")


def _checked(given: Mapping[str, object], places: Mapping[str, str]) -> dict[str, Any]:
    """``given`` as it is kept. ``places`` names where values come from that are no arguments."""
    defaults = {item.name: item.default for item in fields(OffloadConfig)}
    places = {name: places.get(name, f"OffloadConfig.{name}") for name in defaults}
    values: dict[str, Any] = {}
    for name, default in defaults.items():
        value = given[name]
        values[name] = default if value is None else _CHECKS[name](value, places[name])
    for first, second in _EXCLUSIVE:
        if values[first] is not None and values[second] is not None:
            raise UsageError(
                f"[{places[first]}] {values[first]} given, and {places[second]} {values[second]} "
                f"too: they exclude each other, give {first} or {second}"
            )
    for name in _NOT_AVAILABLE:
        if values[name] != defaults[name]:
            raise UsageError(
                f"[{places[name]}] {values[name]} given, but {name} is not available in this "
                f"release: leave it at {defaults[name]}"
            )
    return values


def _unknown_option(option: str, names: Iterable[str]) -> UsageError:
    names = list(names)
    close = difflib.get_close_matches(option, names, n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else f"options are {', '.join(names)}"
    return UsageError(f"[OffloadConfig.from_options] unknown option {SHOWN.repr(option)}: {hint}")
