"""What MindSpore compiles in place of a method that does something around another one: the other one alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, TypeVar

_Method = TypeVar("_Method", bound=Callable[..., Any])


def compiled_as(plain: Callable[..., Any]) -> Callable[[_Method], _Method]:
    """Decorates a method that MindSpore is to compile as ``plain``: its parser reads the source behind ``__wrapped__``.

    Parameters of ``plain`` are those that the method shows.
    """

    def decorate(method: _Method) -> _Method:
        method.__wrapped__ = plain  # type: ignore[attr-defined]
        return method

    return decorate


def compiled_construct(original: type) -> Callable[..., Any]:
    """What to compile for a cell whose class was ``original`` and is now a subclass: the class's own construct.

    Not where that uses ``super()``: MindSpore's parser looks behind the class of the cell, whatever class the method is of,
    and would find the method itself. There it is one that raises ValueError.
    """
    construct: Callable[..., Any] = original.construct  # type: ignore[attr-defined]
    return _refuse if _uses_super(original, construct) else construct


def _refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
    # Read by MindSpore's parser, which knows the builtin exceptions only.
    raise ValueError(
        "[ebbtide] MindSpore cannot compile a cell that tide.wrap or set_forward_prefetch_layer changed and whose construct "
        "uses super(): call it in PyNative mode outside of ms.jit, or compile copy.deepcopy(cell), which is the plain cell"
    )


def _uses_super(cell_class: type, method: Callable[..., Any]) -> bool:
    """Whether the method does, or one of the class that it names."""
    methods, seen = [method], set()
    while methods:
        function = inspect.unwrap(methods.pop())
        if not isinstance(function, FunctionType) or function in seen:
            continue
        seen.add(function)
        for name in _names(function.__code__):
            if name == "super":
                return True
            found = inspect.getattr_static(cell_class, name, None)
            if isinstance(found, FunctionType) and not found.__module__.startswith("mindspore."):
                methods.append(found)
    return False


def _names(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
    return names
