"""Ebbtide for PyTorch: ``with ebbtide.torch.offload(model): loss = model(x)``."""

from __future__ import annotations

from typing import Any

import torch

from ebbtide import process
from ebbtide.config import OffloadConfig
from ebbtide.errors import UsageError
from ebbtide.offload import Offload, Scope
from ebbtide.policy import CheckpointPolicy
from ebbtide.saved import PassEnd
from ebbtide.session import Session
from ebbtide.torch.compiler import leave_alone
from ebbtide.torch.framework import TorchFramework
from ebbtide.transfers import Transfers

__all__ = ["CheckpointPolicy", "Offload", "OffloadConfig", "offload", "trim"]

trim = process.trim

leave_alone(
    (
        Offload.__enter__,
        Offload.__exit__,
        PassEnd.__call__,
        Scope.pack,
        Session.unpack,
        Transfers.run_dropped,
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
    if config is not None and options:
        raise UsageError(
            f"[offload] config= and {', '.join(sorted(options))}= given: put all of them into the config"
        )
    if config is not None and not isinstance(config, OffloadConfig):
        raise UsageError(
            f"[offload] config is a {type(config).__name__}: pass an ebbtide.OffloadConfig, or options by name"
        )
    if config is None:
        config = OffloadConfig.from_options(**options)
    _require_cpu(config.device)
    resolved = config.resolve("cpu", accelerator=False)
    if resolved.tune_malloc:
        process.fix_malloc_threshold()
    return Offload(TorchFramework("cpu"), config, resolved, model)


def _require_cpu(device: str | None) -> None:
    """Refuses accelerators, which this release does not have; also where one would be the default."""
    if device is None:
        accelerator = _accelerator()
        if accelerator is not None:
            raise UsageError(
                f"[offload] this machine has an accelerator ({accelerator}), and this release "
                "offloads CPU tensors only: pass device='cpu' if that is what you train on"
            )
        return
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


def _accelerator() -> str | None:
    """The type of the accelerator of this machine."""
    if not hasattr(torch, "accelerator") or not torch.accelerator.is_available():
        return None
    accelerator = torch.accelerator.current_accelerator()
    return None if accelerator is None else str(accelerator.type)
