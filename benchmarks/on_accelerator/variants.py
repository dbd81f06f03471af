"""The offloaders that are compared, each with its own defaults, as a user would have them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.autograd.graph import save_on_cpu

import ebbtide.torch as ebb

Enter = Callable[[], AbstractContextManager[Any]]


@dataclass
class Variant:
    name: str
    enter: Enter | None
    """None: it cannot run here, and ``missing`` says why."""
    missing: str = ""
    tide: ebb.Offload | None = None
    """For Ebbtide's: its object, for its statistics."""


# Before the disk: less than a step saves.
HOST_BEFORE_DISK_BYTES = 4 << 30


def ebbtide_variants(
    model: nn.Module | None,
    device: str,
    disk: Path | None,
    host_before_disk_bytes: int = HOST_BEFORE_DISK_BYTES,
    **options: Any,
) -> list[Variant]:
    made = {
        "Ebbtide": ebb.offload(model, device=device, to="host", **options),
        "Ebbtide group_swap": ebb.offload(
            model, device=device, to="host", group_swap=True, **options
        ),
    }
    variants = [Variant(name, lambda t=tide: t, tide=tide) for name, tide in made.items()]
    if disk is None:
        variants.append(Variant("Ebbtide, disk behind", None, "give --disk DIR"))
    else:
        tide = ebb.offload(
            model,
            device=device,
            to=disk,
            max_host_bytes=host_before_disk_bytes,
            **options,
        )
        variants.append(Variant("Ebbtide, disk behind", lambda: tide, tide=tide))
    return variants


def all_variants(model: nn.Module, device: str, disk: Path | None, **options: Any) -> list[Variant]:
    """``no offload`` is the first."""
    variants = [Variant("no offload", contextlib.nullcontext)]
    variants += ebbtide_variants(model, device, disk, **options)
    # Older releases of torch know CUDA alone.
    where = {} if device == "cuda" else {"device_type": device}
    variants.append(Variant("save_on_cpu", lambda: save_on_cpu(pin_memory=True, **where)))
    for name, make in (("torchtune", _torchtune), ("TRL", _trl)):
        try:
            context = make(model, device)
        except ImportError:  # that of absent metadata is one too
            variants.append(Variant(name, None, "not installed"))
        except Exception as error:
            variants.append(Variant(name, None, f"{type(error).__name__}: {error}"))
        else:
            variants.append(Variant(name, lambda c=context: c))
    return variants


def _torchtune(model: nn.Module, device: str) -> AbstractContextManager[Any]:
    from peers.offloaders import _torchtune_module

    return _torchtune_module(device).OffloadActivations()


def _trl(model: nn.Module, device: str) -> AbstractContextManager[Any]:
    from accelerate import PartialState
    from trl.models.activation_offloading import OffloadActivations

    PartialState()  # as in a Trainer: its logger wants it
    context = OffloadActivations()
    context.update_model_params(model)
    return context
