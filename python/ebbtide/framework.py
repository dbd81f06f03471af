"""What Ebbtide needs from a tensor framework: one protocol, implemented once per framework.

The session calls nothing of a framework but this. ``Tensor``, ``Storage``, ``Weak`` and ``Witness`` are the framework's
own objects and opaque to the session.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from ebbtide._core import KeepReason

Tensor = Any
Storage = Any
Weak = Any
Witness = Any
Event = Any
Bytes = Any  # memory as a flat tensor of bytes


class StorageRef(NamedTuple):
    """A storage as the engine knows it. ``identity`` is unique while a weak reference to the storage is held."""

    device: int
    identity: int
    address: int
    nbytes: int


class ViewMeta(NamedTuple):
    """How a view reads its storage. ``storage_offset``, ``sizes`` and ``strides`` are in elements.

    ``kind`` is a number that differs between views of equal geometry that are not equal (dtype, conj and neg bits).
    """

    storage_offset: int
    itemsize: int
    kind: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Any


class MemoryUse(NamedTuple):
    """What the framework's allocator tells of a device, by its index: bytes now, and their highest since the user's last
    reset."""

    device: int
    allocated_bytes: int
    peak_bytes: int


class DeviceMemory(Protocol):
    """The counters of an accelerator's allocator. Any thread; nothing here changes a counter or starts a device."""

    def use(self, device: int | None = None) -> MemoryUse | None:
        """Of the device of this index, or that which is current on this thread; None where nothing is known of it."""

    def current_pass(self) -> int:
        """As of ``Framework``."""


class Weights(Protocol):
    """The parameters and buffers of a model, recognised by storage."""

    def refresh(self) -> None:
        """Walk the model again; called at each entry of the context."""

    def holds(self, storage: Storage) -> bool:
        """Whether a weight lives in this storage."""


class Streams(Protocol):
    """Streams, events and copies of a device whose work is asynchronous.

    A stream is a number from 1, the same one for as long as the process lives. Nothing here blocks but ``synchronize``.
    Failures of the device raise the framework's own exceptions.
    """

    def current(self, device: int) -> int:
        """The stream that this thread issues work on."""

    def copy_stream(self, device: int, to_device: bool) -> int:
        """The stream for copies in this direction; one for the whole process."""

    def on(self, stream: int) -> AbstractContextManager[Any]:
        """Issues this thread's work on the stream."""

    def record(self, stream: int, event: Event | None = None) -> Event:
        """An event that is done when all that is queued on the stream by now is: a new one, or the one given, which was
        recorded on this stream before and which nobody waits for any more."""

    def wait(self, stream: int, event: Event) -> None:
        """What is issued on the stream from now on comes after the event."""

    def done(self, event: Event) -> bool: ...

    def synchronize(self, event: Event) -> None:
        """Blocks until the event is done. Other Python threads run meanwhile."""

    def bytes_of(self, storage: Storage) -> Bytes: ...

    def issue(
        self,
        stream: int,
        after: Sequence[Event],
        copies: Sequence[tuple[Bytes, Bytes]],
        event: Event | None = None,
    ) -> Event:
        """On the stream, after the events: copies, in order, the second of each pair into the first. Returns an event
        that is done with them, as ``record`` does. Page-locked and device memory only; the caller keeps it alive until
        then."""

    def staging(self, nbytes: int, device: int) -> Bytes:
        """Device memory for the current stream alone. Dropped, its address is this stream's to use again, in order."""

    def pinned(self, nbytes: int) -> Bytes | None:
        """New page-locked host memory aligned to 64 bytes, or None where there is none."""

    def address(self, memory: Bytes) -> int: ...

    def part_of(self, memory: Bytes, byte_offset: int, nbytes: int) -> Bytes:
        """The same memory; no operation of the user's, and nothing that counts operations sees one."""

    def record_stream(self, storage: Storage, stream: int) -> None:
        """Freed, the storage's memory is not reused before what is queued on the stream by then is done."""

    def record_stream_of(self, tensor: Tensor, stream: int) -> None:
        """The same of a tensor's storage."""

    def unified(self) -> bool:
        """Whether device memory is host memory."""


class Framework(Protocol):
    """One tensor framework. Methods are called with the GIL held, from any thread, and take no locks."""

    device_type: str
    streams: Streams | None  # None: memory whose work is synchronous
    memory: DeviceMemory | None  # None: memory that nobody counts
    # Storages saved last that are held for their later views to be recognised by, while a group or the context runs. 0
    # where a weak reference keeps a storage's identity.
    keep_last_storages: int

    # --- what a tensor is
    def keep_reason(self, tensor: Tensor, weights: Weights) -> KeepReason | None:
        """Why the tensor must stay on the device, or None. Reads no raw pointer of a tensor that has none."""

    def nbytes(self, tensor: Tensor) -> int:
        """Elements times itemsize; 0 where the tensor cannot tell."""

    def view_meta(self, tensor: Tensor) -> ViewMeta: ...

    def is_region_input(self) -> bool:
        """Whether the tensor being packed is an input of a checkpointed region. Called from pack's caller's frame."""

    # --- storages
    def storage(self, tensor: Tensor) -> Storage:
        """The storage; the returned object keeps it alive."""

    def storage_bytes(self, tensor: Tensor) -> int:
        """Bytes of the whole storage, whatever the tensor views of it."""

    def storage_ref(self, storage: Storage) -> StorageRef: ...

    def address(self, storage: Storage) -> int:
        """That of ``storage_ref``, alone."""

    def unmoved(self, storage: Storage, ref: StorageRef) -> bool:
        """Whether the storage, which ``ref`` was taken from, still has that address and size."""

    def weak(self, storage: Storage) -> Weak:
        """A reference that keeps the identity from being issued again, not the memory."""

    def lock(self, weak: Weak) -> Storage | None:
        """The storage if it is still alive."""

    def holders(self, held: list[Storage]) -> int | None:
        """Who holds the last storage of ``held`` besides that list; None where the framework cannot tell."""

    def allocate(self, nbytes: int, residue: int, device: int) -> Storage:
        """New memory whose address is ``residue`` modulo 512, on the current stream. Raises MemoryError when there is
        none."""

    # --- in-place counters
    def version(self, tensor: Tensor) -> int:
        """The in-place counter of a tensor, kept alias or witness."""

    def witness(self, tensor: Tensor) -> Witness:
        """Shares the tensor's in-place counter and holds neither its memory nor its graph."""

    def counter_owner(self, tensor: Tensor) -> Any:
        """A weakly referencable object; tensors with the same owner share one in-place counter."""

    def replaceable(self, tensor: Tensor) -> bool:
        """Whether the graph would hold the tensor object itself, and so see data that its owner puts in later."""

    def keep(self, tensor: Tensor, reason: KeepReason) -> Tensor:
        """What to hold so that the tensor stays, without a reference cycle through the graph."""

    def modified_text(
        self, tensor: Tensor, view: ViewMeta | None, where: str, expected: int, found: int
    ) -> str:
        """The framework's own wording of "modified by an inplace operation", with dtype, shape and both values of the
        counter. Of a kept tensor, or of the witness of what ``view`` describes; ``where`` it was saved, in words."""

    # How to find out which operation saved a tensor that was modified, in words; empty where there is no way.
    modified_hint: str

    # --- backward
    def recomputes(self) -> bool:
        """Whether the tensor being unpacked is an input of a checkpointed region, which runs again next. Called from
        unpack's caller's frame, where there is ``memory``."""

    def make_view(self, storage: Storage, view: ViewMeta, witness: Witness) -> Tensor:
        """The view on the storage, on the witness's in-place counter."""

    def current_pass(self) -> int:
        """A number > 0 of the backward running on this thread; 0 when none is."""

    def end_of_pass(self, callback: Callable[[], None]) -> None:
        """Call back when the running backward ends, also by an exception. Only called while one runs."""

    def finish_queued(self) -> None:
        """Blocks until the host has done what the framework queued there: a backward that has returned then holds nothing."""

    def saved_tensor_hooks(
        self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
    ) -> AbstractContextManager[Any]: ...

    def run_inside(self, model: Any, context: Callable[[], AbstractContextManager[Any]]) -> None:
        """From now on each forward of the model runs inside a context of its own. Names of weights stay. Raises UsageError
        for other objects."""

    def watch_blocks(
        self, model: Any, begin: Callable[[str], None], end: Callable[[str], None]
    ) -> Callable[[], None]:
        """Calls back with a block's name around the forward of each repeated block of the model, until the returned
        function is called."""

    def weights(self, model: Any) -> Weights:
        """Index of the model's weights; of none when ``model`` is None. Raises UsageError for other objects."""
