"""What tests ask of the device that no accelerator offers.

Streams are ``torch.Stream`` objects; devices are indices. All functions are thread safe.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from .native import tide

Options = tide.Options
Copy = tide.Copy
Race = tide.Race
Memory = tide.Memory


def options(**changes: Any) -> Any:
    """Changes options and returns those before; everything queued runs first.

    ``mode``: "lazy" or "worker"; ``reuse``: "at_once" or "delayed"; ``poison``; ``queue_depth``;
    ``delay_us``; ``link_bytes_per_s``; ``device_bytes_per_s``; ``copy_latency_s``. Options that
    an earlier call returned are put back by :func:`restore`.
    """
    before = tide.options()
    after = Options(before)
    for name, value in changes.items():
        if name == "mode":
            value = getattr(tide.Mode, value)
        elif name == "reuse":
            value = getattr(tide.Reuse, value)
        setattr(after, name, value)
    if changes:
        tide.set_options(after)
    return before


def restore(before: Any) -> None:
    tide.set_options(before)


@contextlib.contextmanager
def changed(**changes: Any) -> Iterator[None]:
    """:func:`options` for a while."""
    before = options(**changes)
    try:
        yield
    finally:
        restore(before)


def races() -> list[Any]:
    """Pairs of accesses without order, oldest first: ``first``, ``second``, ``begin``, ``end``."""
    return tide.races()


def clear_races() -> None:
    tide.clear_races()


def set_checking(happens_before: bool) -> None:
    """Switches the search for races off and on."""
    tide.set_checking(happens_before)


def copies() -> list[Any]:
    """Copies in the order they ran: ``kind.name`` ("h2d", ...), ``nbytes``, ``device``,
    ``stream_id``, ``dst``, ``src``, ``begin_s``, ``end_s``."""
    return tide.copies()


def clear_copies() -> None:
    tide.clear_copies()


def step(stream: torch.Stream) -> bool:
    """Runs the oldest task of the stream and what it waits for; False when there is none."""
    return tide.step(stream.device_index, stream.stream_id)


def queued(stream: torch.Stream) -> int:
    """The number of tasks that have not run."""
    return tide.queued(stream.device_index, stream.stream_id)


def clock_s(stream: torch.Stream) -> float:
    """The stream's time on the virtual clock."""
    return tide.clock_s(stream.device_index, stream.stream_id)


def streams(device: int = 0) -> int:
    """The number of streams that were made, the default stream among them."""
    return tide.streams(device)


def fail(operation: str, nth: int = 1, sticky: bool = False) -> None:
    """The n-th call from now on fails; `sticky`: the device is lost with it.

    ``operation``: "allocate" (torch.OutOfMemoryError), "pin", "copy", "record", "wait",
    "synchronize"; "run_copy": a copy when it runs, which always loses the device.
    """
    tide.fail(getattr(tide.Operation, operation), nth, sticky)


def clear_faults() -> None:
    tide.clear_faults()


def lose() -> None:
    """Everything but frees fails until :func:`recover`."""
    tide.lose()


def recover() -> None:
    tide.recover()


def set_limit(device: int, nbytes: int | None) -> None:
    """Allocations that would take the device above `nbytes` in use fail; None: no limit."""
    tide.set_limit(device, tide.options().capacity_bytes if nbytes is None else nbytes)


def memory(device: int = 0) -> Any:
    """``used_bytes``, ``peak_bytes``, ``pending_bytes``, ``allocations``, ``pinned_bytes``,
    ``pin_allocations``."""
    return tide.memory(device)


def owns(address: int) -> bool:
    """Whether the address is in memory of a device."""
    return tide.owns(address)


def host_reads(tensor: torch.Tensor) -> None:
    """Enters a read of pinned memory by the host into the search for races."""
    tide.host_access(tensor.data_ptr(), tensor.nbytes, False)


def host_writes(tensor: torch.Tensor) -> None:
    """Enters a write of pinned memory by the host into the search for races."""
    tide.host_access(tensor.data_ptr(), tensor.nbytes, True)


def set_capturing(answer: bool) -> None:
    """What ``torch.tide.is_current_stream_capturing()`` answers."""
    tide.set_capturing(answer)


def reset() -> None:
    """Takes failures and limits back and forgets races and copies. Queued work stays queued."""
    recover()
    clear_faults()
    set_capturing(False)
    for device in range(tide.options().devices):
        set_limit(device, None)
    clear_races()
    clear_copies()
