"""What torch's allocator tells of the memory of an accelerator."""

from __future__ import annotations

import torch

from ebbtide.framework import MemoryUse
from ebbtide.torch.blocks import current_pass

# The public functions flatten and sort all statistics for each number.
_statistics = getattr(torch._C, "_accelerator_getDeviceStats", None)
_is_in_use = getattr(torch._C, "_accelerator_isAllocatorInitialized", None)


class AcceleratorMemory:
    """See :class:`ebbtide.framework.DeviceMemory`. The accelerator is the only one that this torch has."""

    def use(self, device: int | None = None) -> MemoryUse | None:
        if _statistics is None or _is_in_use is None:
            return None
        if torch.accelerator.current_accelerator() is None:
            return None
        try:
            if not _is_in_use():
                return None
            if device is None:
                device = torch.accelerator.current_device_index()
            found = _statistics(device)["allocated_bytes"]["all"]
        except (RuntimeError, KeyError):
            return None  # an allocator that does not count, or a forked process
        return MemoryUse(device, found["current"], found["peak"])

    current_pass = staticmethod(current_pass)


ACCELERATOR_MEMORY = AcceleratorMemory()
