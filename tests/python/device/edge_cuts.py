"""Takes one ordering edge out of the session for a while: each in the one place where it is carried out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ebbtide._core import CommandKind, Hop
from ebbtide.session import Session
from ebbtide.torch.streams import TorchStreams
from ebbtide.transfers import _COMMANDS, Transfers

OFFLOAD, LOAD, SPILL, FETCH = int(Hop.OFFLOAD), int(Hop.LOAD), int(Hop.SPILL), int(Hop.FETCH)
WAIT, RELEASE_RESTORED = int(CommandKind.WAIT), int(CommandKind.RELEASE_RESTORED)

Cut = contextlib.AbstractContextManager[None]


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    own = name in vars(owner)  # else its base class has it
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


@contextlib.contextmanager
def command_replaced(kind: CommandKind, carry_out: Callable[..., None]) -> Iterator[None]:
    """``carry_out(original, transfers, command)`` in place of what a command does."""
    before = _COMMANDS.get(int(kind))
    original = before or Transfers.carry_out
    _COMMANDS[int(kind)] = lambda transfers, command: carry_out(original, transfers, command)
    try:
        yield
    finally:
        del _COMMANDS[int(kind)]
        if before is not None:
            _COMMANDS[int(kind)] = before


def is_default(streams: Any, stream: int) -> bool:
    return streams._stream(stream).stream_id == 0


def ordered(
    hop: int, change: Callable[[Any], tuple[list[int], list[int]]]
) -> contextlib.AbstractContextManager[None]:
    """Copies of this direction come after the events and the copies that ``change`` says."""

    def carry_out(original: Callable[..., None], transfers: Transfers, command: Any) -> None:
        original(transfers, command.ordered(*change(command)) if command.hop == hop else command)

    return command_replaced(CommandKind.COPY, carry_out)


def no_events(hop: int) -> Cut:
    """Copies of this direction wait for no event."""
    return ordered(hop, lambda command: ([], command.after_copies))


@contextlib.contextmanager
def events_of_default_stream_only() -> Iterator[None]:
    """Offloads wait for the events of one stream, however many had to do with the storage."""
    of_default: dict[int, bool] = {}

    def record(original: Callable[..., None], transfers: Transfers, command: Any) -> None:
        of_default[command.event] = is_default(transfers._streams, command.stream)
        original(transfers, command)

    def change(command: Any) -> tuple[list[int], list[int]]:
        return [event for event in command.after if of_default[event]], command.after_copies

    with command_replaced(CommandKind.RECORD, record), ordered(OFFLOAD, change):
        yield


def no_copies_before(hop: int) -> Cut:
    """Copies of this direction do not wait for those that write what they read."""
    return ordered(hop, lambda command: (command.after, []))


def leads_to_device(streams: TorchStreams, stream: int) -> bool:
    """Of a stream for copies."""
    return any(of == stream and up for (_, up), of in streams._copy_streams.items())


@contextlib.contextmanager
def done_at_once(hop: int) -> Iterator[None]:
    """Copies of this direction are reported as done while they are queued."""
    issue, done, synchronize = TorchStreams.issue, TorchStreams.done, TorchStreams.synchronize
    queued: list[torch.Event] = []

    def is_queued(event: torch.Event) -> bool:
        return any(event is of for of in queued)

    def noted(
        self: TorchStreams, stream: int, after: Any, copies: Any, event: Any = None
    ) -> torch.Event:
        event = issue(self, stream, after, copies, event)
        if leads_to_device(self, stream) == (hop == LOAD):
            queued.append(event)
        return event

    with (
        replaced(TorchStreams, "issue", noted),
        replaced(TorchStreams, "done", staticmethod(lambda e: is_queued(e) or done(e))),
        replaced(
            TorchStreams,
            "synchronize",
            staticmethod(lambda event: None if is_queued(event) else synchronize(event)),
        ),
    ):
        yield


def no_record_stream(which: str) -> Cut:
    """Memory is not kept from reuse: "copying" of the saved storage for the copy that reads it, "saved" of the saved
    storage for a stream, "restored" of a restored storage."""

    def carry_out(original: Callable[..., None], transfers: Transfers, command: Any) -> None:
        if command.stream == 0:
            kind = "copying"
        else:
            kind = "saved" if command.copy == 0 else "restored"
        if kind != which:
            original(transfers, command)

    return command_replaced(CommandKind.RECORD_STREAM, carry_out)


@contextlib.contextmanager
def not_kept_for_streams() -> Iterator[None]:
    """Saved storages are let go of without a thought for the streams that they were saved on."""
    commanded: list[None] = []
    record_stream = TorchStreams.record_stream

    def carry_out(original: Callable[..., None], transfers: Transfers, command: Any) -> None:
        if command.stream == 0 or command.copy != 0:  # no saved storage, or for its copy
            commanded.append(None)
            original(transfers, command)
            commanded.pop()

    def given_out(self: TorchStreams, storage: Any, stream: int) -> None:
        if commanded:
            record_stream(self, storage, stream)

    with (
        replaced(TorchStreams, "record_stream_of", lambda *_: None),
        replaced(TorchStreams, "record_stream", given_out),
        command_replaced(CommandKind.RECORD_STREAM, carry_out),
    ):
        yield


@contextlib.contextmanager
def saved_again_forgotten() -> Iterator[None]:
    """The allocator is told neither by the command nor by the save."""
    with (
        replaced(TorchStreams, "record_stream_of", lambda *_: None),
        no_record_stream("restored"),
    ):
        yield


@contextlib.contextmanager
def readers_forgotten() -> Iterator[None]:
    with not_kept_for_streams(), events_of_default_stream_only():
        yield


def no_stream_waits(by_default_stream: bool) -> Cut:
    """The default stream, or any other, does not wait for copies."""

    def carry_out(original: Callable[..., None], transfers: Transfers, command: Any) -> None:
        streams = transfers._streams
        if command.stream == 0 or is_default(streams, command.stream) != by_default_stream:
            original(transfers, command)

    return command_replaced(CommandKind.WAIT, carry_out)


@contextlib.contextmanager
def no_wait_before_release() -> Iterator[None]:
    """Restored storages that a dropped ticket or the end of a pass lets go of are not waited for."""
    inside: list[None] = []
    unpack = Session.unpack

    def unpacking(*args: Any) -> Any:
        inside.append(None)
        try:
            return unpack(*args)
        finally:
            inside.pop()

    def carry_out(original: Callable[..., None], transfers: Transfers, command: Any) -> None:
        if inside or command.stream == 0:
            original(transfers, command)

    with (
        replaced(Session, "unpack", unpacking),
        command_replaced(CommandKind.WAIT, carry_out),
    ):
        yield


def within_device_elsewhere(hop: int) -> Cut:
    """Gathers (of offloads) or scatters (of loads) run on a stream of their own."""
    issue = TorchStreams.issue
    strays: list[torch.Stream] = []

    def elsewhere(
        self: TorchStreams, stream: int, after: Any, copies: Any, event: Any = None
    ) -> torch.Event:
        event = issue(self, stream, after, [], event)
        for dst, src in copies:
            strayed = leads_to_device(self, stream) == (hop == LOAD)
            if not strayed or dst.is_cpu or src.is_cpu:
                event = issue(self, stream, [], [(dst, src)])
                continue
            if not strays:
                strays.append(torch.Stream(device=dst.device))
            with strays[0]:
                dst.copy_(src, non_blocking=True)
        return event

    return replaced(TorchStreams, "issue", elsewhere)


def staging_of_the_default_stream() -> Cut:
    """Staging goes back to another stream than the one whose copies use it."""
    original = TorchStreams.staging

    def staging(self: TorchStreams, nbytes: int, device: int) -> torch.Tensor:
        with torch.Stream(stream_id=0, device_index=device, device_type=20):
            return original(self, nbytes, device)

    return replaced(TorchStreams, "staging", staging)


def fetches_done_at_once() -> Cut:
    """What comes back from disk is reported as there before it is read."""

    def carry_out(original: Callable[..., None], transfers: Transfers, command: Any) -> None:
        if command.hop == FETCH:
            transfers.run(transfers.engine.completed(command.copy, True, []))
        original(transfers, command)

    return command_replaced(CommandKind.COPY, carry_out)
