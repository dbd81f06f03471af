"""Forwards and backwards in other orders than one after the other, and writes in between."""

from __future__ import annotations

from collections.abc import Callable

import torch

from peers.cases import (
    Case,
    Enter,
    Forward,
    Save,
    Scenario,
    activation,
    gradients,
    leaf,
    simple,
    tail,
)

_LAYERS = 3


def _layers(x: torch.Tensor) -> torch.Tensor:
    x = activation(x)
    for _ in range(_LAYERS):
        x = activation(x * x).sin()
    return x


def only_forward(device: str) -> Scenario:
    w = leaf(device)

    def forward(enter: Enter) -> Forward:
        loss = None
        for _ in range(4):
            loss = None
            with enter():
                loss = tail(_layers(w))
        assert loss is not None
        return Forward([loss])

    return Scenario(forward, [w])


def dropped_branch(device: str) -> Scenario:
    w = leaf(device)

    def forward(enter: Enter) -> Forward:
        with enter():
            unused = _layers(w)
            y = activation(w).sin()
            del unused
            return Forward([tail(_layers(y))])

    return Scenario(forward, [w])


def _two_forwards(order: tuple[int, int]) -> Callable[[str], Scenario]:
    def make(device: str) -> Scenario:
        leaves = [leaf(device), leaf(device, seed=1)]

        def forward(enter: Enter) -> Forward:
            with enter():
                return Forward([tail(_layers(w)) for w in leaves])

        def backward(forward: Forward) -> list[torch.Tensor | None]:
            found: dict[int, torch.Tensor | None] = {}
            for i in order:
                (found[i],) = gradients(forward.losses[i], [leaves[i]])
            return [found[0], found[1]]

        return Scenario(forward, leaves, backward=backward)

    return make


def two_entries(device: str) -> Scenario:
    w = leaf(device)

    def forward(enter: Enter) -> Forward:
        losses = []
        for scale in (1.0, 2.0):
            with enter():
                losses.append(tail(_layers(w * scale)))
        return Forward(losses)

    return Scenario(forward, [w])


def retain_graph(device: str) -> Scenario:
    w = leaf(device)

    def forward(enter: Enter) -> Forward:
        with enter():
            return Forward([tail(_layers(w))])

    def backward(forward: Forward) -> list[torch.Tensor | None]:
        first = gradients(forward.losses[0], [w], retain_graph=True)
        return first + gradients(forward.losses[0], [w])

    return Scenario(forward, [w], backward=backward)


def create_graph(device: str) -> Scenario:
    w = leaf(device)

    def forward(enter: Enter) -> Forward:
        with enter():
            return Forward([tail(_layers(w))])

    def backward(forward: Forward) -> list[torch.Tensor | None]:
        (first,) = gradients(forward.losses[0], [w], create_graph=True)
        assert first is not None
        return [first.detach(), *gradients(first.square().sum(), [w])]

    return Scenario(forward, [w], backward=backward)


def written_unread(device: str) -> Scenario:
    w = leaf(device)

    def forward(enter: Enter) -> Forward:
        with enter():
            x = activation(w)
            unread = x * x
            x.mul_(2)
            return Forward([tail(_layers(x))], held=[unread])

    return Scenario(forward, [w])


def _written(w: torch.Tensor) -> torch.Tensor:
    x = activation(w)
    y = x * x
    x.add_(1)
    return y + x


def _in_place(w: torch.Tensor) -> torch.Tensor:
    x = activation(w)
    for _ in range(_LAYERS):
        x = activation(x).tanh_()  # saves what it wrote
        x = (x * x).mul_(0.5).sigmoid_()
    return x


def _read_twice(w: torch.Tensor) -> torch.Tensor:
    x = activation(w).detach()
    return Save.apply(w, 2, x, x[1:])


def _make(program: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[str], Scenario]:
    return lambda device: simple(program, device)


_KIND = "life cycle"
CASES = [
    Case(
        _KIND,
        "forward without backward",
        "four forwards, of which only the last has a backward",
        only_forward,
    ),
    Case(_KIND, "dropped branch", "a part of forward whose result nobody uses", dropped_branch),
    Case(
        _KIND,
        "two forwards, first first",
        "both in one context, then both backwards in the same order",
        _two_forwards((0, 1)),
    ),
    Case(
        _KIND,
        "two forwards, last first",
        "both in one context, then both backwards in reverse order",
        _two_forwards((1, 0)),
    ),
    Case(_KIND, "two contexts", "two forwards in a context each, one backward", two_entries),
    Case(_KIND, "retain_graph", "two backwards over one graph", retain_graph),
    Case(_KIND, "create_graph", "the gradient of a gradient", create_graph),
    Case(_KIND, "read twice", "one backward asks for its saved tensors twice", _make(_read_twice)),
    Case(
        _KIND,
        "written after it was saved",
        "plain PyTorch raises, since backward needs the old values",
        _make(_written),
    ),
    Case(
        _KIND,
        "written, but not read",
        "legal: the part of the graph that saved the old values has no backward",
        written_unread,
    ),
    Case(
        _KIND,
        "legal in-place operations",
        "activations written before they are saved, and never after",
        _make(_in_place),
    ),
]
