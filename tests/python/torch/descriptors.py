"""Breaking the spill file on purpose, through its descriptor."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ebbtide import process


def spill_descriptor(directory: Path) -> int:
    return process.spill_file(directory, False).descriptor


@contextmanager
def replaced(descriptor: int, path: str, flags: int) -> Iterator[None]:
    """``descriptor`` means another file meanwhile."""
    saved, other = os.dup(descriptor), os.open(path, flags)
    try:
        os.dup2(other, descriptor, inheritable=False)
        yield
    finally:
        os.dup2(saved, descriptor, inheritable=False)
        os.close(saved)
        os.close(other)


def full_disk(directory: Path) -> object:
    """Every write fails with ENOSPC."""
    return replaced(spill_descriptor(directory), "/dev/full", os.O_RDWR)


def bad_disk(directory: Path) -> object:
    """Every read fails with EIO: address 0 of this process is no memory. Not for writes."""
    return replaced(spill_descriptor(directory), "/proc/self/mem", os.O_RDONLY)


@contextmanager
def truncated(directory: Path) -> Iterator[None]:
    """The file has lost its end meanwhile: all of it."""
    descriptor = spill_descriptor(directory)
    content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    os.ftruncate(descriptor, 0)
    yield
    os.pwrite(descriptor, content, 0)


@contextmanager
def flipped(directory: Path) -> Iterator[None]:
    """Every byte of the file has one bit changed meanwhile."""
    descriptor = spill_descriptor(directory)
    content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    os.pwrite(descriptor, bytes(byte ^ 4 for byte in content), 0)
    yield
    os.pwrite(descriptor, content, 0)
