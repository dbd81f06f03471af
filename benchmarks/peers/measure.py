"""One case under one offloader: what came of it, counted by the test device and by `census`."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tide_device import control

from peers.cases import Case, Enter, Scenario
from peers.census import Aliases, Bound, bound, watch_aliases
from peers.offloaders import Offloader

DEVICE = "tide"

# The bound is met by what is less than a hundredth above it; freed is what is freed but for a twentieth.
ABOVE_BOUND = 1.01
FREED = 0.95

_ROUNDS = 3
_TAIL_BYTES = 8192  # what is no more than a case's tail decides nothing
_REST_BYTES = 4096
_SETTLES_S = 2.0
_INPLACE_ERROR = "modified by an inplace operation"


@dataclass(frozen=True)
class Copies:
    d2h_bytes: int = 0
    h2d_bytes: int = 0
    d2h_copies: int = 0
    h2d_copies: int = 0

    def __sub__(self, other: Copies) -> Copies:
        return Copies(
            self.d2h_bytes - other.d2h_bytes,
            self.h2d_bytes - other.h2d_bytes,
            self.d2h_copies - other.d2h_copies,
            self.h2d_copies - other.h2d_copies,
        )


@dataclass
class Round:
    """One step."""

    gradients: list[torch.Tensor | None] = field(default_factory=list)
    error: str = ""
    copies: Copies = field(default_factory=Copies)
    held_bytes: int | None = None
    """Device memory that forward has added; None when it raised."""
    races: list[str] = field(default_factory=list)
    device_bytes: int = 0
    """In use after the step, with no garbage collected."""
    pinned_bytes: int = 0


@dataclass(frozen=True)
class Result:
    """A check is None where its question does not arise: nothing to free, nothing shared, or an
    error that is due."""

    case: str
    offloader: str
    outcome: str
    right: bool = False
    bound: Bound = field(default_factory=Bound)
    copies: Copies = field(default_factory=Copies)
    at_bound: bool = False
    freed_bytes: int = 0
    frees: bool | None = False
    aliases: Aliases = field(default_factory=Aliases)
    keeps_aliases: bool | None = False
    races: Sequence[str] = ()
    no_race: bool = False
    device_leak_bytes: int = 0
    """Growth over all steps."""
    host_leak_bytes: int = 0
    """Growth of page-locked memory in the last step: pools are full by then."""
    at_rest: bool = False

    @property
    def checks(self) -> tuple[bool | None, ...]:
        first = (self.right, self.at_bound, self.frees, self.keeps_aliases)
        return (*first, self.no_race, self.at_rest)

    @property
    def all_at_once(self) -> bool:
        return False not in self.checks


def measure(case: Case, offloader: Offloader) -> Result:
    """In this process, which should be a fresh one: hooks, threads and memory may stay behind."""
    torch.set_num_threads(1)

    def make() -> Scenario:
        return case.make(DEVICE)

    limits = bound(make)
    _settled(0)
    (plain,), _ = _run(make(), contextlib.nullcontext, 1)
    _settled(0)
    scenario = make()
    rounds, before = _run(scenario, offloader.make(scenario.model, DEVICE), _ROUNDS)
    first, last = rounds[0], rounds[-1]
    del scenario

    wrong = [found for found in rounds if not _same(found, plain)]
    copies = first.copies - plain.copies
    freed_bytes = 0
    if first.held_bytes is not None and plain.held_bytes is not None:
        freed_bytes = plain.held_bytes - first.held_bytes
    aliases = _aliases(make(), offloader, limits)
    races = [race for found in rounds for race in found.races]
    device_leak_bytes = last.device_bytes - before
    host_leak_bytes = last.pinned_bytes - rounds[-2].pinned_bytes
    return Result(
        case=case.name,
        offloader=offloader.name,
        outcome=_outcome((wrong or rounds)[0], plain),
        right=not wrong,
        bound=limits,
        copies=copies,
        at_bound=copies.d2h_bytes <= limits.d2h_bytes * ABOVE_BOUND
        and copies.h2d_bytes <= limits.h2d_bytes * ABOVE_BOUND,
        freed_bytes=freed_bytes,
        frees=None
        if plain.error or limits.freeable_bytes <= _TAIL_BYTES
        else freed_bytes >= FREED * limits.freeable_bytes,
        aliases=aliases,
        keeps_aliases=None
        if plain.error or limits.shared_storages == 0
        else aliases.kept == limits.shared_storages,
        races=races,
        no_race=not races,
        device_leak_bytes=device_leak_bytes,
        host_leak_bytes=host_leak_bytes,
        at_rest=device_leak_bytes <= _REST_BYTES and host_leak_bytes <= _REST_BYTES,
    )


def _run(scenario: Scenario, enter: Enter, times: int) -> tuple[list[Round], int]:
    """The steps, and the device memory in use before them."""
    gc.collect()
    gc.disable()
    torch.accelerator.synchronize()
    before = control.memory().used_bytes
    rounds = [_step(scenario, enter) for _ in range(times)]
    gc.enable()
    return rounds, before


def _step(scenario: Scenario, enter: Enter) -> Round:
    found = Round()
    torch.manual_seed(0)
    torch.accelerator.synchronize()
    control.clear_copies()
    control.clear_races()
    before = control.memory().used_bytes
    forward, gradients = None, []
    try:
        forward = scenario.forward(enter)
        torch.accelerator.synchronize()
        found.held_bytes = control.memory().used_bytes - before
        gradients = scenario.gradients(forward)
    except Exception as error:
        found.error = f"{type(error).__name__}: {error}"
    torch.accelerator.synchronize()
    found.copies = _copies()
    found.races = [f"{race.first} | {race.second}" for race in control.races()]
    found.gradients = [None if each is None else each.cpu() for each in gradients]
    del forward, gradients
    memory = _settled(before)
    found.device_bytes, found.pinned_bytes = memory.used_bytes, memory.pinned_bytes
    return found


def _settled(before: int) -> Any:
    """Autograd's thread lets go of a graph a moment after the caller goes on."""
    torch.accelerator.synchronize()
    deadline = time.monotonic() + _SETTLES_S
    while control.memory().used_bytes > before and time.monotonic() < deadline:
        time.sleep(0.002)
    return control.memory()


def _copies() -> Copies:
    nbytes = {"d2h": 0, "h2d": 0}
    count = {"d2h": 0, "h2d": 0}
    for copy in control.copies():
        if copy.kind.name in nbytes:
            nbytes[copy.kind.name] += copy.nbytes
            count[copy.kind.name] += 1
    return Copies(nbytes["d2h"], nbytes["h2d"], count["d2h"], count["h2d"])


def _aliases(scenario: Scenario, offloader: Offloader, limits: Bound) -> Aliases:
    """In a step of its own: to watch is to hold what was restored. What no hook is given stays
    itself, and with that in its storage."""
    enter = offloader.make(scenario.model, DEVICE)
    torch.manual_seed(0)
    with watch_aliases() as watch:
        try:
            scenario.gradients(scenario.forward(enter))
        except Exception:
            return watch.finish()
    watched = watch.finish()
    split = watched.shared - watched.kept
    return Aliases(limits.shared_storages, limits.shared_storages - split)


def _same(found: Round, plain: Round) -> bool:
    if plain.error or found.error:
        return all(_INPLACE_ERROR in error for error in (found.error, plain.error))
    return all(
        (a is None) == (b is None) and (a is None or b is None or _bits(a) == _bits(b))
        for a, b in zip(found.gradients, plain.gradients, strict=True)
    )


def _bits(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, bytes]:
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    return tensor.shape, tensor.dtype, raw.numpy().tobytes()


def _outcome(found: Round, plain: Round) -> str:
    if _same(found, plain):
        return "raises as plain PyTorch" if plain.error else "equal gradients"
    if found.error:
        return found.error.splitlines()[0]
    return "no error, where plain PyTorch raises" if plain.error else "other gradients"
