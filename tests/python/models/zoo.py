"""The models, each with its data and its loss; all small, and made from configurations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from support import DEVICE
from torch import nn
from torch.nn import functional as F

Batch = dict[str, torch.Tensor]


VOCABULARY = 97


@dataclass(frozen=True)
class Size:
    """Of a language model and its data."""

    layers: int = 2
    width: int = 32
    sequence: int = 24
    samples: int = 2
    vocabulary: int = VOCABULARY
    """Of which the data has the first 97."""


SMALL = Size()
LARGE = Size(layers=4, width=128, sequence=128, samples=4)

HEADS = 4
EXPERTS = 4
_TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


@dataclass(frozen=True)
class Zoo:
    """One kind of model."""

    make: Callable[[Size], nn.Module]
    batch: Callable[[Size, torch.Generator], Batch]
    run: Callable[[nn.Module, Batch], tuple[torch.Tensor, Any]]
    """The loss, and all that the model has returned."""
    checkpoints: bool = False
    """Whether the model has gradient checkpointing of its own."""


# --- language models


def _transformers() -> Any:
    return pytest.importorskip("transformers")


def make_gpt2(size: Size) -> nn.Module:
    t = _transformers()
    config = t.GPT2Config(
        **_TOKENS,
        vocab_size=size.vocabulary,
        n_positions=size.sequence,
        n_embd=size.width,
        n_layer=size.layers,
        n_head=HEADS,
    )
    return t.GPT2LMHeadModel(config)  # with dropout, and the output tied to the embedding


def _llama_like(size: Size) -> dict[str, Any]:
    return {
        **_TOKENS,
        "vocab_size": size.vocabulary,
        "hidden_size": size.width,
        "intermediate_size": 2 * size.width,
        "num_hidden_layers": size.layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS // 2,  # grouped-query attention
        "max_position_embeddings": size.sequence,
    }


def make_llama(size: Size) -> nn.Module:
    t = _transformers()
    return t.LlamaForCausalLM(t.LlamaConfig(**_llama_like(size)))


def make_mixtral(size: Size) -> nn.Module:
    t = _transformers()
    # Off the CPU, transformers counts tokens with a histogram of integers, which the test device has not.
    on_cpu = DEVICE == "cpu"
    config = t.MixtralConfig(
        **_llama_like(size), num_local_experts=EXPERTS, output_router_logits=on_cpu
    )
    config._experts_implementation = "eager"
    return t.MixtralForCausalLM(config)


def layers_of(decoder: nn.Module) -> nn.ModuleList:
    """Of one of the models above."""
    return decoder.transformer.h if hasattr(decoder, "transformer") else decoder.model.layers


def make_bert(size: Size) -> nn.Module:
    t = _transformers()
    config = t.BertConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=2 * size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=HEADS,
        max_position_embeddings=size.sequence,
    )
    return t.BertForMaskedLM(config)


def make_t5(size: Size) -> nn.Module:
    t = _transformers()
    config = t.T5Config(
        vocab_size=size.vocabulary,
        d_model=size.width,
        d_kv=size.width // HEADS,
        d_ff=2 * size.width,
        num_layers=size.layers,
        num_heads=HEADS,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )
    return t.T5ForConditionalGeneration(config)


def _tokens(size: Size, random: torch.Generator) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (size.samples, size.sequence), generator=random)


def causal_batch(size: Size, random: torch.Generator) -> Batch:
    tokens = _tokens(size, random)
    return {"input_ids": tokens, "labels": tokens}


def padded_batch(size: Size, random: torch.Generator) -> Batch:
    """Of two texts, with the end of the first one padded."""
    mask = torch.ones(size.samples, size.sequence, dtype=torch.long)
    mask[0, -size.sequence // 3 :] = 0
    return {
        "input_ids": _tokens(size, random),
        "attention_mask": mask,
        "labels": _tokens(size, random),
    }


def run_language_model(model: nn.Module, batch: Batch, **options: Any) -> tuple[torch.Tensor, Any]:
    # Hidden states of all layers lie in storages that autograd saves too.
    output = model(**batch, output_hidden_states=True, **options)
    return output.loss, output


# --- recurrent models


class Recurrent(nn.Module):
    def __init__(self, size: Size, bidirectional: bool) -> None:
        super().__init__()
        self.lstm = nn.LSTM(
            size.width, size.width, num_layers=2, dropout=0.1, bidirectional=bidirectional
        )
        self.head = nn.Linear((1 + bidirectional) * size.width, size.width)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden, (last_hidden, last_cell) = self.lstm(x)
        return self.head(hidden), hidden, last_hidden, last_cell


def series_batch(size: Size, random: torch.Generator) -> Batch:
    shape = (size.sequence, size.samples, size.width)
    return {"x": torch.randn(shape, generator=random), "y": torch.randn(shape, generator=random)}


def run_recurrent(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, Any]:
    output = model(batch["x"])
    prediction, _, last_hidden, last_cell = output
    loss = F.mse_loss(prediction, batch["y"]) + (last_hidden * last_cell).square().mean()
    return loss, output


class Cells(nn.Module):
    """A stack of LSTM cells stepped by hand: hundreds of small storages."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.cells = nn.ModuleList(
            nn.ModuleDict(
                {
                    "x": nn.Linear(size.width, 4 * size.width),
                    "h": nn.Linear(size.width, 4 * size.width, bias=False),
                }
            )
            for _ in range(size.layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for cell in self.cells:
            hidden = state = torch.zeros_like(x[0])
            outputs = []
            for step in x:
                gates = cell["x"](step) + cell["h"](hidden)
                enter, forget, change, leave = gates.chunk(4, -1)
                state = forget.sigmoid() * state + enter.sigmoid() * change.tanh()
                hidden = leave.sigmoid() * state.tanh()
                outputs.append(hidden)
            x = torch.stack(outputs)
        return x


def run_cells(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, Any]:
    output = model(batch["x"])
    return F.mse_loss(output, batch["y"]), output


# --- attention whose queries, keys and values are views of one projection


class ChunkedBlock(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(size.width) for _ in range(2))
        self.projection = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.mlp = nn.Sequential(
            nn.Linear(size.width, 4 * size.width), nn.GELU(), nn.Linear(4 * size.width, size.width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split = (*x.shape[:2], HEADS, -1)
        q, k, v = (
            part.view(split).transpose(1, 2)
            for part in self.projection(self.norms[0](x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class ChunkedDecoder(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ChunkedBlock(size) for _ in range(size.layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


# --- attention to other data


class CrossAttention(nn.Module):
    """PyTorch's own decoder: its packed projections are split into those of queries and of the rest."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(
            size.width, HEADS, 2 * size.width, batch_first=True, norm_first=True
        )
        self.decoder = nn.TransformerDecoder(layer, size.layers)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return self.decoder(x, memory)


def pair_batch(size: Size, random: torch.Generator) -> Batch:
    shape = (size.samples, size.sequence, size.width)
    return {name: torch.randn(shape, generator=random) for name in ("x", "memory", "y")}


def run_cross_attention(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, Any]:
    output = model(batch["x"], batch["memory"])
    return F.mse_loss(output, batch["y"]), output


# --- a residual network


class Residual(nn.Module):
    """Two convolutions with batch normalisation, in-place activations and an in-place sum."""

    def __init__(self, channels: int, wider: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, wider, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(wider)
        self.second = nn.Conv2d(wider, wider, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(wider)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Identity()
        if stride != 1 or channels != wider:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, wider, 1, stride, bias=False), nn.BatchNorm2d(wider)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.first_norm(self.first(x)))
        y = self.second_norm(self.second(y))
        y += self.shortcut(x)
        return self.relu(y)


def make_convolutional(size: Size) -> nn.Module:
    channels = size.width // 4
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        Residual(channels, channels, stride=1),
        Residual(channels, 2 * channels, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(2 * channels, _CLASSES),
    )


_CLASSES = 5


def image_batch(size: Size, random: torch.Generator) -> Batch:
    """Each class is a pattern under noise."""
    side = size.sequence
    patterns = torch.randn(_CLASSES, 3, side, side, generator=random)
    labels = torch.randint(_CLASSES, (2 * size.samples,), generator=random)
    noise = torch.randn(2 * size.samples, 3, side, side, generator=random)
    return {"images": patterns[labels] + noise, "labels": labels}


def run_convolutional(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, Any]:
    output = model(batch["images"])
    return F.cross_entropy(output, batch["labels"]), output


_uncached = partial(run_language_model, use_cache=False)

ZOO = {
    "gpt2": Zoo(make_gpt2, causal_batch, _uncached, checkpoints=True),
    "llama": Zoo(make_llama, causal_batch, _uncached, checkpoints=True),
    "mixtral": Zoo(make_mixtral, causal_batch, _uncached, checkpoints=True),
    "bert": Zoo(make_bert, padded_batch, run_language_model, checkpoints=True),
    "t5": Zoo(make_t5, padded_batch, _uncached, checkpoints=True),
    "cross-attention": Zoo(CrossAttention, pair_batch, run_cross_attention),
    "lstm": Zoo(partial(Recurrent, bidirectional=False), series_batch, run_recurrent),
    "lstm-both-ways": Zoo(partial(Recurrent, bidirectional=True), series_batch, run_recurrent),
    "lstm-cells": Zoo(Cells, series_batch, run_cells),
    "chunked-qkv": Zoo(ChunkedDecoder, series_batch, run_cells),
    "convolutional": Zoo(make_convolutional, image_batch, run_convolutional),
}
