"""What a behaviour test needs of a tensor framework on one device and one tier.

Tests are written against this protocol and run for every backend that `conftest.py` lists. Tensors are
the framework's own and opaque to the tests; a program is a function from leaves to one output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

Tensor = Any
Program = Callable[..., Tensor]
Step = tuple[Any, ...]  # name of a view operation and its arguments


class Layout(NamedTuple):
    """How a tensor reads its storage. Offset, sizes and strides are in elements."""

    dtype: str
    storage_offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    device: str
    conj: bool
    neg: bool


class Pass(Protocol):
    """A forward that has run and whose backward has not."""

    output: Tensor

    def gradients(self, retain: bool = False) -> list[Tensor | None]:
        """Backward from ones: the gradients of the leaves. Without ``retain`` the graph is freed."""


class Network(NamedTuple):
    """A model of the framework's own modules."""

    model: Any  # what `offload` takes
    weights: list[Tensor]  # parameters, to differentiate by
    run: Callable[[Tensor], Tensor]


class Backend(Protocol):
    name: str
    device: str
    tier: str
    # The options under which byte and copy counts are exact.
    exact: dict[str, Any]
    # Whether storages are loaded on a guess: where the guess is wrong, more comes back than is needed.
    prefetches: bool
    # Whether small storages cross together, once the context is left: the same bytes in fewer copies.
    packs: bool
    # Whether the last few storages are copied when the context is left and not before.
    waits: bool
    # Whether it is known that somebody holds a view of a storage, and not only the tensor that was saved: then what others
    # hold is not copied, and is found again alive.
    counts_holders: bool

    def begin(self) -> None:
        """Before a test."""

    def require(self, what: str) -> None:
        """Skips the test where this backend has no such thing: "host memory" (that others may describe and write to),
        "sparse tensors", "nested tensors", "quantized tensors", "kernels that save views",
        "second derivatives of slices"."""

    def hide_use_counts(self, monkeypatch: Any) -> None:
        """For the rest of the test, nobody knows who else holds a storage."""

    def expect_torn_copies(self) -> None:
        """The test writes to what may just be copied out; such a copy must not be used."""

    def settle(self) -> None:
        """Until all that the device was asked for is done."""

    def end(self) -> None:
        """After a test: fails where the device has seen something that a result need not show."""

    def offload(self, model: Any = None, **options: Any) -> Any:
        """An ``Offload`` to this backend's tier: ``exact``, overridden by ``options``."""

    # --- tensors: equal seeds give equal bits
    def leaf(self, *sizes: int, dtype: str = "float64", seed: int = 0) -> Tensor:
        """A tensor to differentiate by."""

    def tensor(self, *sizes: int, dtype: str = "float32", seed: int = 0) -> Tensor:
        """A fresh storage with random bits, NaNs among them; not differentiated."""

    def op(self, name: str, *tensors: Any, **options: Any) -> Tensor:
        """A differentiable operation whose result has a storage of its own."""

    def view(self, tensor: Tensor, *steps: Step) -> Tensor:
        """A chain of view operations: ``view(x, ("transpose", 0, 1), ("narrow", 0, 1, 3))``."""

    def save(
        self,
        anchor: Tensor,
        tensors: Sequence[Tensor],
        *,
        restored: list[Tensor] | None = None,
        reads: int = 1,
        peek: int | None = None,
    ) -> Tensor:
        """Equals ``anchor``; saves ``tensors`` for backward.

        Backward asks for them ``reads`` times, appends them to ``restored`` and multiplies the
        gradient by a number that depends on every bit of them; with ``peek``, of the first
        ``peek`` elements of each dimension.
        """

    def square(self, x: Tensor) -> Tensor:
        """``x * x`` by a node that saves ``x`` as it is, strides and all, and can be differentiated twice."""

    def around(self, array: Any) -> Tensor:
        """A tensor on the memory of a numpy array of the user's."""

    def numpy(self, tensor: Tensor) -> Any:
        """The tensor's memory as an array."""

    def network(self, width: int = 8, seed: int = 0) -> Network:
        """Two linear layers of a model; between them GELU and layer normalisation."""

    # --- running
    def recording(self) -> AbstractContextManager[Any]:
        """What runs inside is differentiable. `forward` does this by itself."""

    def no_grad(self) -> AbstractContextManager[Any]:
        """What runs inside is not."""

    def gradients(
        self,
        output: Tensor,
        tensors: Sequence[Tensor],
        *,
        retain: bool = False,
        record: bool = False,
    ) -> list[Tensor | None]:
        """Backward from ones. ``record``: it is differentiable itself, and the graph stays."""

    def forward(self, program: Program, leaves: Sequence[Tensor], tide: Any = None) -> Pass:
        """Run the program; with ``tide``, inside its context."""

    # --- looking
    def bits(self, tensor: Tensor) -> bytes:
        """The elements in order of index, as bytes."""

    def layout(self, tensor: Tensor) -> Layout: ...

    def storage_nbytes(self, tensor: Tensor) -> int: ...

    def same_storage(self, *tensors: Tensor) -> bool:
        """Whether all are views of one storage."""

    def address(self, tensor: Tensor) -> int:
        """Of the first element."""

    def version(self, tensor: Tensor) -> int:
        """The in-place counter."""

    def write(self, tensor: Tensor, seed: int = 1, counted: bool = True) -> None:
        """New bits in place; not ``counted``: in a way that no in-place counter sees."""
