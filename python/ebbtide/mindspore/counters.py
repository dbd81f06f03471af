"""In-place counters of MindSpore tensors, and whether anybody still holds a tensor.

MindSpore has no weak reference to a tensor, and every alias that shares a tensor's in-place counter also holds its
graph, and so the ticket that would hold the alias: a cycle that nobody collects. So the alias belongs to the tensor, as
its user data; it lives as long as the tensor does, which holds that graph anyway.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import numpy as np
from mindspore import Tensor

_KEY = "ebbtide"

_nothing = Tensor(np.zeros((1,), np.float32))


class Counter:
    """The in-place counter of a saved tensor. Holds neither its memory nor, outside the context, its graph.

    Inside the context it sees every write. Later it sees what is written while the tensor itself is held; a write
    through a view that outlived the tensor is not seen.
    """

    __slots__ = ("__weakref__", "_alias", "_first", "_last", "_mark")

    def __init__(self, alias: Tensor, mark: Mark) -> None:
        self._alias: Tensor | None = alias
        self._mark: weakref.ref[Mark] | None = weakref.ref(mark)
        self._first = self._last = int(alias._version)

    @property
    def _version(self) -> int:
        alias = self._alias
        if alias is None:
            mark = None if self._mark is None else self._mark()
            alias = None if mark is None else mark.alias
            if alias is None:
                return self._last
        self._last = int(alias._version)
        if self._last != self._first:
            self._stop()
        return self._last

    def is_at(self, version: int) -> bool:
        """Whether it has not moved, and will tell when it does."""
        return self._mark is not None and self._first == version

    def _stop(self) -> None:
        # From a tensor that was written to, its graph now leads to the one before, which the alias holds.
        mark = None if self._mark is None else self._mark()
        self._mark = self._alias = None
        if mark is not None:
            mark.alias = None

    def leave_context(self) -> None:
        if self._version == self._first:
            self._alias = None

    def end_of_tensor(self, version: int) -> None:
        self._last = version


class Mark:
    """User data of a tensor that was saved: ends with it, whoever else holds its memory."""

    __slots__ = ("__weakref__", "alias", "counter")

    def __init__(self, tensor: Tensor) -> None:
        alias = Tensor._make_subclass(Tensor, tensor)
        alias.data = _nothing  # in place of the memory
        self.alias: Tensor | None = alias
        self.counter = Counter(alias, self)

    def __del__(self) -> None:
        if (alias := getattr(self, "alias", None)) is not None:
            self.counter.end_of_tensor(int(alias._version))


class _Contexts(threading.local):
    def __init__(self) -> None:
        self.counters: list[weakref.WeakSet[Counter]] = []  # of each context that is entered


_contexts = _Contexts()
_left: weakref.WeakSet[Counter] = weakref.WeakSet()


def enter() -> None:
    _contexts.counters.append(weakref.WeakSet())


def leave() -> None:
    for counter in list(_contexts.counters.pop()):
        counter.leave_context()
        _left.add(counter)


def drop_moved() -> None:
    """What was written to since its context was left is over: lets go of what it would keep."""
    for counter in list(_left):
        counter._version  # noqa: B018


def mark_of(tensor: Tensor) -> Mark:
    found = tensor._get_user_data(_KEY)
    if type(found) is Mark and found.counter.is_at(tensor._version):
        return found
    mark = Mark(tensor)
    tensor._set_user_data(_KEY, mark)
    if contexts := _contexts.counters:
        contexts[-1].add(mark.counter)
    return mark


def plain_alias(tensor: Tensor) -> Tensor:
    """The tensor's memory without its graph; ``version_of`` finds the tensor's in-place counter by it."""
    counter = mark_of(tensor).counter
    copy = Tensor._make_subclass(Tensor, tensor)
    copy._set_user_data(_KEY, None)  # which copies take along
    alias = copy.data
    alias._set_user_data(_KEY, counter)
    return alias


def version_of(tensor: Any) -> int:
    """Of a tensor, of an alias from ``plain_alias``, or of a counter."""
    if type(tensor) is Counter:
        return tensor._version
    found = tensor._get_user_data(_KEY)
    return int((found if type(found) is Counter else tensor)._version)
