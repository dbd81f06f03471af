"""Ebbtide for PyTorch: ``with ebbtide.torch.offload(model): loss = model(x)``."""

from __future__ import annotations

from typing import Any

import psutil
import torch

from ebbtide import process
from ebbtide.config import OffloadConfig
from ebbtide.errors import UsageError
from ebbtide.offload import Offload
from ebbtide.policy import CheckpointPolicy
from ebbtide.torch.framework import TorchFramework

__all__ = ["CheckpointPolicy", "Offload", "OffloadConfig", "offload", "trim"]

trim = process.trim


def offload(
    model: torch.nn.Module | None = None, *, config: OffloadConfig | None = None, **options: Any
) -> Offload:
    """Offload the activations that autograd saves.

    Args:
        model: whose parameters and buffers are never copied. Without it they are recognised by type and base only, and
            otherwise kept because somebody holds them.
        config: all options in one object; or
        **options: the fields of :class:`ebbtide.OffloadConfig`, such as ``to="disk"`` or ``max_host_bytes="8GiB"``.

    Raises:
        UsageError: an option is unknown, out of range, in conflict with another, or not available here.
        SpillError: the disk directory cannot be used.

    Use as a context around the forward pass; see :class:`ebbtide.torch.Offload`.
    """
    if config is not None and options:
        raise UsageError(
            f"[offload] config= and {', '.join(sorted(options))}= given: put all of them into the config"
        )
    if config is None:
        config = OffloadConfig.from_options(**options)
    device_type = _device_type(config.device)
    on_cpu = device_type == "cpu"
    total = psutil.virtual_memory().total
    resolved = config.resolve(device_type, accelerator=not on_cpu, total_device_bytes=total)
    if on_cpu and resolved.tune_malloc:
        process.fix_malloc_threshold()
    return Offload(TorchFramework(device_type), config, resolved, model)


def _device_type(device: Any) -> str:
    """The device type to offload from. Accelerators are not supported yet, and said so."""
    if device is None:
        return "cpu"
    try:
        device_type = torch.device(device).type
    except (RuntimeError, TypeError) as error:
        raise UsageError(
            f"[offload] device={device!r} is not a torch device: pass 'cpu'"
        ) from error
    if device_type != "cpu":
        raise UsageError(
            f"[offload] device={device!r}: this release offloads CPU tensors only: pass device='cpu'"
        )
    return device_type
