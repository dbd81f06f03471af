"""What Ebbtide does itself is no operation of the user's: dispatch modes do not see it, let alone count it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")

_modes_entered = torch._C._len_torch_dispatch_stack


def unobserved(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """The function, hidden from the dispatch modes that are entered where it is called. For plain tensors only:
    subclasses are dispatched by the same means."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not _modes_entered():
            return function(*args, **kwargs)
        with torch._C._DisableTorchDispatch():
            return function(*args, **kwargs)

    return call
