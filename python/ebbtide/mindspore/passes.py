"""Backwards that run, and the call when one ends."""

from __future__ import annotations

import threading
from collections.abc import Callable

from mindspore.common.api import _pynative_executor

from ebbtide import _core


class _Open(threading.local):
    def __init__(self) -> None:
        self.callbacks: dict[int, list[Callable[[], None]]] = {}  # by pass


_open = _Open()


def current() -> int:
    """The number of the backward that runs on this thread; 0 when none does. Grows from one to the next."""
    running: int = max(0, _pynative_executor.get_current_autodiff_engine_id())
    if _open.callbacks:
        _end_after(running)
    return running


def is_running() -> bool:
    """Whether a backward runs on this thread."""
    return bool(_pynative_executor.get_current_autodiff_engine_id() > 0)


def at_end(callback: Callable[[], None]) -> None:
    """Calls back when the running backward ends; after an exception, when this module is asked next."""
    running = current()
    callbacks = _open.callbacks.setdefault(running, [])
    callbacks.append(callback)
    if len(callbacks) == 1:
        _pynative_executor.queue_backward_final_callback(_ended)


def end_left_over() -> None:
    """Calls back for backwards that an exception has ended."""
    current()


def _end_after(running: int) -> None:
    # A backward inside another one has the larger number.
    for number in [number for number in _open.callbacks if number > running]:
        _call(number)


def _call(number: int) -> None:
    for callback in _open.callbacks.pop(number, ()):
        callback()


def _ended() -> None:
    _call(_pynative_executor.get_current_autodiff_engine_id())


# After an exception MindSpore drops its reference to what it was to call on another thread and without the GIL: no
# object may end there, and the count of references may be off.
for _ in range(1 << 10):
    _core.keep_forever(_ended)
