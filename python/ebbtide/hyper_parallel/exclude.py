"""Modules that a checkpointed region does not run again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ebbtide.errors import InplaceModificationError
from ebbtide.framework import Tensor
from ebbtide.hyper_parallel.regions import (
    Nested,
    outside_of_regions,
    running_regions,
)
from ebbtide.hyper_parallel.runtime import modules_for, modules_to_wrap, session_for
from ebbtide.modules import CheckpointExcludeWrapper, Module, Modules, name_of
from ebbtide.session import Kept, Session


def checkpoint_exclude_wrapper(module: Callable[..., Any], *, save_output: bool = True) -> Module:
    """A module that regions of ``checkpoint`` and ``checkpoint_wrapper`` around it do not recompute.

    What autograd saves in it is kept as outside of any region, by the hooks around the region where there are some. Its
    output is saved too, so that the recomputation goes on with it: tensors, also in lists, tuples and dicts. With
    ``save_output=False``, and for other outputs, the module is run again where the recomputation comes past it, but its
    backward does not wait for that: for modules at the end of a region, or whose output is large and cheap.

    Raises UsageError with MindSpore, which has no hooks inside of what it recomputes.
    In backward a RuntimeError is raised where the saved output was written to in place. Regions of the framework's own
    checkpoint know nothing of it and recompute the module.
    """
    modules = modules_to_wrap("checkpoint_exclude_wrapper", module)
    return modules.wrapper(CheckpointExcludeWrapper, module, _Excluded(bool(save_output)))


@dataclass(frozen=True)
class _Excluded:
    """What an exclude wrapper does in forward."""

    save_output: bool

    def __call__(
        self, wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        regions = running_regions()
        if not regions:
            return wrapped(*args, **kwargs)
        modules = modules_for(wrapped, args, kwargs)
        if modules.capturing() or not modules.records():
            return wrapped(*args, **kwargs)
        repeated = next((region for region in regions if region.recomputing), None)
        session = session_for(modules).session
        if repeated is not None:
            output = repeated.next_excluded()
            with _naming(f"the output of {name_of(wrapped, modules)} in region {repeated.name}"):
                tensors = output.saved(session)
            found = output.get(modules, tensors, wrapped, args, kwargs)
        else:
            found, output = self._run(modules, session, wrapped, args, kwargs, regions[0].hooks)
        for region in regions:
            if not region.recomputing:
                region.excluded.append(output)
        return found

    def _run(
        self,
        modules: Modules,
        session: Session,
        wrapped: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        hooks: Any,
    ) -> tuple[Any, _Output]:
        pack, unpack = hooks or (session.keep, session.unpack)
        before = modules.random_state((args, kwargs))
        with outside_of_regions(), modules.excluded(pack, unpack):
            found = wrapped(*args, **kwargs)
        after = modules.random_state((args, kwargs))
        return found, _Output(modules, session, found, self.save_output, before, after)


class _Output:
    """Of an excluded module, for recomputations."""

    def __init__(
        self,
        modules: Modules,
        session: Session,
        found: Any,
        save: bool,
        before: Any,
        after: Any,
    ) -> None:
        nested = Nested(found, modules)
        self._saves = save and nested.is_plain
        tensors = nested.take_tensors()
        self._requires_grad = [modules.requires_grad(tensor) for tensor in tensors]
        self._nested: Nested | None = None
        self._kept: list[Kept] = []
        self._random: Any = None
        if self._saves:
            self._nested = nested
            self._kept = [session.keep(tensor) for tensor in tensors]
            # What is recomputed behind the module must draw what it drew.
            self._random = None if modules.same_random_state(before, after) else after

    def saved(self, session: Session) -> list[Tensor]:
        """Raises InplaceModificationError."""
        return [session.unpack(kept) for kept in self._kept]

    def get(
        self,
        modules: Modules,
        tensors: list[Tensor],
        wrapped: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        nested = self._nested
        if nested is None:
            with outside_of_regions(), modules.excluded(_nothing, _never):
                nested = Nested(wrapped(*args, **kwargs), modules)
            tensors = list(nested.take_tensors())
        elif self._random is not None:
            modules.set_random_state(self._random)
        return nested.filled(
            [
                modules.as_result(tensor, requires_grad)
                for tensor, requires_grad in zip(tensors, self._requires_grad, strict=True)
            ]
        )


@contextmanager
def _naming(what: str) -> Iterator[None]:
    try:
        yield
    except InplaceModificationError as error:
        raise InplaceModificationError(
            f"[checkpoint_exclude_wrapper] {what} was written to in place, and is saved for what is recomputed behind the "
            f"module: write to a copy of it, or use save_output=False, which runs the module again. {error}"
        ) from error


def _nothing(tensor: Tensor) -> None:
    """Nobody goes backward through a module that ran only for its output."""


def _never(saved: None) -> Tensor:
    raise AssertionError("backward through a module that was run again for its output")
