"""Runs one piece of work on the CPU and on the test device and compares what comes out, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map


def on_tide(value: Any) -> Any:
    """The same tensors on the device, as leaves where they were leaves that want a gradient."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.detach().to("tide").requires_grad_(leaf.requires_grad)

    return tree_map(move, value)


def assert_same_bits(cpu: Any, tide: Any, what: str) -> None:
    """Values to the last bit (NaNs too), sizes, types and strides; the second on the device."""
    leaves, spec = tree_flatten(cpu)
    tide_leaves, tide_spec = tree_flatten(tide)
    assert spec == tide_spec, what
    for number, (left, right) in enumerate(zip(leaves, tide_leaves, strict=True)):
        where = f"{what}, part {number}"
        if not isinstance(left, torch.Tensor):
            assert left == right, where
            continue
        assert right.device.type == "tide", where
        assert (left.shape, left.dtype) == (right.shape, right.dtype), where
        assert left.stride() == right.stride(), where
        left, right = left.detach().resolve_conj(), right.detach().cpu().resolve_conj()
        if not torch.equal(_bytes(left), _bytes(right)):
            raise AssertionError(f"{where}: {left} and {right} differ")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def gradients_wanted(value: Any) -> list[torch.Tensor]:
    leaves = tree_flatten(value)[0]
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def run(function: Callable[..., Any], inputs: Iterable[Any]) -> tuple[Any, list[Any]]:
    """What the function gives from the same seed, and the gradients of its inputs."""
    inputs = list(inputs)
    torch.manual_seed(7)
    result = function(*inputs)
    wanted = gradients_wanted(inputs)
    outputs = [leaf for leaf in gradients_wanted(result) if leaf.grad_fn is not None]
    if not wanted or not outputs:
        return result, []
    # Not a sum: its gradient would be the same everywhere, and expanded.
    weights = [_weights(output) for output in outputs]
    return result, list(torch.autograd.grad(outputs, wanted, weights, allow_unused=True))


def _weights(output: torch.Tensor) -> torch.Tensor:
    steps = torch.arange(output.numel(), dtype=torch.float64).reshape(output.shape)
    return (torch.sin(steps) + 0.5).to(output.dtype).to(output.device)


def assert_as_on_cpu(function: Callable[..., Any], *inputs: Any) -> None:
    """Results and gradients of `function`, and what it leaves in its inputs."""
    tide_inputs = on_tide(inputs)
    result, gradients = run(function, inputs)
    tide_result, tide_gradients = run(function, tide_inputs)
    assert_same_bits(result, tide_result, "result")
    assert_same_bits(gradients, tide_gradients, "gradient")
    assert_same_bits(list(inputs), list(tide_inputs), "input")
