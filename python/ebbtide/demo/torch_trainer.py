"""The demo's decoder on PyTorch: transformers' GPT-2."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import ebbtide.torch as ebb
from ebbtide.demo.settings import Settings
from ebbtide.demo.text import VOCABULARY
from ebbtide.demo.training import HEAD_WIDTH

_WARM_UP_TOKENS = 8


class Trainer:
    """See :class:`ebbtide.demo.training.Trainer`."""

    def __init__(self, mode: str, settings: Settings, text: bytes) -> None:
        if settings.threads:
            torch.set_num_threads(settings.threads)
        self._mode = mode
        self._batches = _batches(text, settings)
        torch.manual_seed(settings.seed)
        self._model = _decoder(settings)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=0.0, fused=True)
        self.tide: Any = None
        if mode == "ebbtide":
            self.tide = ebb.offload(self._model, to=settings.to, device="cpu")
        self.parameters = sum(parameter.numel() for parameter in self._model.parameters())
        self.threads = torch.get_num_threads()
        accelerator = torch.accelerator.current_accelerator() if _has_accelerator() else None
        self.accelerator = None if accelerator is None else accelerator.type

    def warm_up(self) -> None:
        self._train_on(next(self._batches)[:1, :_WARM_UP_TOKENS])

    def set_learning_rate(self, rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = rate

    def step(self) -> torch.Tensor:
        return self._train_on(next(self._batches))

    def _train_on(self, tokens: torch.Tensor) -> torch.Tensor:
        with self._context():
            loss = self._forward(tokens)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=False)
        return loss.detach()

    def _context(self) -> AbstractContextManager[Any]:
        if self._mode == "save_on_cpu":
            return save_on_cpu()
        return contextlib.nullcontext() if self.tide is None else self.tide

    def _forward(self, tokens: torch.Tensor) -> Any:
        return self._model(input_ids=tokens, labels=tokens, use_cache=False).loss

    def loss(self, of_step: torch.Tensor) -> tuple[float, int]:
        return of_step.item(), of_step.view(torch.int32).item()

    def checksum(self) -> str:
        digest = hashlib.sha256()
        for parameter in self._model.parameters():
            digest.update(parameter.detach().contiguous().numpy())
        return digest.hexdigest()

    def saved_bytes(self) -> int:
        return _count_saved(lambda: self._forward(next(self._batches)))


def _decoder(settings: Settings) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    # As decoders are trained today: without dropout, and GPT-2's activation function in one kernel.
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=settings.sequence,
        n_embd=settings.width,
        n_layer=settings.layers,
        n_head=settings.width // HEAD_WIDTH,
        activation_function="gelu_pytorch_tanh",
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config).train()


def _batches(text: bytes, settings: Settings) -> Iterator[torch.Tensor]:
    """Random pieces of the text, the same ones for one seed: int64 of (batch, sequence)."""
    corpus = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    random = torch.Generator().manual_seed(settings.seed)
    last = len(corpus) - settings.sequence
    while True:
        starts = torch.randint(last, (settings.batch,), generator=random).tolist()
        yield torch.stack([corpus[start : start + settings.sequence] for start in starts]).long()


def _count_saved(forward: Callable[[], Any]) -> int:
    """Bytes that autograd saves in ``forward``."""
    nbytes = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal nbytes
        nbytes += tensor.numel() * tensor.element_size()
        return tensor.detach()  # the tensor itself would keep its own node alive

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return nbytes


def _has_accelerator() -> bool:
    return hasattr(torch, "accelerator") and bool(torch.accelerator.is_available())
