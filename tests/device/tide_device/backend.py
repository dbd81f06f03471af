"""``torch.tide``: what PyTorch and libraries on top of it look for in a device's module."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .native import tide


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def init() -> None:
    pass


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return tide.options().devices


def current_device() -> int:
    return tide.current_device()


def set_device(device: torch.device | str | int) -> None:
    tide.set_device(_index(device))


def _index(device: torch.device | str | int | None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index


class device(torch.accelerator.device_index):
    """Makes a device the current one for a while."""

    def __init__(self, device: torch.device | str | int | None) -> None:
        super().__init__(_index(device))


def synchronize(device: torch.device | str | int | None = None) -> None:
    torch.accelerator.synchronize(_index(device))


# --- streams and events


def Stream(device: torch.device | str | int | None = None, priority: int = 0) -> torch.Stream:
    return torch.Stream(device=f"tide:{_index(device)}", priority=priority)


def Event(enable_timing: bool = False) -> torch.Event:
    return torch.Event(device="tide", enable_timing=enable_timing)


def current_stream(device: torch.device | str | int | None = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: torch.device | str | int | None = None) -> torch.Stream:
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=20)


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Makes `stream` the current one of its device for a while; None changes nothing."""
    if stream is None:
        yield
        return
    with stream:
        yield


is_current_stream_capturing: Callable[[], bool] = tide.capturing


# --- memory


def empty_cache() -> None:
    pass


memory_allocated = torch.accelerator.memory_allocated
max_memory_allocated = torch.accelerator.max_memory_allocated
memory_reserved = torch.accelerator.memory_reserved
max_memory_reserved = torch.accelerator.max_memory_reserved
memory_stats = torch.accelerator.memory_stats
reset_peak_memory_stats = torch.accelerator.reset_peak_memory_stats


# --- random numbers, which are the CPU's


def manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


manual_seed_all = manual_seed


def initial_seed() -> int:
    return torch.default_generator.initial_seed()


def get_rng_state(device: Any = "tide") -> torch.Tensor:
    return torch.default_generator.get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = "tide") -> None:
    torch.default_generator.set_state(new_state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]
