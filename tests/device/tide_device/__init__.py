"""PyTorch on the test device: importing it builds and loads the device and names it "tide".

``torch.empty(3, device="tide:1")`` and everything else that PyTorch offers for accelerators then
works; :mod:`tide_device.control` is the side that no accelerator has: races found, copies made,
queues stepped by hand, failures.
"""

from __future__ import annotations

import atexit
import time

import torch

from . import backend, control
from .build import DeviceUnavailable

__all__ = ["DeviceUnavailable", "control"]

torch.utils.rename_privateuse1_backend("tide")
torch._register_device_module("tide", backend)
torch.utils.generate_methods_for_privateuse1_backend()

# PyTorch's autograd thread lets go of its graph a little after backward has returned; an interpreter
# that ends just then aborts.
atexit.register(time.sleep, 0.1)
