"""Whole models, small ones, in which activations outweigh weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from peers.cases import Case, Enter, Forward, Scenario

_WIDTH, _HEADS, _LAYERS = 128, 4, 3
_SAMPLES, _LENGTH, _WORDS = 4, 128, 256
_TOKENS = {"vocab_size": _WORDS, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


def _scenario(
    model: nn.Module,
    device: str,
    loss: Callable[[nn.Module, dict[str, torch.Tensor]], Any],
    samples: int = _SAMPLES,
    length: int = _LENGTH,
) -> Scenario:
    model = model.to(device).train()
    if hasattr(model, "tie_weights"):
        model.tie_weights()  # moving may have made two of one
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, _WORDS, (samples, length), generator=random).to(device)
    batch = {"input_ids": tokens, "labels": tokens.clone()}

    def forward(enter: Enter) -> Forward:
        with enter():
            return Forward([loss(model, batch)])

    weights = [*model.parameters(), *model.buffers()]
    return Scenario(forward, list(model.parameters()), weights, model)


def _loss_of_transformers(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch, use_cache=False).loss


def gpt2(device: str, checkpointed: bool = False) -> Scenario:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        **_TOKENS, n_positions=_LENGTH, n_embd=_WIDTH, n_layer=_LAYERS, n_head=_HEADS
    )
    return _of_transformers(GPT2LMHeadModel(config), device, checkpointed)


def llama(device: str, checkpointed: bool = False) -> Scenario:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        **_TOKENS,
        hidden_size=_WIDTH,
        intermediate_size=3 * _WIDTH,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        num_key_value_heads=_HEADS // 2,
        max_position_embeddings=_LENGTH,
    )
    return _of_transformers(LlamaForCausalLM(config), device, checkpointed)


def _of_transformers(model: Any, device: str, checkpointed: bool) -> Scenario:
    if checkpointed:
        enable_checkpointing(model)
    return _scenario(model, device, _loss_of_transformers)


def enable_checkpointing(model: Any, **options: Any) -> None:
    # The older name warns in newer releases.
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False}, **options)


class _Language(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_WORDS, _WIDTH)
        self.body = body
        self.head = nn.Linear(_WIDTH, _WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding(tokens)))


def _next_word_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(batch["input_ids"])
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


class _Lstm(nn.Module):
    """Of explicit cells: all four gates come from one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Linear(2 * _WIDTH, 4 * _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = cell = torch.zeros_like(x[:, 0])
        outputs = []
        for step in x.unbind(1):
            gates = self.gates(torch.cat([step, hidden], -1)).chunk(4, -1)
            add, keep, show = (gate.sigmoid() for gate in gates[:3])
            cell = keep * cell + add * gates[3].tanh()
            hidden = show * cell.tanh()
            outputs.append(hidden)
        return torch.stack(outputs, 1)


class _DecoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.qkv = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.out = nn.Linear(_WIDTH, _WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.before_attention(x)).chunk(3, -1)
        x = x + self.out(_attention(q, k, v))
        return x + self.mlp(self.before_mlp(x))


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Of one head, so that the chunks themselves are saved, not copies by head."""
    scores = torch.bmm(q, k.transpose(1, 2)) / _WIDTH**0.5
    hidden = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
    return torch.bmm(scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


def lstm(device: str) -> Scenario:
    torch.manual_seed(0)
    return _scenario(_Language(_Lstm()), device, _next_word_loss, samples=64, length=24)


def decoder(device: str) -> Scenario:
    torch.manual_seed(0)
    layers = nn.Sequential(*(_DecoderLayer() for _ in range(_LAYERS)))
    return _scenario(_Language(layers), device, _next_word_loss)


_KIND = "models"
CASES = [
    Case(_KIND, "GPT-2", "of transformers, with dropout, tied embedding", gpt2),
    Case(_KIND, "Llama", "of transformers, with grouped-query attention", llama),
    Case(_KIND, "LSTM", "of explicit cells, 24 steps", lstm),
    Case(_KIND, "decoder", "attention over chunks of one projection", decoder),
    Case(
        _KIND,
        "GPT-2, checkpointed",
        "only what the checkpoints leave to be saved",
        partial(gpt2, checkpointed=True),
        checkpointed=True,
    ),
    Case(
        _KIND,
        "Llama, checkpointed",
        "only what the checkpoints leave to be saved",
        partial(llama, checkpointed=True),
        checkpointed=True,
    ),
]
