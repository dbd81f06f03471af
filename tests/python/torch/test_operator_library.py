"""Every differentiable operation that PyTorch describes for its own tests, on the inputs it describes, with Ebbtide and
without: first and second derivatives, and writes in place to what was saved.

The descriptions are part of torch but not of its stable interface; where they cannot be imported the tests are skipped.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import EXACT
from torch.utils import _pytree
from torch_support import same_bits

import ebbtide.torch as ebb

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SAMPLES = 2  # per operation
VARIANTS = pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {"to": "host"}),
        (torch.float64, {"to": "disk", "group_swap": True}),
        (torch.complex64, {"to": "host", "group_swap": True}),
    ],
    ids=["float32-host", "float64-disk-packed", "complex64-host-packed"],
)

# Gradients and outputs, or the error's type.
Outcome = list[torch.Tensor | None] | type[Exception]
Program = Callable[[Any, Any, contextlib.AbstractContextManager[Any]], list[torch.Tensor | None]]


def described(dtype: torch.dtype, wanted: Callable[[Any], bool]) -> Iterator[tuple[Any, Any]]:
    """Operations and inputs of theirs."""
    methods = pytest.importorskip(
        "torch.testing._internal.common_methods_invocations",
        reason="this torch does not describe its operations, or expecttest is missing",
        exc_type=ImportError,
    )
    for operation in methods.op_db:
        if not operation.supports_autograd or not wanted(operation):
            continue
        if dtype not in operation.supported_backward_dtypes("cpu"):
            continue
        samples = operation.sample_inputs("cpu", dtype, requires_grad=True)
        with contextlib.suppress(RuntimeError, NotImplementedError):  # parts torch is built without
            for sample in itertools.islice(samples, SAMPLES):
                yield operation, sample


def copied(sample: Any) -> tuple[list[torch.Tensor], tuple[Any, Any, Any]]:
    """Leaves for the inputs that have gradients, and the inputs as results of an operation, which nobody else holds."""
    leaves = []

    def copy(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        strided = x.layout is torch.strided
        if not x.requires_grad:
            return x.clone() if strided else x
        leaf = x.detach().clone().requires_grad_()
        leaves.append(leaf)
        return leaf.clone() if strided else leaf

    return leaves, _pytree.tree_map(copy, (sample.input, sample.args, sample.kwargs))


def differentiable(outputs: Any) -> list[torch.Tensor]:
    return [
        x
        for x in _pytree.tree_leaves(outputs)
        if isinstance(x, torch.Tensor)
        and x.requires_grad
        and (x.is_floating_point() or x.is_complex())
    ]


def weighed(tensors: list[torch.Tensor]) -> torch.Tensor:
    """A loss to which each element counts differently."""
    total = torch.zeros((), dtype=torch.float64)
    for x in tensors:
        x = x if x.layout is torch.strided else x.to_dense()
        x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
        weights = torch.linspace(0.5, 1.5, x.numel(), dtype=torch.float64)
        total = total + (x.double() * weights.reshape(x.shape)).sum()
    return total


def detached(tensors: Any) -> list[torch.Tensor | None]:
    dense = (x if x is None or x.layout is torch.strided else x.to_dense() for x in tensors)
    return [None if x is None else x.detach() for x in dense]


def derivatives(
    operation: Any, sample: Any, context: contextlib.AbstractContextManager[Any]
) -> list[torch.Tensor | None]:
    """Loss, gradients and, where there are, the gradients of their squares."""
    with context:
        leaves, (x, args, kwargs) = copied(sample)
        outputs = differentiable(operation.op(x, *args, **kwargs))
        del x, args, kwargs
        loss = weighed(outputs)
        del outputs
    if not loss.requires_grad:
        return [loss]
    twice = operation.supports_gradgrad
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True, create_graph=twice)
    found = detached([loss, *gradients])
    again = [x for x in gradients if x is not None and x.requires_grad]
    if again:
        with context:
            loss = weighed([x * x if x.layout is torch.strided else x for x in again])
        found += detached(torch.autograd.grad(loss, leaves, allow_unused=True))
    return found


def written(before: str, after: str) -> Program:
    """The operation's form in place on a tensor that was used ``before``, and the result used ``after``."""

    def program(
        operation: Any, sample: Any, context: contextlib.AbstractContextManager[Any]
    ) -> list[torch.Tensor | None]:
        with context:
            leaves, (x, args, kwargs) = copied(sample)
            saved = x[..., :1] if before == "view" else x
            other = saved.exp() if before == "result" else saved * saved
            squares = other * other if before == "result" else other
            x = operation.inplace_variant(x, *args, **kwargs)
            if after == "written again":
                x = operation.inplace_variant(x, *args, **kwargs)
            loss = weighed([x] if before == "unread" else [x, squares])
            del x, args, kwargs, saved, other, squares
        return detached([loss, *torch.autograd.grad(loss, leaves, allow_unused=True)])

    return program


def outcome(
    program: Program, operation: Any, sample: Any, context: contextlib.AbstractContextManager[Any]
) -> Outcome:
    torch.manual_seed(0)
    try:
        return program(operation, sample, context)
    except Exception as error:
        return type(error)


def agree(a: Outcome, b: Outcome) -> bool:
    if isinstance(a, type) or isinstance(b, type):
        return isinstance(a, type) and isinstance(b, type) and issubclass(b, a)
    pairs = zip(a, b, strict=True)
    return all((x is None and y is None) or same_bits(x, y) for x, y in pairs)


def compare(
    programs: list[Program],
    dtype: torch.dtype,
    options: dict[str, Any],
    wanted: Callable[[Any], bool],
) -> Counter[str]:
    """How many cases were values and errors; that each is the same as without Ebbtide is asserted."""
    seen: Counter[str] = Counter()
    different = []
    tide = ebb.offload(device="cpu", **EXACT, **options)
    for operation, sample in described(dtype, wanted):
        for number, program in enumerate(programs):
            plain, again = (
                outcome(program, operation, sample, contextlib.nullcontext()) for _ in range(2)
            )
            if not agree(plain, again):
                seen["not deterministic"] += 1  # without Ebbtide too
                continue
            seen["error" if isinstance(plain, type) else "values"] += 1
            found = outcome(program, operation, sample, tide)
            if not agree(plain, found):
                name = operation.name, operation.variant_test_name
                different.append((*name, number, sample, plain, found))
    assert not different
    assert tide.stats().h2d_copies > 0
    return seen


@VARIANTS
def test_derivatives(dtype: torch.dtype, options: dict[str, Any]) -> None:
    seen = compare([derivatives], dtype, options, lambda operation: True)
    assert seen["values"] > 400
    assert seen["not deterministic"] < 20


@VARIANTS
def test_writes_that_backward_does_not_mind(dtype: torch.dtype, options: dict[str, Any]) -> None:
    programs = [
        written("result", "read"),
        written("unread", "read"),
        written("unread", "written again"),
    ]
    seen = compare(programs, dtype, options, lambda operation: operation.inplace_variant)
    assert seen["values"] > 200


@VARIANTS
def test_writes_to_what_backward_needs(dtype: torch.dtype, options: dict[str, Any]) -> None:
    programs = [written("itself", "read"), written("view", "read")]
    seen = compare(programs, dtype, options, lambda operation: operation.inplace_variant)
    assert seen["error"] > 100
