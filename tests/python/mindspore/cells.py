"""Models of `nn` cells, each with its data and its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

VOCABULARY = 61
HEADS = 4


@dataclass(frozen=True)
class Size:
    layers: int = 12
    width: int = 32
    sequence: int = 16
    samples: int = 2


class Attention(nn.Cell):
    def __init__(self, width: int, causal: bool) -> None:
        super().__init__()
        self.projection = nn.Dense(width, 3 * width)
        self.output = nn.Dense(width, width)
        self.causal = causal

    def construct(self, x: Tensor) -> Tensor:
        samples, sequence, width = x.shape
        heads = self.projection(x).reshape(samples, sequence, 3, HEADS, width // HEADS)
        q, k, v = (heads[:, :, i].transpose(0, 2, 1, 3) for i in range(3))
        scores = ops.matmul(q, k.transpose(0, 1, 3, 2)) / (width // HEADS) ** 0.5
        if self.causal:
            mask = np.triu(np.full((sequence, sequence), -1e9, np.float32), 1)
            scores = scores + Tensor(mask)
        mixed = ops.matmul(ops.softmax(scores, -1), v).transpose(0, 2, 1, 3)
        return self.output(mixed.reshape(samples, sequence, width))


class Block(nn.Cell):
    def __init__(self, width: int, causal: bool) -> None:
        super().__init__()
        self.attention = Attention(width, causal)
        self.norms = nn.CellList([nn.LayerNorm((width,)), nn.LayerNorm((width,))])
        self.wide = nn.Dense(width, 4 * width)
        self.narrow = nn.Dense(4 * width, width)

    def construct(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.narrow(ops.gelu(self.wide(self.norms[1](x))))


class Transformer(nn.Cell):
    """A decoder predicts each next token; an encoder says what a sequence is."""

    def __init__(self, size: Size, causal: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, size.width)
        self.blocks = nn.CellList([Block(size.width, causal) for _ in range(size.layers)])
        self.norm = nn.LayerNorm((size.width,))
        self.head = nn.Dense(size.width, VOCABULARY if causal else 5)
        self.causal = causal

    def construct(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x if self.causal else x.mean(1)).reshape(-1, self.head.out_channels)


class Residual(nn.Cell):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolutions = nn.CellList(
            [nn.Conv2d(channels, channels, 3, has_bias=True) for _ in range(2)]
        )
        self.norms = nn.CellList([nn.BatchNorm2d(channels) for _ in range(2)])

    def construct(self, x: Tensor) -> Tensor:
        y = ops.relu(self.norms[0](self.convolutions[0](x)))
        return ops.relu(x + self.norms[1](self.convolutions[1](y)))


class ConvolutionNet(nn.Cell):
    def __init__(self, blocks: int, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, channels, 3, has_bias=True)
        self.blocks = nn.SequentialCell(*(Residual(channels) for _ in range(blocks)))
        self.head = nn.Dense(channels, 10)

    def construct(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.first(images)).mean((2, 3)))


class Recurrent(nn.Cell):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, width, num_layers=layers, batch_first=True)
        self.head = nn.Dense(width, 10)

    def construct(self, images: Tensor) -> Tensor:
        rows, _ = self.lstm(images.reshape(images.shape[0], 8, 8))
        return self.head(rows[:, -1])


Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Kind:
    make: Callable[[Size], nn.Cell]
    batch: Callable[[Size, int], Batch]


def _tokens(size: Size, step: int, causal: bool) -> Batch:
    random = np.random.default_rng(step)
    tokens = random.integers(VOCABULARY, size=(size.samples, size.sequence + 1)).astype(np.int32)
    if causal:
        return Tensor(tokens[:, :-1].copy()), Tensor(tokens[:, 1:].reshape(-1).copy())
    return Tensor(tokens[:, 1:].copy()), Tensor(tokens[:, 0] % 5)


def _digits(size: Size, step: int) -> Batch:
    import pytest

    datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn brings the digits")
    images, labels = datasets.load_digits(return_X_y=True)
    count = 8 * size.samples
    part = slice(step * count, (step + 1) * count)
    pixels = (images[part] / 16).astype(np.float32).reshape(count, 1, 8, 8)
    return Tensor(pixels), Tensor(labels[part].astype(np.int32))


KINDS = {
    "decoder": Kind(lambda s: Transformer(s, True), lambda s, step: _tokens(s, step, True)),
    "encoder": Kind(lambda s: Transformer(s, False), lambda s, step: _tokens(s, step, False)),
    "convolutions": Kind(lambda s: ConvolutionNet(s.layers // 4, s.width), _digits),
    "lstm": Kind(lambda s: Recurrent(s.layers // 6, s.width), _digits),
}


def make_model(name: str, size: Size) -> nn.Cell:
    ms.set_seed(0)
    np.random.seed(0)
    model = KINDS[name].make(size)
    model.set_train()
    return model


def loss_of(model: nn.Cell, batch: Batch) -> Any:
    inputs, labels = batch
    return ops.cross_entropy(model(inputs), labels)
