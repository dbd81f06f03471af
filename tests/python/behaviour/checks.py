"""The checks that most behaviour tests end with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from protocol import Backend, Program, Tensor
from support import assert_at_rest, assert_loaded


def assert_same(
    backend: Backend, found: Sequence[Tensor | None], expected: Sequence[Tensor | None]
) -> None:
    """Equal dtypes, shapes and bits."""
    assert len(found) == len(expected)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert (a is None) == (b is None), f"tensor {i}: {a is None=} {b is None=}"
        if a is None or b is None:
            continue
        left, right = backend.layout(a), backend.layout(b)
        assert (left.dtype, left.sizes) == (right.dtype, right.sizes), f"tensor {i}"
        assert backend.bits(a) == backend.bits(b), f"tensor {i} of shape {left.sizes} differs"


def run(backend: Backend, program: Program, leaves: Sequence[Tensor], tide: Any = None) -> list:
    """Output and gradients of one forward and backward."""
    forward = backend.forward(program, leaves, tide)
    return [forward.output, *forward.gradients()]


def compare(
    backend: Backend,
    program: Program,
    leaves: Sequence[Tensor],
    *,
    tide: Any = None,
    loads: bool = True,
) -> Any:
    """Bits as without offload, nothing held afterwards; with ``loads``, something was loaded.

    Returns the statistics of the offloaded run.
    """
    expected = run(backend, program, leaves)
    tide = tide or backend.offload()
    found = run(backend, program, leaves, tide)
    assert_same(backend, found, expected)
    assert_at_rest(tide)
    if loads:
        assert_loaded(tide)
    return tide.stats()


def assert_out(
    backend: Backend, stats: Any, nbytes: int, copies: int = 1, *, packs: int = 1
) -> None:
    """Exactly this much went out: in ``copies``, and where small storages are packed in ``packs``."""
    expected = (packs if backend.packs else copies, nbytes)
    assert (stats.d2h_copies, stats.d2h_bytes) == expected, stats


def assert_back(
    backend: Backend, stats: Any, nbytes: int, copies: int = 1, *, packs: int = 1
) -> None:
    """As `assert_out`, for what came back."""
    expected = (packs if backend.packs else copies, nbytes)
    assert (stats.h2d_copies, stats.h2d_bytes) == expected, stats


def assert_moved(
    backend: Backend, stats: Any, nbytes: int, copies: int = 1, *, packs: int = 1
) -> None:
    """All that was saved, exactly this much, went out and came back once."""
    assert_out(backend, stats, nbytes, copies, packs=packs)
    assert_back(backend, stats, nbytes, copies, packs=packs)
    assert stats.unique_bytes == nbytes, stats


def note(backend: Backend, tensor: Tensor) -> tuple[Any, bytes, int]:
    """What a restored tensor must equal; keeps nothing of the tensor alive."""
    return backend.layout(tensor), backend.bits(tensor), backend.address(tensor) % 512


def save_and_restore(
    backend: Backend,
    build: Callable[[], Sequence[Tensor]],
    *,
    tide: Any = None,
    loads: bool = True,
    reads: int = 1,
) -> tuple[Any, list[Tensor]]:
    """One node saves what ``build`` makes, and nobody else holds it.

    Checks what `compare` does, and that the tensors come back with their layouts, bits and addresses
    modulo 512. Returns the statistics and what came back.
    """
    noted: list[tuple[Any, bytes, int]] = []
    restored: list[Tensor] = []

    def program(anchor: Tensor) -> Tensor:
        tensors = build()
        noted[:] = [note(backend, tensor) for tensor in tensors]
        restored.clear()
        return backend.save(anchor, tensors, restored=restored, reads=reads)

    stats = compare(backend, program, [backend.leaf(2)], tide=tide, loads=loads)
    assert [note(backend, tensor) for tensor in restored] == noted * reads
    return stats, restored


def write_shows(backend: Backend, written: Tensor, other: Tensor) -> bool:
    """Whether a write through one tensor changes what the other reads."""
    before = backend.bits(other)
    backend.write(written, seed=99)
    return backend.bits(other) != before
