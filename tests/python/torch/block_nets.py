"""What the tests of blocks share: models of blocks, and what is told of them."""

from __future__ import annotations

import threading

import torch
from torch import nn
from training import Block

from ebbtide.torch.blocks import repeated_blocks, watch


def names(model: nn.Module) -> list[str]:
    return [name for name, _ in repeated_blocks(model)]


def numbered(prefix: str, count: int = 2) -> list[str]:
    return [f"{prefix}{number}" for number in range(count)]


class Net(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers or [Block() for _ in range(3)])
        self.head = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Other(Block):
    pass


LAYERS = numbered("layers.", 3)


class Log:
    """What was told, per thread; checks that begins and ends come in pairs."""

    def __init__(self, model: nn.Module) -> None:
        self.blocks = repeated_blocks(model)
        self.told: dict[int, list[str]] = {}
        self.remove = watch(self.blocks, self.begin, self.end)

    def begin(self, name: str) -> None:
        told = self.told.setdefault(threading.get_ident(), [])
        assert len(told) % 2 == 0, told
        told.append(name)

    def end(self, name: str) -> None:
        told = self.told[threading.get_ident()]
        assert len(told) % 2 == 1 and told[-1] == name, (told, name)
        told.append(name)

    def take(self) -> list[str]:
        """Names begun on this thread, all of them ended."""
        told = self.told.pop(threading.get_ident(), [])
        assert len(told) % 2 == 0, told
        return told[::2]
