"""Ebbtide for PyTorch: ``with ebbtide.torch.offload(model): loss = model(x)``."""

from __future__ import annotations

from typing import Any

import torch

from ebbtide import process
from ebbtide.config import OffloadConfig
from ebbtide.errors import UsageError
from ebbtide.offload import Offload, PackHook
from ebbtide.peaks import Recomputation
from ebbtide.policy import CheckpointPolicy
from ebbtide.resolved import Resolved
from ebbtide.session import Session
from ebbtide.torch.compiler import leave_alone, methods
from ebbtide.torch.framework import TorchFramework
from ebbtide.torch.memory import AcceleratorMemory
from ebbtide.torch.streams import TorchStreams
from ebbtide.transfers import Transfers

__all__ = ["CheckpointPolicy", "Offload", "OffloadConfig", "offload", "trim"]

trim = process.trim

leave_alone(
    (
        Offload.__enter__,
        Offload.__exit__,
        PackHook.__call__,
        # What is C++ calls them without any of the above in between.
        *methods(Session),
        *methods(Transfers),
        *methods(TorchFramework),
        *methods(TorchStreams),
        *methods(Recomputation),
        *methods(AcceleratorMemory),
    )
)


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
    config = OffloadConfig.from_arguments(config, options)
    framework, resolved = resolve(config)
    return Offload(framework, config, resolved, model)


def resolve(config: OffloadConfig) -> tuple[TorchFramework, Resolved]:
    """The device that the configuration is about, and its options on this machine. Raises as ``offload`` does."""
    device_type = _device_type(config.device)
    on_accelerator = device_type != "cpu"
    total_bytes = _device_bytes(device_type) if on_accelerator else 0
    resolved = Resolved.from_config(config, device_type, on_accelerator, total_bytes)
    if not on_accelerator and resolved.tune_malloc:
        process.fix_malloc_threshold()
    return TorchFramework(device_type), resolved


def _device_type(device: str | None) -> str:
    """The type of the devices whose tensors are offloaded."""
    accelerator = _accelerator()
    if device is None:
        return accelerator or "cpu"
    try:
        device_type = str(torch.device(device).type)
    except (RuntimeError, TypeError) as error:
        raise UsageError(
            f"[offload] device={device!r} is not a torch device: pass 'cpu', or what "
            "torch.accelerator.current_accelerator() says"
        ) from error
    if device_type not in ("cpu", accelerator):
        found = f"{accelerator!r}" if accelerator else "none"
        raise UsageError(
            f"[offload] device={device!r}: the accelerator of this torch on this machine is {found}: pass that, "
            "or 'cpu'"
        )
    return device_type


def _accelerator() -> str | None:
    """The type of the accelerator of this machine."""
    if not hasattr(torch, "accelerator") or not torch.accelerator.is_available():
        return None
    accelerator = torch.accelerator.current_accelerator()
    return None if accelerator is None else str(accelerator.type)


def _device_bytes(device_type: str) -> int:
    """Memory of the smallest device in bytes; 0 where torch does not tell."""
    properties = getattr(getattr(torch, device_type, None), "get_device_properties", None)
    if properties is None:
        return 0
    sizes = [
        getattr(properties(index), "total_memory", 0)
        for index in range(torch.accelerator.device_count())
    ]
    return min(sizes, default=0)
