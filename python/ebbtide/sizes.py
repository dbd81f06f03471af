"""Sizes in bytes, as people write and read them."""

from __future__ import annotations

import math
import operator
import re
import reprlib
from fractions import Fraction

from ebbtide.errors import UsageError

__all__ = ["format_bytes", "parse_bytes"]

_MAX_BYTES = (1 << 63) - 1

# As GNU coreutils: K and KiB are 1024, KB is 1000.
_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtpe", start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}i": 1024**_power, f"{_letter}ib": 1024**_power}
    _UNITS[f"{_letter}b"] = 1000**_power

_SIZE = re.compile(
    r"(?P<sign>-?)(?P<number>(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d{1,2})?)\s*(?P<unit>[a-z]*)",
    re.ASCII | re.IGNORECASE,
)
_SIZE_TEXT_LENGTH = 64  # longer ones are no sizes; bounds the arithmetic

# Bounds what an error text repeats of a value.
SHOWN = reprlib.Repr()
SHOWN.maxstring = SHOWN.maxother = SHOWN.maxlong = 80


def parse_bytes(value: object, place: str = "parse_bytes") -> int:
    """Bytes of ``value``: a whole number, or text such as ``"8GiB"``, ``"1.5 GB"``, ``"64k"``.

    KiB, MiB, GiB, TiB, PiB, EiB and their short forms K, Ki, M, … count in 1024; KB, MB, … in
    1000; case does not matter. No unit means bytes. Fractions of a byte that a unit leaves are
    dropped.

    Raises:
        UsageError: naming ``place`` and the value: negative, no size at all, a bool, not whole, or
            above 2**63 - 1.
    """
    nbytes = _parse_size_text(value, place) if isinstance(value, str) else _whole(value, place)
    if nbytes < 0:
        raise UsageError(f"[{place}] {SHOWN.repr(value)} is negative: give 0 or more bytes")
    if nbytes > _MAX_BYTES:
        raise UsageError(f"[{place}] {SHOWN.repr(value)} is above 2**63 - 1 bytes: give less")
    return nbytes


def _parse_size_text(text: str, place: str) -> int:
    stripped = text.strip()
    match = _SIZE.fullmatch(stripped) if len(stripped) <= _SIZE_TEXT_LENGTH else None
    unit = _UNITS.get(match["unit"].lower()) if match else None
    if match is None or unit is None:
        raise _no_size(text, place)
    nbytes = Fraction(match["sign"] + match["number"]) * unit
    if unit == 1 and nbytes.denominator != 1:
        raise UsageError(
            f"[{place}] {SHOWN.repr(text)} is no whole number of bytes: "
            "add a unit (KiB, MiB, GiB, …) or drop the fraction"
        )
    return math.floor(nbytes)


def _whole(value: object, place: str) -> int:
    if isinstance(value, float) and value.is_integer():  # false for nan and inf
        return int(value)
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise _no_size(value, place)
    try:
        return operator.index(value)
    except TypeError:  # arrays have __index__ and may refuse
        raise _no_size(value, place) from None


def _no_size(value: object, place: str) -> UsageError:
    return UsageError(
        f"[{place}] {SHOWN.repr(value)} is no size: "
        'give bytes as a whole number or text such as "8GiB", "1.5 GB" or "64k"'
    )


def format_bytes(nbytes: int) -> str:
    """``nbytes`` for people, in units of 1024: ``"512 B"``, ``"1.5 KiB"``, ``"2.0 GiB"``."""
    if abs(nbytes) < 1024:
        return f"{nbytes} B"
    amount = float(nbytes)
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        amount /= 1024
        if abs(round(amount, 1)) < 1024:
            return f"{amount:.1f} {unit}"
    return f"{amount / 1024:.1f} EiB"
