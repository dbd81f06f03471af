"""Whole models train on the device as on the CPU: same losses, gradients and weights to the last bit, and no race."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bits import assert_same_bits
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norms[0](x)).chunk(3, -1)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed(self.norms[1](x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 32)
        self.blocks = nn.Sequential(Block(32, 4), Block(32, 4))
        self.head = nn.Linear(32, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.blocks(self.tokens(ids)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1, groups=2),
            nn.GroupNorm(4, 16),
            nn.SiLU(),
            nn.Dropout(0.2),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(64, 10),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        labels = torch.arange(len(images), device=images.device) % 10
        return F.cross_entropy(self.body(images), labels)


class Cells(nn.Module):
    """An LSTM of explicit cells."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList([nn.LSTMCell(6, 12), nn.LSTMCell(12, 12)])

    def forward(self, sequence: torch.Tensor) -> torch.Tensor:
        states: list[Any] = [None] * len(self.cells)
        outputs = []
        for x in sequence.unbind(1):
            for number, cell in enumerate(self.cells):
                states[number] = cell(x, states[number])
                x = states[number][0]
            outputs.append(x)
        return torch.stack(outputs, 1).square().mean()


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 12, num_layers=2, bidirectional=True, batch_first=True, dropout=0.1)

    def forward(self, sequence: torch.Tensor) -> torch.Tensor:
        return self.lstm(sequence)[0].square().mean()


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=32, attn_implementation="eager"
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        hidden_size=32,
        intermediate_size=64,
        vocab_size=64,
        max_position_embeddings=32,
        attn_implementation="eager",
    )
    return transformers.LlamaForCausalLM(config)


def tokens(step: int) -> torch.Tensor:
    return torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(step))


def images(step: int) -> torch.Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(step))


def sequences(step: int) -> torch.Tensor:
    return torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(step))


def plain(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch)


def language(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(input_ids=batch, labels=batch).loss


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, foreach=False)


CASES: dict[str, tuple[Callable[[], nn.Module], Any, Any, Any]] = {
    "transformer, AdamW": (Transformer, tokens, plain, adamw),
    "transformer, SGD": (Transformer, tokens, plain, sgd),
    "convolutions": (ConvNet, images, plain, adamw),
    "LSTM cells": (Cells, sequences, plain, adamw),
    "nn.LSTM": (Lstm, sequences, plain, adamw),
    "GPT-2": (gpt2, tokens, language, adamw),
    "Llama": (llama, tokens, language, adamw),
}


def train(
    model: nn.Module,
    batches: list[torch.Tensor],
    loss_of: Callable[[nn.Module, torch.Tensor], torch.Tensor],
    optimizer: torch.optim.Optimizer,
) -> list[Any]:
    trace: list[Any] = []
    torch.manual_seed(11)
    for batch in batches:
        loss = loss_of(model, batch)
        loss.backward()
        trace.append([loss, *(parameter.grad.clone() for parameter in model.parameters())])
        optimizer.step()
        optimizer.zero_grad()
    trace.append(list(model.state_dict().values()))
    return trace


@contextlib.contextmanager
def cpu_without_other_libraries(name: str) -> Iterator[None]:
    """The CPU's own attention and LSTM compute in another order."""
    with sdpa_kernel(SDPBackend.MATH), contextlib.ExitStack() as stack:
        if name == "nn.LSTM":
            stack.enter_context(warnings.catch_warnings(action="ignore"))
            stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
        yield


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mode", ["lazy", "worker"])
def test_model_trains_with_the_bits_of_the_cpu(name: str, mode: str, control: ModuleType) -> None:
    control.options(mode=mode)
    make, batch_of, loss_of, optimizer_of = CASES[name]
    torch.manual_seed(3)
    model = make()
    # A move makes new parameters: what was tied must be tied again.
    tide_model = copy.deepcopy(model).to("tide")
    if hasattr(tide_model, "tie_weights"):
        tide_model.tie_weights()
    batches = [batch_of(step) for step in range(3)]
    with cpu_without_other_libraries(name):
        expected = train(model, batches, loss_of, optimizer_of(model))
        found = train(
            tide_model,
            [batch.to("tide") for batch in batches],
            loss_of,
            optimizer_of(tide_model),
        )
    for step, (left, right) in enumerate(zip(expected, found, strict=True)):
        assert_same_bits(left, right, f"step {step}")
    assert control.races() == []


def test_nothing_is_left_of_a_model(control: ModuleType) -> None:
    before = control.memory().used_bytes
    model = Transformer().to("tide")
    train(model, [tokens(0).to("tide")], plain, adamw(model))
    assert control.memory().used_bytes > before
    del model
    assert control.memory().used_bytes == before
