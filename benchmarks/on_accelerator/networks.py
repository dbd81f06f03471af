"""What is trained: a Llama-like decoder, an LSTM of explicit cells, GPT-2."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class DecoderSizes:
    width: int
    heads: int
    layers: int
    words: int
    length: int

    @property
    def hidden(self) -> int:
        return -(-self.width * 8 // 3 // 64) * 64

    def to_json(self) -> dict[str, int]:
        return asdict(self)


# By the device memory that they are for; the first that fits is taken.
DECODERS = (
    (64 << 30, DecoderSizes(4096, 32, 16, 32000, 2048)),
    (20 << 30, DecoderSizes(2048, 16, 16, 32000, 2048)),
    (0, DecoderSizes(1024, 16, 12, 16000, 1024)),
)
TINY_DECODER = DecoderSizes(64, 4, 3, 128, 64)


class _Attention(nn.Module):
    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.qkv = nn.Linear(sizes.width, 3 * sizes.width, bias=False)
        self.out = nn.Linear(sizes.width, sizes.width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos.to(x.dtype) + torch.cat((-second, first), -1) * sin.to(x.dtype)


class _Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        return self.scale * wide.to(x.dtype)


class _Layer(nn.Module):
    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        self.attention = _Attention(sizes)
        self.before, self.between = _Norm(sizes.width), _Norm(sizes.width)
        self.gate = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.up = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before(x), cos, sin)
        y = self.between(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """Without dropout; ``forward`` gives the loss of the next word."""

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.words, sizes.width)
        self.layers = nn.ModuleList(_Layer(sizes) for _ in range(sizes.layers))
        self.norm = _Norm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.words, bias=False)
        of_head = sizes.width // sizes.heads
        steps = 10000.0 ** (-torch.arange(0, of_head, 2).float() / of_head)
        angles = torch.outer(torch.arange(sizes.length).float(), steps).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


class Lstm(nn.Module):
    """All four gates come from one projection: some nine storages are saved at each step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gates = nn.Linear(2 * width, 4 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = cell = torch.zeros_like(x[:, 0])
        outputs = []
        for step in x.unbind(1):
            gates = self.gates(torch.cat([step, hidden], -1)).chunk(4, -1)
            add, keep, show = (gate.sigmoid() for gate in gates[:3])
            cell = keep * cell + add * gates[3].tanh()
            hidden = show * cell.tanh()
            outputs.append(hidden)
        return torch.stack(outputs, 1).square().mean()


def gpt2(length: int, tiny: bool) -> nn.Module:
    """Raises ImportError without transformers. No dropout, as in the decoder."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 128}
    config = GPT2Config(
        **(sizes if tiny else {}),
        n_positions=length,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return _Loss(GPT2LMHeadModel(config))


class _Loss(nn.Module):
    """A model of transformers whose ``forward`` gives the loss."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids=tokens, labels=tokens).loss
