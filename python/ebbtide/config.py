"""Options: what users may write, in code or in the environment, checked in one place. Sizes are bytes everywhere."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from ebbtide import option_values
from ebbtide.errors import UsageError
from ebbtide.sizes import SHOWN, parse_bytes

__all__ = ["OffloadConfig", "environment_name"]


def environment_name(field: str) -> str | None:
    """The environment variable that sets ``field``; None for ``policy``, which has none."""
    return None if field == "policy" else f"EBBTIDE_{field.upper()}"


Size = int | str


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """What the user asked for. None means the default, which
    ``Resolved.from_config`` takes from the machine.

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


_CHECKS: Mapping[str, Callable[[object, str], object]] = {
    "to": option_values.parse_to,
    "device": option_values.parse_device,
    "min_bytes": parse_bytes,
    "keep_last_bytes": parse_bytes,
    "keep_last_groups": option_values.parse_count,
    "prefetch_bytes": parse_bytes,
    "prefetch_groups": option_values.parse_count,
    "in_flight_bytes": parse_bytes,
    "max_host_bytes": parse_bytes,
    "group_swap": option_values.parse_bool,
    "policy": option_values.parse_policy,
    "only": option_values.parse_choice("saved", "layer_inputs"),
    "on_inplace": option_values.parse_choice("error", "saved"),
    "allow_tmpfs": option_values.parse_bool,
    "max_device_memory": parse_bytes,
    "max_slowdown": option_values.parse_ratio,
    "max_disk_bytes": parse_bytes,
    "tune_malloc": option_values.parse_bool,
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
