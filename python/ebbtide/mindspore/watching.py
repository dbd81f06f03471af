"""Calls around a cell's construct, also where it raises: MindSpore's own hooks are not called there."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from mindspore import nn

from ebbtide.mindspore.compiling import compiled_as, compiled_construct

_ORIGINAL = "_ebbtide_original"


def watch_construct(
    cell: nn.Cell, before: Callable[[], None], after: Callable[[Any], None]
) -> Callable[[], None]:
    """Calls ``before()`` in front of each construct of the cell and ``after(output)`` behind it, with None where it raised,
    until the returned function is called. The cell's class becomes one that tells; copies are of the class that the user's
    code gave it. MindSpore compiles the construct that was there: nothing is called for what is compiled."""
    original: Any = type(cell)
    unwatched = original_class(cell)

    @compiled_as(compiled_construct(original))
    def construct(self: Any, *args: Any, **kwargs: Any) -> Any:
        inner: Any = super(watched, self)
        if not watches:
            return inner.construct(*args, **kwargs)
        before()
        output = None
        try:
            output = inner.construct(*args, **kwargs)
        finally:
            after(output)
        return output

    def reduce(self: Any, protocol: Any) -> Any:
        inner: Any = super(watched, self)
        call, arguments, *rest = inner.__reduce_ex__(protocol)
        return call, tuple(unwatched if item is watched else item for item in arguments), *rest

    methods = {
        "construct": construct,
        "__reduce_ex__": reduce,
        "__module__": original.__module__,
        "__doc__": original.__doc__,
        _ORIGINAL: unwatched,
    }
    watched: Any = type(original.__name__, (original,), methods)
    watches = [True]
    cell.__class__ = watched
    weak_cell = weakref.ref(cell)

    def remove() -> None:
        watches.clear()
        found = weak_cell()
        if found is not None and type(found) is watched:
            found.__class__ = original

    return remove


def original_class(cell: nn.Cell) -> type:
    """The class that the user's code gave a cell."""
    found: type = getattr(type(cell), _ORIGINAL, type(cell))
    return found
