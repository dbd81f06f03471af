"""The offloaders that are compared, each as published, with how to call it.

All are set to move everything and to keep nothing back, as far as their options go: what they hold
at the end of forward is then a matter of what they can do, not of a threshold.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType
from typing import Any

import torch

from peers.cases import Case, Enter
from peers.models import enable_checkpointing


class Unavailable(Exception):
    """The offloader is not installed here."""


@dataclass(frozen=True)
class Offloader:
    name: str
    package: str
    call: str
    """As it stands in a user's program."""
    make: Callable[[torch.nn.Module | None, str], Enter]
    """Once per case, for a model (or None) and a device type."""
    adapted: str = ""
    """What had to be done for a device that is not CUDA."""
    only_checkpointed: bool = False

    def applies(self, case: Case) -> bool:
        return case.checkpointed or not self.only_checkpointed

    def version(self) -> str:
        try:
            return metadata.version(self.package)
        except metadata.PackageNotFoundError:
            raise Unavailable(f"{self.package} is not installed") from None


def _none(model: torch.nn.Module | None, device: str) -> Enter:
    return contextlib.nullcontext


def _save_on_cpu(model: torch.nn.Module | None, device: str) -> Enter:
    return lambda: torch.autograd.graph.save_on_cpu(pin_memory=True, device_type=device)


def _transformers(model: torch.nn.Module | None, device: str) -> Enter:
    enable_checkpointing(model, offload=True)
    return contextlib.nullcontext


# Activations held back for their copies to end: the least that both accept.
_STASH = 1


def _trl(model: torch.nn.Module | None, device: str) -> Enter:
    from accelerate import PartialState
    from trl.models.activation_offloading import OffloadActivations

    PartialState()  # as in a Trainer: its logger wants it
    context = OffloadActivations(max_fwd_stash_size=_STASH)
    if model is not None:
        context.update_model_params(model)
    return lambda: context


def _torchtune(model: torch.nn.Module | None, device: str) -> Enter:
    context = _torchtune_module(device).OffloadActivations(max_fwd_stash_size=_STASH)
    return lambda: context


def _torchtune_module(device: str) -> ModuleType:
    """The published file on this device.

    The package itself does not import without torchao and the data sets it is made for. The file
    names four things of theirs; none of them is used where activations are offloaded.
    """
    distribution = metadata.distribution("torchtune")
    path = str(distribution.locate_file("torchtune/training/_activation_offloading.py"))
    with open(path, encoding="utf-8") as file:
        source = file.read()
    stand_ins = {
        "torchao": {"__version__": "0"},
        "torchao.dtypes": {},
        "torchao.dtypes.nf4tensor": {"NF4Tensor": type("NF4Tensor", (), {})},
        "torchtune": {},
        "torchtune.modules": {"TiedLinear": type("TiedLinear", (), {})},
        "torchtune.utils": {"get_logger": logging.getLogger},
    }
    before = {name: sys.modules.get(name) for name in stand_ins}
    module = ModuleType("torchtune.training._activation_offloading")
    try:
        for name, content in stand_ins.items():
            stand_in = ModuleType(name)
            stand_in.__dict__.update(content)
            sys.modules[name] = stand_in
        exec(compile(source.replace('"cuda"', repr(device)), path, "exec"), module.__dict__)
    finally:
        for name, original in before.items():
            sys.modules.pop(name)
            if original is not None:
                sys.modules[name] = original
    module.__dict__["torch"] = _TorchWithCuda(device)
    return module


class _TorchWithCuda:
    """``torch``, whose ``torch.cuda`` is the module of another device."""

    def __init__(self, device: str) -> None:
        self.cuda = torch.get_device_module(device)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _ebbtide(group_swap: bool) -> Callable[[torch.nn.Module | None, str], Enter]:
    def make(model: torch.nn.Module | None, device: str) -> Enter:
        import ebbtide.torch as ebb

        tide = ebb.offload(
            model,
            device=device,
            to="host",
            min_bytes=0,
            keep_last_bytes=0,
            in_flight_bytes=0,
            group_swap=group_swap,
        )
        return lambda: tide

    return make


OFFLOADERS = [
    Offloader("no offload", "torch", "", _none),
    Offloader(
        "save_on_cpu",
        "torch",
        "torch.autograd.graph.save_on_cpu(pin_memory=True, device_type=…)",
        _save_on_cpu,
    ),
    Offloader(
        "transformers",
        "transformers",
        'gradient_checkpointing_kwargs={"offload": True}',
        _transformers,
        only_checkpointed=True,
    ),
    Offloader(
        "torchtune",
        "torchtune",
        f"torchtune.training.OffloadActivations(max_fwd_stash_size={_STASH})",
        _torchtune,
        adapted='`torch.cuda` is the test device\'s module and `"cuda"` its name; only the file that '
        "defines the class is loaded, with stand-ins for what it imports of torchao and of its own "
        "package and does not use here",
    ),
    Offloader(
        "TRL",
        "trl",
        f"trl.models.activation_offloading.OffloadActivations(max_fwd_stash_size={_STASH}), "
        "update_model_params(model)",
        _trl,
    ),
    Offloader(
        "Ebbtide",
        "ebbtide",
        "ebbtide.torch.offload(model, min_bytes=0, keep_last_bytes=0, in_flight_bytes=0)",
        _ebbtide(group_swap=False),
    ),
    Offloader(
        "Ebbtide group_swap",
        "ebbtide",
        "ebbtide.torch.offload(model, …, group_swap=True), the rest the same",
        _ebbtide(group_swap=True),
    ),
]
