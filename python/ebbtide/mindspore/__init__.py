"""Ebbtide for MindSpore: ``with ebbtide.mindspore.offload(cell): loss = cell(x)``, in PyNative mode."""

from __future__ import annotations

import functools
from typing import Any

import mindspore

from ebbtide import process
from ebbtide.config import OffloadConfig
from ebbtide.errors import UsageError
from ebbtide.mindspore.framework import MindSporeFramework
from ebbtide.mindspore.streams import MindSporeStreams
from ebbtide.offload import Offload
from ebbtide.policy import CheckpointPolicy
from ebbtide.resolved import Resolved

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
    config = OffloadConfig.from_arguments(config, options)
    framework, resolved = resolve(config)
    return Offload(framework, config, resolved, model)


def resolve(config: OffloadConfig) -> tuple[MindSporeFramework, Resolved]:
    """The device that the configuration is about, and its options on this machine. Raises as ``offload`` does."""
    device_type = _device_type(config.device)
    on_accelerator = device_type != "cpu"
    resolved = Resolved.from_config(config, device_type, on_accelerator, 0)
    if not on_accelerator and resolved.tune_malloc:
        process.fix_malloc_threshold()
    streams = _streams(device_type) if on_accelerator else None
    return MindSporeFramework(device_type, streams), resolved


def _device_type(device: str | None) -> str:
    """Of the device whose tensors are offloaded: ``"cpu"``, or MindSpore's own name."""
    target = str(mindspore.get_context("device_target"))
    asked = target if device is None else device.partition(":")[0]
    if asked.lower() == "cpu":
        return "cpu"
    if asked.lower() != target.lower() and not (asked.lower() == "npu" and target == "Ascend"):
        raise UsageError(
            f"[offload] device={device!r}: MindSpore is set to {target!r} here: pass that, or 'cpu'"
        )
    if target != "Ascend":
        raise UsageError(
            f"[offload] device {target!r}: MindSpore copies between host and device in the background on Ascend only, "
            "and offload without that would only cost time: use Ascend, or device='cpu' for tensors of the host"
        )
    return target


@functools.cache
def _streams(device_type: str) -> MindSporeStreams:
    """Of this process: copy streams are few, and shared."""
    return MindSporeStreams(device_type)
