"""Gradients under Ebbtide equal those without, bit for bit, on the device itself; and each byte moves once."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

import ebbtide.torch as ebb
from on_accelerator.machine import Machine
from on_accelerator.networks import Decoder, DecoderSizes
from on_accelerator.saved import union_bytes

Enter = Callable[[], AbstractContextManager[Any]]
Step = Callable[[Enter], list[torch.Tensor]]

_SETTLES_S = 2.0

# All that nobody else holds moves at once.
EXACT = {"min_bytes": 0, "keep_last_bytes": 0, "in_flight_bytes": 0}


class Program:
    """A step to be run under a context: its gradients. Equal bits each time it runs."""

    def __init__(self, name: str, step: Step, model: torch.nn.Module | None = None) -> None:
        self.name, self.step, self.model = name, step, model
        self.counted: Callable[[], torch.Tensor] | None = None
        """A forward whose saved bytes are counted."""


def programs(machine: Machine, tiny: bool) -> list[Program]:
    side = 192 if tiny else 1024
    sizes = DecoderSizes(64, 4, 2, 64, 64) if tiny else DecoderSizes(1024, 8, 4, 1024, 256)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(side, side, generator=generator).to(machine.device).requires_grad_()
    tokens = torch.randint(sizes.words, (2, sizes.length), generator=generator)
    tokens = tokens.to(machine.device)
    torch.manual_seed(0)
    model = Decoder(sizes).to(machine.device)
    parameters = list(model.parameters())

    def aliases(enter: Enter) -> list[torch.Tensor]:
        with enter():
            loss = alias_patterns(x)
        return list(torch.autograd.grad(loss, [x]))

    def stack(enter: Enter) -> list[torch.Tensor]:
        with enter():
            loss = model(tokens)
        return list(torch.autograd.grad(loss, parameters))

    def autocast(enter: Enter) -> list[torch.Tensor]:
        with enter(), torch.autocast(machine.type, torch.bfloat16):
            loss = model(tokens)
        return list(torch.autograd.grad(loss, parameters))

    def two_forwards(enter: Enter) -> list[torch.Tensor]:
        with enter():
            first = model(tokens)
        with enter():
            second = model(tokens.flip(1))
        gradients = list(torch.autograd.grad(first, parameters))
        return gradients + list(torch.autograd.grad(second, parameters))

    made = [
        Program("aliases", aliases),
        Program("decoder", stack, model),
        Program("decoder, bf16 autocast", autocast, model),
        Program("two forwards before backward", two_forwards, model),
    ]
    made[1].counted = lambda: model(tokens)
    return made


def alias_patterns(x: torch.Tensor) -> torch.Tensor:
    """Views that share a storage: whole, transposed, strided, overlapping, expanded, of another type."""
    a = x.sin()
    b = a * a + a.t() * a
    c = b[::2].cos() * b[1::2].exp().clamp(max=10)
    d = a.diagonal() * a[0] + a[1:, :-1].sum(0).sin().sum() * a[0].sin()
    e = a[:1].expand(8, -1) * b[:8].sigmoid()
    f = torch.view_as_complex(a.reshape(-1, 2).contiguous().cos())
    f = (f * f.conj()).real.sqrt()
    windows = a.flatten().as_strided((a.shape[0], a.shape[1]), (a.shape[1] - 1, 1)).tanh()
    parts = [part.square() * part for part in b.chunk(4, 1)]
    return sum((t.float().mean() for t in (c, d, e, f, windows, *parts)), x.new_zeros(()))


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def check(machine: Machine, disk: Path | None, tiny: bool, allows: Any) -> list[dict[str, Any]]:
    """One entry for each program and way. ``equal`` is None where the program differs by itself."""
    found: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack, deterministic():
        folder = disk or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        # Less than the programs save, so that files are used.
        behind = {
            "to": folder,
            "allow_tmpfs": True,
            "max_host_bytes": (1 << 20) if tiny else (32 << 20),
        }
        ways: dict[str, dict[str, Any]] = {
            "host": {"to": "host", **EXACT},
            "host, group_swap": {"to": "host", "group_swap": True, **EXACT},
            "host, some in flight": {
                "to": "host",
                "min_bytes": 0,
                "keep_last_bytes": 4096,
                "in_flight_bytes": (64 << 10) if tiny else (64 << 20),
            },
            "disk behind host": {**behind, **EXACT},
            "disk behind host, group_swap": {**behind, "group_swap": True, **EXACT},
        }
        for program in programs(machine, tiny):
            if not allows(0, f"correctness of {program.name}"):
                continue
            expected = _bits(program.step(contextlib.nullcontext))
            repeatable = _equal(_bits(program.step(contextlib.nullcontext)), expected)
            for way, options in ways.items():
                entry = {"program": program.name, "way": way}
                entry |= _check_one(machine, program, options, expected, repeatable)
                found.append(entry)
    return found


def _check_one(
    machine: Machine,
    program: Program,
    options: dict[str, Any],
    expected: list[torch.Tensor],
    repeatable: bool,
) -> dict[str, Any]:
    machine.clean()  # room that an earlier one has taken would be used before a disk
    tide = ebb.offload(program.model, device=machine.type, **options)
    machine.races()
    equal = True
    for _ in range(2):  # the second finds memory that the first has used
        equal &= _equal(_bits(program.step(lambda: tide)), expected)
    stats = _settled(tide)
    entry: dict[str, Any] = {
        "equal": bool(equal) if repeatable else None,
        # What is still in flight when it is asked for is not loaded.
        "moved": stats.d2h_bytes > 0 and (stats.h2d_bytes > 0 or options["in_flight_bytes"] > 0),
        "d2h_bytes": stats.d2h_bytes // 2,
        "h2d_bytes": stats.h2d_bytes // 2,
        "union_bytes": None,
        "spilled_bytes": stats.spilled_bytes,
        "races": machine.races(),
        "at_rest": (stats.entries, stats.device_bytes, stats.host_bytes) == (0, 0, 0),
    }
    # Where room must be made on the way, some storages are asked for before they have left.
    if program.counted is not None and options["to"] == "host" and options["in_flight_bytes"] == 0:
        entry["union_bytes"] = count(program, machine)
    return entry


def _settled(tide: ebb.Offload) -> Any:
    """Autograd's thread lets go of a graph a moment after the caller goes on."""
    deadline = time.monotonic() + _SETTLES_S
    while True:
        tide.synchronize()
        stats = tide.stats()
        if stats.entries == 0 or time.monotonic() > deadline:
            return stats
        time.sleep(0.002)


def count(program: Program, machine: Machine) -> int:
    assert program.counted is not None and program.model is not None
    weights = [*program.model.parameters(), *program.model.buffers()]
    return union_bytes(program.counted, weights, machine.type)


def failures(found: list[dict[str, Any]]) -> list[str]:
    """What makes every measurement worthless, in words."""
    wrong = []
    for entry in found:
        where = f"{entry['program']}, {entry['way']}"
        if entry["equal"] is False:
            wrong.append(f"{where}: gradients differ from those without Ebbtide")
        if not entry["moved"]:
            wrong.append(f"{where}: nothing moved, so nothing was checked")
        if entry["races"]:
            wrong.append(f"{where}: {entry['races']} accesses without an order")
        if not entry["at_rest"]:
            wrong.append(f"{where}: something is held after backward")
    if not any(entry["equal"] for entry in found):
        wrong.append("no program gives the same bits twice without Ebbtide: nothing was compared")
    for way in dict.fromkeys(entry["way"] for entry in found if "disk" in entry["way"]):
        if not any(entry["spilled_bytes"] for entry in found if entry["way"] == way):
            wrong.append(f"{way}: no byte went on to the disk")
    return wrong


def traffic_failures(found: list[dict[str, Any]]) -> list[str]:
    """Where more or less moved than was saved: to be looked into, and no reason not to go on."""
    wrong = []
    for entry in found:
        out, back, union = entry["d2h_bytes"], entry["h2d_bytes"], entry["union_bytes"]
        if union is not None and not out == back == union:
            where = f"{entry['program']}, {entry['way']}"
            wrong.append(f"{where}: {out} bytes out and {back} back, where {union} were saved")
    return wrong


def _bits(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t.detach().contiguous().cpu().reshape(-1).view(torch.uint8) for t in tensors]


def _equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
