"""Ebbtide for MindSpore: ``with ebbtide.mindspore.offload(cell): loss = cell(x)``, in PyNative mode."""

from __future__ import annotations

from typing import Any

import mindspore

from ebbtide import process
from ebbtide.config import OffloadConfig
from ebbtide.errors import UsageError
from ebbtide.mindspore.framework import MindSporeFramework
from ebbtide.offload import Offload
from ebbtide.policy import CheckpointPolicy

__all__ = ["CheckpointPolicy", "Offload", "OffloadConfig", "offload", "trim"]

trim = process.trim


def offload(
    model: mindspore.nn.Cell | None = None, *, config: OffloadConfig | None = None, **options: Any
) -> Offload:
    """Offload the activations that autograd saves.

    Args:
        model: the cell whose parameters are never copied. Without it no tensor is known to be a weight.
        config: all options in one object; or
        **options: the fields of :class:`ebbtide.OffloadConfig`, such as ``to="disk"`` or ``max_host_bytes="8GiB"``.

    Raises:
        UsageError: an option is unknown, out of range, in conflict with another, or not available here.
        SpillError: the disk directory cannot be used.

    Use as a context around the forward pass; see :class:`ebbtide.mindspore.Offload`.
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
    device_type = "cpu"
    resolved = config.resolve(device_type, False, 0)
    if resolved.tune_malloc:
        process.fix_malloc_threshold()
    return Offload(MindSporeFramework(device_type), config, resolved, model)
