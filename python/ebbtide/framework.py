"""What Ebbtide needs from a tensor framework: one protocol, implemented once per framework.

The session calls nothing of a framework but this. ``Tensor``, ``Storage``, ``Weak`` and ``Witness`` are the framework's
own objects and opaque to the session.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from ebbtide._core import KeepReason

Tensor = Any
Storage = Any
Weak = Any
Witness = Any


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


class Weights(Protocol):
    """The parameters and buffers of a model, recognised by storage."""

    def refresh(self) -> None:
        """Walk the model again; called at each entry of the context."""

    def holds(self, storage: Storage) -> bool:
        """Whether a weight lives in this storage."""


class Framework(Protocol):
    """One tensor framework. Methods are called with the GIL held, from any thread, and take no locks."""

    device_type: str

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

    def weak(self, storage: Storage) -> Weak:
        """A reference that keeps the identity from being issued again, not the memory."""

    def lock(self, weak: Weak) -> Storage | None:
        """The storage if it is still alive."""

    def holders(self, held: list[Storage]) -> int:
        """Who holds the last storage of ``held`` besides that list; 0 where the framework cannot tell."""

    def allocate(self, nbytes: int, residue: int, device: int) -> Storage:
        """New memory whose address is ``residue`` modulo 512. Raises MemoryError when there is none."""

    def current_stream(self, device: int) -> int:
        """The stream that work is now issued on; 0 for memory whose work is synchronous."""

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

    def modified_text(self, tensor: Tensor, expected: int, found: int) -> str:
        """The framework's own wording of "modified by an inplace operation"."""

    # --- backward
    def make_view(self, storage: Storage, view: ViewMeta, witness: Witness) -> Tensor:
        """The view on the storage, on the witness's in-place counter."""

    def current_pass(self) -> int:
        """A number > 0 of the backward running on this thread; 0 when none is."""

    def end_of_pass(self, callback: Callable[[], None]) -> None:
        """Call back when the running backward ends, also by an exception. Only called while one runs."""

    def saved_tensor_hooks(
        self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
    ) -> AbstractContextManager[Any]: ...

    def weights(self, model: Any) -> Weights:
        """Index of the model's weights; of none when ``model`` is None. Raises UsageError for other objects."""
