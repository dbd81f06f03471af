"""Saved tensors whose storages somebody else holds too, for a while or for good."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from peers.cases import SIDE, Case, Enter, Forward, Scenario, activation, gradients, leaf, tail

_LAYERS = 4


def _table(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    places = torch.arange(SIDE, dtype=torch.float32)
    angles = torch.outer(places, 1e4 ** (-places / SIDE)).to(device)
    return angles.cos(), angles.sin()


def _rotated(x: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cos, sin = table
    for _ in range(_LAYERS):
        x = x * cos + x.roll(1, -1) * sin
    return x


def table_of_a_forward(device: str) -> Scenario:
    w = leaf(device)

    def forward(enter: Enter) -> Forward:
        with enter():
            return Forward([tail(_rotated(activation(w), _table(device)))])

    return Scenario(forward, [w])


def table_of_the_model(device: str) -> Scenario:
    w = leaf(device)
    table = _table(device)

    def forward(enter: Enter) -> Forward:
        with enter():
            return Forward([tail(_rotated(activation(w), table))])

    return Scenario(forward, [w])


def users_list(device: str) -> Scenario:
    w = leaf(device)

    def forward(enter: Enter) -> Forward:
        hidden = []
        with enter():
            x = activation(w)
            for _ in range(_LAYERS):
                x = activation(x).sin()
                hidden.append(x)
                x = x * x
            return Forward([tail(x)], held=hidden)

    return Scenario(forward, [w])


def output_of_an_input(device: str) -> Scenario:
    w = leaf(device)

    def forward(enter: Enter) -> Forward:
        with enter():
            x = activation(w)
            y = activation(x * x).sin()
            return Forward([tail(y)], held=[x[: SIDE // 2].view(-1), y.view(-1)])

    return Scenario(forward, [w])


class _Tied(torch.nn.Module):
    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(words, width)
        self.inner = torch.nn.Linear(width, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.inner(self.embedding(tokens)))
        return F.linear(hidden, self.embedding.weight)


def tied_embedding(device: str) -> Scenario:
    torch.manual_seed(0)
    words, width, count = 512, 256, 1024
    model = _Tied(words, width).to(device)
    tokens = torch.randint(words, (count,), generator=torch.Generator().manual_seed(0)).to(device)

    def forward(enter: Enter) -> Forward:
        with enter():
            return Forward([tail(activation(model(tokens)).sin())])

    weights = list(model.parameters())
    return Scenario(forward, weights, weights, model)


class _Frozen(torch.nn.Module):
    """A frozen projection with a trained one of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Linear(SIDE, SIDE).requires_grad_(False)
        self.down = torch.nn.Linear(SIDE, 16, bias=False)
        self.up = torch.nn.Linear(16, SIDE, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def frozen_weights(device: str) -> Scenario:
    torch.manual_seed(0)
    model = torch.nn.Sequential(_Frozen(), torch.nn.GELU(), _Frozen(), torch.nn.GELU()).to(device)
    w = leaf(device)

    def forward(enter: Enter) -> Forward:
        with enter():
            return Forward([tail(model(activation(w)))])

    trained = [weight for weight in model.parameters() if weight.requires_grad]
    return Scenario(forward, [w, *trained], list(model.parameters()), model)


def written_weight(device: str) -> Scenario:
    torch.manual_seed(0)
    model = torch.nn.Linear(SIDE, SIDE).to(device)
    w = leaf(device)

    def forward(enter: Enter) -> Forward:
        with enter():
            return Forward([tail(model(activation(w).sin()).sin())])

    leaves = [w, *model.parameters()]

    def backward(forward: Forward) -> list[torch.Tensor | None]:
        with torch.no_grad():
            model.weight.mul_(1.0)  # as an optimizer's step; the values of the next round stay
        return gradients(forward.losses[0], leaves)

    return Scenario(forward, leaves, list(model.parameters()), model, backward)


_KIND = "ownership"
CASES = [
    Case(
        _KIND,
        "rotary table of the forward",
        "made at the start of forward, read by all layers, then let go",
        table_of_a_forward,
    ),
    Case(
        _KIND,
        "rotary table of the model",
        "read by all layers and kept: it cannot be freed, so nothing of it need move",
        table_of_the_model,
    ),
    Case(_KIND, "user's list", "hidden states kept in a list until after backward", users_list),
    Case(
        _KIND,
        "output of a saved storage",
        "what the model returns lies in storages that it saved",
        output_of_an_input,
    ),
    Case(_KIND, "tied embedding", "one weight for the first and the last layer", tied_embedding),
    Case(_KIND, "frozen weights", "adapters of low rank beside frozen layers", frozen_weights),
    Case(
        _KIND,
        "weight written before backward",
        "plain PyTorch raises, since backward needs the old weight",
        written_weight,
    ),
]
