"""The demo's decoder on MindSpore, in PyNative mode on the CPU."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, nn, ops, saved_tensors_hooks

import ebbtide.mindspore as ebb
from ebbtide.demo.settings import Settings
from ebbtide.demo.text import VOCABULARY
from ebbtide.demo.training import HEAD_WIDTH

_WARM_UP_TOKENS = 8


class Trainer:
    """See :class:`ebbtide.demo.training.Trainer`."""

    @staticmethod
    def make_model(settings: Settings) -> nn.Cell:
        return Decoder(settings)

    def __init__(self, mode: str, settings: Settings, text: bytes) -> None:
        mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
        mindspore.set_device("CPU")
        # Queued ahead, operations hold memory for longer than they need it.
        mindspore.runtime.launch_blocking()
        if settings.threads:
            mindspore.set_context(runtime_num_threads=settings.threads)
        mindspore.set_seed(settings.seed)
        self._batches = _batches(text, settings)
        self._model = self.make_model(settings).set_train()
        parameters = self._model.trainable_params()
        self._optimizer = nn.AdamWeightDecay(parameters, learning_rate=0.0)
        self._gradients = mindspore.value_and_grad(self._model, None, parameters)
        self.tide: Any = ebb.offload(self._model, to=settings.to) if mode == "ebbtide" else None
        self.parameters = sum(parameter.size for parameter in parameters)
        self.threads = int(mindspore.get_context("runtime_num_threads"))
        self.accelerator = None

    def warm_up(self) -> None:
        tokens = next(self._batches)[:1, :_WARM_UP_TOKENS]
        # The second step's memory grows once more, by as much as the gradients have; later ones' does not.
        for _ in range(2):
            self._train_on(tokens)

    def set_learning_rate(self, rate: float) -> None:
        ops.assign(self._optimizer.learning_rate, Tensor(rate, mindspore.float32))

    def step(self) -> Tensor:
        return self._train_on(next(self._batches))

    def _train_on(self, tokens: Any) -> Tensor:
        with self._context():
            loss, gradients = self._gradients(Tensor(tokens))
        self._optimizer(gradients)
        loss.asnumpy()  # the step is over when its work is
        return loss

    def _context(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.tide is None else self.tide

    def loss(self, of_step: Tensor) -> tuple[float, int]:
        value = of_step.asnumpy().reshape(1)
        return float(value[0]), int(value.view(np.int32)[0])

    def checksum(self) -> str:
        digest = hashlib.sha256()
        for parameter in self._model.trainable_params():
            digest.update(np.ascontiguousarray(parameter.asnumpy()))
        return digest.hexdigest()

    def saved_bytes(self) -> int:
        nbytes = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal nbytes
            nbytes += int(tensor.nbytes)
            return ops.stop_gradient(tensor)  # the tensor itself would be kept for ever

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            self._gradients(Tensor(next(self._batches)))
        return nbytes


class Decoder(nn.Cell):
    """Next-byte prediction: tokens of (batch, sequence) give the mean loss."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, settings.width)
        self.places = nn.Embedding(settings.sequence, settings.width)
        self.blocks = nn.CellList([Block(settings.width) for _ in range(settings.layers)])
        self.norm = nn.LayerNorm((settings.width,))
        self.head = nn.Dense(settings.width, VOCABULARY, has_bias=False)

    def construct(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.tokens(tokens) + self.places(ops.arange(length))
        hidden = Tensor(np.triu(np.ones((length, length), np.bool_), 1))
        for block in self.blocks:
            x = block(x, hidden)
        scores = self.head(self.norm(x))[:, :-1].reshape(-1, VOCABULARY)
        return ops.cross_entropy(scores, tokens[:, 1:].reshape(-1))


class Block(nn.Cell):
    """Attention and a feed-forward part, each after a norm and around a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // HEAD_WIDTH
        self.norm1 = nn.LayerNorm((width,))
        self.qkv = nn.Dense(width, 3 * width)
        self.out = nn.Dense(width, width)
        self.norm2 = nn.LayerNorm((width,))
        self.up = nn.Dense(width, 4 * width)
        self.down = nn.Dense(4 * width, width)

    def construct(self, x: Tensor, hidden: Tensor) -> Tensor:
        batch, length, width = x.shape
        shape = batch, length, 3, self.heads, HEAD_WIDTH
        q, k, v = self.qkv(self.norm1(x)).reshape(shape).permute(2, 0, 3, 1, 4).unbind(0)
        scores = ops.matmul(q, k.swapaxes(-2, -1)) * HEAD_WIDTH**-0.5
        weights = ops.softmax(ops.masked_fill(scores, hidden, -1e9), -1)
        mixed = ops.matmul(weights, v).permute(0, 2, 1, 3).reshape(batch, length, width)
        x = x + self.out(mixed)
        return x + self.down(ops.gelu(self.up(self.norm2(x)), approximate="tanh"))


def _batches(text: bytes, settings: Settings) -> Iterator[Any]:
    """Random pieces of the text, the same ones for one seed: int32 of (batch, sequence)."""
    corpus = np.frombuffer(text, np.uint8)
    random = np.random.default_rng(settings.seed)
    last = len(corpus) - settings.sequence
    while True:
        starts = random.integers(last, size=settings.batch)
        pieces = [corpus[start : start + settings.sequence] for start in starts]
        yield np.stack(pieces).astype(np.int32)
