"""Models whose forward runs inside a context."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ebbtide.errors import UsageError


def run_inside(
    model: Any,
    forward: str,
    context: Callable[[], AbstractContextManager[Any]],
    shown: Callable[..., Any] | None = None,
) -> None:
    """Changes the model's class to a subclass whose method ``forward`` runs inside ``context()``.

    Nothing else of the model changes: the method shows the parameters of the one before, and that as ``__wrapped__``; or
    those of ``shown``. Copies, deep or pickled, are of the class it had before. Raises UsageError where it was done
    before.
    """
    original = type(model)
    if getattr(original, "_ebbtide_runs_inside", False):
        raise UsageError(
            f"[offload.wrap] this {original.__name__} is wrapped already: wrap a model once, its parts not at all"
        )

    def inside(self: Any, *args: Any, **kwargs: Any) -> Any:
        with context():
            return getattr(super(wrapped, self), forward)(*args, **kwargs)

    inside.__name__ = forward  # MindSpore looks for the method by it
    inside.__wrapped__ = shown or getattr(original, forward)  # type: ignore[attr-defined]

    def reduce(self: Any, protocol: Any) -> Any:
        _, arguments, *rest = super(wrapped, self).__reduce_ex__(max(2, protocol))
        return _new, (original, *arguments[1:]), *rest

    methods = {
        forward: inside,
        "__reduce_ex__": reduce,
        "__module__": original.__module__,
        "__doc__": original.__doc__,
        "_ebbtide_runs_inside": True,
    }
    wrapped: Any = type(original.__name__, (original,), methods)
    model.__class__ = wrapped


def _new(original: type, *arguments: Any) -> Any:
    return original.__new__(original, *arguments)
