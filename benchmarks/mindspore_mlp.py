"""A deep MLP over bytes, to train as the demo trains its decoder: nothing but large activations."""

from __future__ import annotations

from mindspore import Tensor, nn, ops

from ebbtide.demo import mindspore_trainer
from ebbtide.demo.settings import Settings
from ebbtide.demo.text import VOCABULARY


class Mlp(nn.Cell):
    """Predicts each byte from the one before: tokens of (batch, sequence) give the mean loss."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width = settings.width
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.layers = nn.CellList([nn.Dense(width, width) for _ in range(settings.layers)])
        self.head = nn.Dense(width, VOCABULARY, has_bias=False)

    def construct(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens[:, :-1].reshape(-1))
        for layer in self.layers:
            x = ops.gelu(layer(x), approximate="tanh")
        return ops.cross_entropy(self.head(x), tokens[:, 1:].reshape(-1))


class Trainer(mindspore_trainer.Trainer):
    @staticmethod
    def make_model(settings: Settings) -> nn.Cell:
        return Mlp(settings)
