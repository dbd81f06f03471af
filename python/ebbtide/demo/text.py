"""Text to learn from: the sources of Python's standard library, byte by byte. Nothing is downloaded."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from ebbtide.errors import UsageError

__all__ = ["VOCABULARY", "read_corpus"]

VOCABULARY = 256
"""Tokens are bytes."""

_ENOUGH_BYTES = 1 << 20


def read_corpus(least_bytes: int, directory: Path | None = None) -> bytes:
    """About 1 MiB of source text, more if ``least_bytes`` is more; the same at every call.

    Args:
        least_bytes: what the caller cannot do without.
        directory: whose ``*.py`` files are read, in the order of their names; the standard
            library's by default.

    Raises:
        UsageError: there is less than ``least_bytes``.
    """
    if directory is None:
        directory = Path(sysconfig.get_path("stdlib"))
    enough = max(_ENOUGH_BYTES, least_bytes)
    text = bytearray()
    for path in sorted(directory.glob("*.py")):
        if len(text) >= enough:
            break
        text += path.read_bytes()
    if len(text) < least_bytes:
        raise UsageError(
            f"[demo] {len(text):,} bytes of Python source in {directory}, {least_bytes:,} needed: "
            "give a smaller --sequence, or use a Python with its standard library's sources"
        )
    return bytes(text)
