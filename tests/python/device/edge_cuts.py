"""Takes one ordering edge out of the session for a while: each in the one place where it is carried out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ebbtide._core import CommandKind, Hop
from ebbtide.session import Session
from ebbtide.stream_copies import Completion, StreamCopies
from ebbtide.torch.streams import TorchStreams
from ebbtide.transfers import _COMMANDS, Transfers

OFFLOAD, LOAD, SPILL, FETCH = int(Hop.OFFLOAD), int(Hop.LOAD), int(Hop.SPILL), int(Hop.FETCH)
WAIT, RELEASE_RESTORED = int(CommandKind.WAIT), int(CommandKind.RELEASE_RESTORED)

Cut = contextlib.AbstractContextManager[None]


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def command_replaced(kind: CommandKind, carry_out: Callable[..., None]) -> Iterator[None]:
    """``carry_out(original, transfers, command)`` in place of what a command does."""
    before = _COMMANDS[int(kind)]
    _COMMANDS[int(kind)] = lambda transfers, command: carry_out(before, transfers, command)
    try:
        yield
    finally:
        _COMMANDS[int(kind)] = before


def is_default(streams: Any, stream: int) -> bool:
    return streams._stream(stream).stream_id == 0


class Changed:
    """A command with other values in some of its fields."""

    def __init__(self, command: Any, **fields: Any) -> None:
        self._command = command
        self.__dict__ |= fields

    def __getattr__(self, name: str) -> Any:
        return getattr(self._command, name)


def _submitting(change: Callable[[StreamCopies, Any], Any]) -> Cut:
    original = StreamCopies.submit

    def submit(self: StreamCopies, command: Any, storages: Any, device: int) -> None:
        original(self, change(self, command), storages, device)

    return replaced(StreamCopies, "submit", submit)


def no_events(hop: int) -> Cut:
    """Copies of this direction wait for no event."""
    return _submitting(
        lambda _, command: Changed(command, after=[]) if command.hop == hop else command
    )


@contextlib.contextmanager
def events_of_default_stream_only() -> Iterator[None]:
    """Offloads wait for the events of one stream, however many had to do with the storage."""
    of_default: dict[int, bool] = {}
    original = StreamCopies.record

    def record(self: StreamCopies, event: int, stream: int) -> None:
        of_default[event] = is_default(self._streams, stream)
        original(self, event, stream)

    def change(copies: StreamCopies, command: Any) -> Any:
        if command.hop != OFFLOAD:
            return command
        return Changed(command, after=[e for e in command.after if of_default[e]])

    with replaced(StreamCopies, "record", record), _submitting(change):
        yield


def no_copies_before(hop: int) -> Cut:
    """Copies of this direction do not wait for those that write what they read."""
    return _submitting(
        lambda _, command: Changed(command, after_copies=[]) if command.hop == hop else command
    )


@contextlib.contextmanager
def done_at_once(hop: int) -> Iterator[None]:
    """Copies of this direction are reported as done while they are queued."""
    ready, pop = StreamCopies.ready, StreamCopies.pop

    def queue_of(copies: StreamCopies) -> Any:
        return next((q for q in copies._queues.values() if q and q[0].hop == hop), None)

    def claim(self: StreamCopies) -> Completion | None:
        if (queue := queue_of(self)) is None:
            return pop(self)
        queued = queue.popleft()
        self._started.pop(queued.copy, None)
        return Completion(queued.copy, queued.hop, queued.storages, None)

    def either(self: StreamCopies) -> bool:
        return queue_of(self) is not None or ready.fget(self)

    with (
        replaced(StreamCopies, "pop", claim),
        replaced(StreamCopies, "ready", property(either)),
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
    with (
        replaced(Transfers, "_keep_for", lambda *_: None),
        no_record_stream("saved"),
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

    def entered(original: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            inside.append(None)
            try:
                original(*args)
            finally:
                inside.pop()

        return call

    def carry_out(original: Callable[..., None], transfers: Transfers, command: Any) -> None:
        if not inside or command.stream == 0:
            original(transfers, command)

    with (
        replaced(Session, "end_pass", entered(Session.end_pass)),
        replaced(Transfers, "run_dropped", entered(Transfers.run_dropped)),
        command_replaced(CommandKind.WAIT, carry_out),
    ):
        yield


@contextlib.contextmanager
def within_device_elsewhere(hop: int) -> Iterator[None]:
    """Gathers (of offloads) or scatters (of loads) run on a stream of their own."""
    hops: list[int] = []
    issue, copy = StreamCopies._issue, TorchStreams.copy
    strays: list[torch.Stream] = []

    def noted(self: StreamCopies, command: Any, storages: Any, device: int) -> None:
        hops.append(command.hop)
        try:
            issue(self, command, storages, device)
        finally:
            hops.pop()

    def elsewhere(self: TorchStreams, dst: torch.Tensor, src: torch.Tensor) -> None:
        if hops[-1] != hop or dst.is_cpu or src.is_cpu:
            return copy(self, dst, src)
        if not strays:
            strays.append(torch.Stream(device=dst.device))
        with strays[0]:
            copy(self, dst, src)

    with (
        replaced(StreamCopies, "_issue", noted),
        replaced(TorchStreams, "copy", elsewhere),
    ):
        yield


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
