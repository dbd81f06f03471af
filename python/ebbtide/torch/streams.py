"""Streams, events, copies and page-locked memory of torch's accelerators, whichever this torch was built for."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch

from ebbtide import _core
from ebbtide.torch.unobserved import unobserved

# Without the checks of its public name, which accepts devices of any kind.
_current_stream = getattr(torch._C, "_accelerator_getStream", torch.accelerator.current_stream)
_set_stream = getattr(torch._C, "_accelerator_setStream", torch.accelerator.set_stream)
_current_device = getattr(
    torch._C, "_accelerator_getDeviceIndex", torch.accelerator.current_device_index
)


_HELPERS = SimpleNamespace(
    current_stream=_current_stream, set_stream=_set_stream, current_device=_current_device
)


@unobserved
def make_empty(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):  # whose tensors could not be changed outside of it
        return torch.empty(0, dtype=dtype, device=device)


class TorchStreams(_core.TorchCopies):
    """See :class:`ebbtide.framework.Streams`. One object per device type and process; thread safe.

    What is called for every copy is in the base class.
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._numbers: dict[tuple[int, int], int] = {}  # by device index and torch's number
        self._streams: list[torch.Stream | None] = [None]
        self._copy_streams: dict[tuple[int, bool], int] = {}
        super().__init__(torch, self._streams, _HELPERS)

    def number_of(self, stream: torch.Stream) -> int:
        key = stream.device_index, stream.stream_id
        number = self._numbers.get(key)
        if number is None:
            self._streams.append(stream)
            # Where two threads get here at once, one number of the two is never used.
            number = self._numbers.setdefault(key, self._streams.index(stream))
        return number

    def _stream(self, number: int) -> torch.Stream:
        stream = self._streams[number]
        assert stream is not None
        return stream

    def copy_stream(self, device: int, to_device: bool) -> int:
        number = self._copy_streams.get((device, to_device))
        if number is None:
            stream = torch.Stream(device=torch.device(self._device_type, device))
            number = self._copy_streams.setdefault((device, to_device), self.number_of(stream))
        return number

    def on(self, stream: int) -> AbstractContextManager[Any]:
        shared = self._stream(stream)
        # A context keeps what to go back to in the object: no two threads may be inside the same one.
        return torch.Stream(
            stream_id=shared.stream_id,
            device_index=shared.device_index,
            device_type=shared.device_type,
        )

    # C functions themselves: each is all that the method would call.
    done = staticmethod(torch.Event.query)
    synchronize = staticmethod(torch.Event.synchronize)

    def no_bytes(self, device: torch.device) -> torch.Tensor:
        return make_empty(torch.uint8, device)

    @unobserved
    def staging(self, nbytes: int, device: int) -> torch.Tensor:
        try:
            return torch.empty(
                nbytes, dtype=torch.uint8, device=torch.device(self._device_type, device)
            )
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error

    @unobserved
    def pinned(self, nbytes: int) -> torch.Tensor | None:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError:
            return None

    def address(self, memory: torch.Tensor) -> int:
        return memory.data_ptr()

    def unified(self) -> bool:
        properties = getattr(getattr(torch, self._device_type, None), "get_device_properties", None)
        if properties is None or torch.accelerator.device_count() == 0:
            return self._device_type == "mps"
        return bool(getattr(properties(0), "is_integrated", False))
