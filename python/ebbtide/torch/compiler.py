"""Keeps ``torch.compile`` out of Ebbtide's own code.

Autograd calls the hooks while a compiled function may still be traced frame by frame; what they do (raw addresses,
reference counts) cannot be traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import torch


def leave_alone(functions: Iterable[Callable[..., Any]]) -> None:
    """Run these functions, and what they call, as plain Python, also inside compiled code.

    As ``torch.compiler.disable`` does, without importing the compiler. Without the private names of torch that it takes
    (they are probed), compiled code under the context may raise a TypeError.
    """
    functions = tuple(functions)
    for function in functions:
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
    skip_frames(functions)


def methods(of: type) -> list[Callable[..., Any]]:
    """Those that are written in Python and stand in the class itself."""
    return [found for found in vars(of).values() if isinstance(found, FunctionType)]


def skip_frames(functions: Iterable[Callable[..., Any]]) -> None:
    """Run these functions, and what they call, as plain Python where plain Python calls them.

    What is traced already goes on through them; ``torch.compiler.is_compiling()`` tells the two apart.
    """
    eval_frame: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    action = getattr(eval_frame, "_FrameAction", None)
    if action is None or not hasattr(eval_frame, "set_code_exec_strategy"):
        return
    strategy = eval_frame._FrameExecStrategy(action.SKIP, action.SKIP)
    for function in functions:
        eval_frame.set_code_exec_strategy(function.__code__, strategy)
