"""Regions that are recomputed: their arguments as the framework can show them to hooks, and what in them is not
recomputed."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ebbtide.framework import Tensor
from ebbtide.hyper_parallel.groups import current
from ebbtide.modules import Modules, name_of
from ebbtide.peaks import Recomputation


class _Leaf:
    """The place of a tensor in nested arguments."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


_LISTS = (list, tuple)
_DICTS = (dict, OrderedDict)
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


class Nested:
    """Tensors in lists, tuples and dicts: the containers, which are made anew with other tensors, and the tensors.

    ``is_plain``: there is nothing else in them that tensors could be in.
    """

    def __init__(self, tree: Any, modules: Modules) -> None:
        self.is_plain = True
        self._modules = modules
        self._tensors: list[Tensor] = []
        self._spec = self._flatten(tree)

    def take_tensors(self) -> tuple[Tensor, ...]:
        """Once: they are not held any more."""
        tensors, self._tensors = tuple(self._tensors), []
        return tensors

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        return _fill(self._spec, tensors)

    def _flatten(self, tree: Any) -> Any:
        if self._modules.is_tensor(tree):
            self._tensors.append(tree)
            return _Leaf(len(self._tensors) - 1)
        kind: Any = type(tree)
        if kind in _LISTS or _is_named(tree):
            items = [self._flatten(item) for item in tree]
            return kind(items) if kind in _LISTS else kind._make(items)
        if kind in _DICTS:
            return kind((key, self._flatten(item)) for key, item in tree.items())
        self.is_plain = self.is_plain and kind in _PLAIN
        return tree


def _fill(spec: Any, tensors: Sequence[Tensor]) -> Any:
    kind: Any = type(spec)
    if kind is _Leaf:
        return tensors[spec.number]
    if kind in _LISTS or _is_named(spec):
        items = [_fill(item, tensors) for item in spec]
        return kind(items) if kind in _LISTS else kind._make(items)
    if kind in _DICTS:
        return kind((key, _fill(item, tensors)) for key, item in spec.items())
    return spec


def _is_named(tree: Any) -> bool:
    return isinstance(tree, tuple) and hasattr(type(tree), "_make")


class Region:
    """One call of a function that the framework runs again in backward. Called by it, first with the original arguments.

    With ``flatten`` the tensors in nested arguments become arguments of their own, ``take_tensors()``: frameworks show
    hooks only those. Tensors in other objects than lists, tuples and dicts stay where they are.
    """

    def __init__(
        self,
        modules: Modules,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        flatten: bool,
    ) -> None:
        self._modules = modules
        self._peak: Recomputation | None = None  # dropped with the region
        self._function = function
        group = current.get()
        self._group_name = None if group is None else group.group.name
        self.recomputing = False
        self._began = False
        self.hooks = modules.current_hooks()
        self.excluded: list[Any] = []  # what excluded modules gave in forward, in order
        self._served = 0
        self.nested = Nested((args, kwargs), modules) if flatten else None
        self._original = (args, kwargs) if flatten else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.nested is not None:
            # What is held for the recomputation is what hooks were shown, not the originals.
            original, self._original = self._original, None
            args, kwargs = self.nested.filled(args) if original is None else original
            del original
        self.recomputing, self._began, self._served = self._began, True, 0
        memory = self._modules.memory
        if self.recomputing and memory is not None:
            name = self._group_name or self.name
            self._peak = Recomputation(memory, name)
        _here.regions.append(self)
        try:
            return self._function(*args, **kwargs)
        finally:
            _here.regions.pop()
            if self._peak is not None:
                self._peak.look()

    @property
    def name(self) -> str:
        return name_of(self._function, self._modules)

    def next_excluded(self) -> Any:
        found = self.excluded[self._served]
        self._served += 1
        return found


class _Here(threading.local):
    def __init__(self) -> None:
        self.regions: list[Region] = []


_here = _Here()


def running_regions() -> list[Region]:
    """That this thread is in, the innermost last."""
    return _here.regions


@contextmanager
def outside_of_regions() -> Iterator[None]:
    """What runs inside is part of no region."""
    regions, _here.regions = _here.regions, []
    try:
        yield
    finally:
        _here.regions = regions
