"""The session's copy streams, run by hand; and what host threads do to page-locked memory, shown to the search for races."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from edge_cuts import FETCH, SPILL, command_replaced

from ebbtide._core import CommandKind, Tier
from ebbtide.torch.framework import _streams
from ebbtide.transfers import Transfers


def copy_stream(to_device: bool, device: int = 0) -> torch.Stream:
    streams = _streams("tide")
    return streams._stream(streams.copy_stream(device, to_device))


def run_all(control: Any, stream: torch.Stream) -> None:
    while control.step(stream):
        pass


def each_copy_at_once(control: Any) -> contextlib.AbstractContextManager[None]:
    """Copies run as soon as order allows; else a copy is held back until something needs it."""

    def carry_out(original: Callable[..., None], transfers: Transfers, command: Any) -> None:
        original(transfers, command)
        if number := transfers._stream_copies.stream_of(command.copy):
            run_all(control, transfers._streams._stream(number))

    return command_replaced(CommandKind.COPY, carry_out)


def host_copies_seen(control: Any) -> contextlib.AbstractContextManager[None]:
    """Enters reads and writes of host memory by spills and fetches into the search for races."""

    def carry_out(original: Callable[..., None], transfers: Transfers, command: Any) -> None:
        if command.hop in (SPILL, FETCH):
            for src, dst, nbytes in command.spans(True):
                tier, base, offset = src if command.hop == SPILL else dst
                assert tier == int(Tier.HOST)
                touched = transfers.tiers.pinned.slice(base, offset, nbytes)
                (control.host_reads if command.hop == SPILL else control.host_writes)(touched)
        original(transfers, command)

    return command_replaced(CommandKind.COPY, carry_out)
