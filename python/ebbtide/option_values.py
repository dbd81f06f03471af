"""What single options accept: a value as it is given, and the place for errors, to the value as it is kept.

All raise ``UsageError``: the place, the value, what is allowed.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ebbtide.errors import UsageError
from ebbtide.sizes import SHOWN


def parse_to(value: object, place: str) -> str | Path:
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


def parse_device(value: object, place: str) -> str:
    # Frameworks' own device objects print as their names do.
    named = isinstance(value, str) or isinstance(getattr(value, "type", None), str)
    text = str(value).strip() if named else ""
    if not re.fullmatch(r"[A-Za-z_]\w*(:\d+)?", text, re.ASCII):
        raise UsageError(
            f"[{place}] {SHOWN.repr(value)} is no device: "
            'give a name such as "cuda", "npu:1" or "cpu"'
        )
    return text


def parse_count(value: object, place: str) -> int:
    number: object = value
    if isinstance(value, str) and value.strip().isdecimal():
        number = int(value)
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise UsageError(f"[{place}] {SHOWN.repr(value)} is no count: give a whole number from 0")
    return number


def parse_ratio(value: object, place: str) -> float:
    number = math.nan
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            pass
    if not math.isfinite(number) or number < 0:
        raise UsageError(f"[{place}] {SHOWN.repr(value)} is no ratio: give a number such as 1.1")
    return number


def parse_bool(value: object, place: str) -> bool:
    if isinstance(value, bool):
        return value
    word = value.strip().lower() if isinstance(value, str) else ""
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise UsageError(f"[{place}] {SHOWN.repr(value)} is no boolean: give True or False")


def parse_choice(*choices: str) -> Callable[[object, str], str]:
    def parse(value: object, place: str) -> str:
        word = value.strip().lower() if isinstance(value, str) else None
        if word not in choices:
            allowed = " or ".join(f'"{choice}"' for choice in choices)
            raise UsageError(f"[{place}] {SHOWN.repr(value)} is not known: give {allowed}")
        return word

    return parse


def parse_policy(value: object, place: str) -> Callable[[Any], object]:
    if not callable(value):
        raise UsageError(
            f"[{place}] {SHOWN.repr(value)} cannot be called: "
            "give a function that takes a tensor and returns a CheckpointPolicy"
        )
    return value
