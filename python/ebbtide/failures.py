"""What made copies fail, kept until somebody asks for the bytes."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from ebbtide import _core
from ebbtide._core import Hop, StorageEntry
from ebbtide.errors import DeviceError, HostMemoryError
from ebbtide.sizes import format_bytes

_OFFLOAD = int(Hop.OFFLOAD)
_LOAD = int(Hop.LOAD)
_SPILL = int(Hop.SPILL)


class Failures:
    """Of one engine's copies."""

    def __init__(self) -> None:
        self.of_offload = ""  # the last, in words
        self._of_fetches: dict[int, BaseException] = {}  # by copy, while the engine is told of it

    def note(
        self,
        number: int,
        hop: int,
        storages: list[int],
        error: BaseException,
        entries: Mapping[int, StorageEntry],
    ) -> None:
        """A copy failed; the engine is told next."""
        if hop in (_OFFLOAD, _SPILL):
            self.of_offload = str(error) or type(error).__name__
        elif hop == _LOAD:
            for storage in storages:
                if (entry := entries.get(storage)) is not None:
                    entry.note_load_error(number, _to_raise_later(error))
                    if entry.load_started == number:
                        entry.load_started = 0
        else:
            self._of_fetches[number] = error

    def told(self, number: int) -> None:
        """The engine was told of the copy, and what follows from it was done."""
        if self._of_fetches:
            self._of_fetches.pop(number, None)

    def of_load(self, command: _core.Command, max_host_bytes: int) -> BaseException:
        """Why a load will not come."""
        cause = self._of_fetches.get(command.cause)
        if cause is not None:
            return _to_raise_later(cause)
        if command.cause != 0:
            return DeviceError(
                f"[unpack] the copy that took a saved storage off the device failed: {self.of_offload}: "
                "run the forward again"
            )
        return HostMemoryError(
            f"[unpack] {format_bytes(command.nbytes)} of host memory are needed to read a saved storage back from disk, "
            f"and max_host_bytes={format_bytes(max_host_bytes)} is taken: raise max_host_bytes, and run "
            "backward again (retain_graph=True); the copy on disk is kept"
        )


def _to_raise_later(error: BaseException) -> BaseException:
    """A copy without frames: those hold tickets, and with them the entry that it is kept in."""
    try:
        anew: BaseException = copy.copy(error)
    except Exception:
        anew = DeviceError(str(error))
    if isinstance(error, OSError) and isinstance(anew, OSError):
        anew.errno = error.errno  # no part of what is copied
    return anew.with_traceback(None)
