"""Trains a GPT-2-style decoder in one mode and measures: ``python -m ebbtide.demo.training``.

Runs in a process of its own, so that modes cannot disturb each other's memory. It prints one JSON
object per line: ``{"step": …}`` after each step, then ``{"result": …}``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from ebbtide.demo.memory import PeakMemory
from ebbtide.demo.settings import MODES, Settings
from ebbtide.demo.text import VOCABULARY, read_corpus
from ebbtide.errors import EbbtideError

__all__ = ["HEAD_WIDTH", "Result", "Traffic", "train"]

HEAD_WIDTH = 64

_LEARNING_RATE = 3e-5
_WARM_UP_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes of one step, on average; None where nobody counts them."""

    saved_bytes: int
    """What autograd saved: elements times itemsize, weights and duplicates counted."""
    unique_bytes: int | None = None
    """After duplicates and aliases are resolved, without weights and small storages."""
    moved_out_bytes: int | None = None
    moved_in_bytes: int | None = None
    peak_tier_bytes: int = 0
    """At most in use in the tier at any time."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one mode's training came to."""

    mode: str
    losses: tuple[float, ...]
    loss_bits: tuple[int, ...]
    """Of every step: the loss's 32 bits as a number."""
    checksum: str
    """Over the bits of all parameters after the last step."""
    step_seconds: tuple[float, ...]
    growth_bytes: int
    """Peak of resident memory in training, above that before its first step."""
    peak_by_kernel: bool
    """Whether the kernel told the peak; otherwise it was sampled."""
    parameters: int
    threads: int
    accelerator: str | None
    """The type of the accelerator that this machine has and the demo does not use."""
    traffic: Traffic

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Result:
        for name in ("losses", "loss_bits", "step_seconds"):
            values = {**values, name: tuple(values[name])}
        return cls(**{**values, "traffic": Traffic(**values["traffic"])})


def train(mode: str, settings: Settings, on_step: Callable[[int], None]) -> Result:
    """Trains in this process; ``on_step`` is called with the number of steps done."""
    import torch

    if settings.threads:
        torch.set_num_threads(settings.threads)
    batches = _batches(read_corpus(settings.sequence + 1), settings)
    torch.manual_seed(settings.seed)
    model = _decoder(settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
    tide: Any = None
    if mode == "ebbtide":
        import ebbtide.torch

        tide = ebbtide.torch.offload(model, to=settings.to, device="cpu")

    def context() -> AbstractContextManager[Any]:
        if mode == "save_on_cpu":
            return torch.autograd.graph.save_on_cpu()
        return contextlib.nullcontext() if tide is None else tide

    def forward(tokens: Any) -> Any:
        return model(input_ids=tokens, labels=tokens, use_cache=False).loss

    def step(tokens: Any) -> Any:
        with context():
            loss = forward(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss.detach()

    # Makes gradients and the optimizer's state, which are there in every mode: what grows after
    # this step is what a step needs besides. At a rate of 0 it leaves the weights alone.
    step(next(batches)[:1, :_WARM_UP_TOKENS])
    for group in optimizer.param_groups:
        group["lr"] = _LEARNING_RATE
    if tide is not None:
        tide.reset_stats()
    losses, seconds = [], []
    with PeakMemory() as memory:
        for done in range(1, settings.steps + 1):
            tokens = next(batches)
            started = time.perf_counter()
            losses.append(step(tokens))
            seconds.append(time.perf_counter() - started)
            on_step(done)

    checksum = _checksum(model)
    if tide is not None:
        traffic = _traffic_of(tide.stats(), settings.steps)
    else:
        traffic = Traffic(saved_bytes=_count_saved(lambda: forward(next(batches))))
    accelerator = torch.accelerator.current_accelerator() if _has_accelerator(torch) else None
    return Result(
        mode=mode,
        losses=tuple(loss.item() for loss in losses),
        loss_bits=tuple(loss.view(torch.int32).item() for loss in losses),
        checksum=checksum,
        step_seconds=tuple(seconds),
        growth_bytes=memory.growth_bytes,
        peak_by_kernel=memory.by_kernel,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        threads=torch.get_num_threads(),
        accelerator=None if accelerator is None else accelerator.type,
        traffic=traffic,
    )


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


def _batches(text: bytes, settings: Settings) -> Iterator[Any]:
    """Random pieces of the text, the same ones for one seed: int64 of (batch, sequence)."""
    import torch

    corpus = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    random = torch.Generator().manual_seed(settings.seed)
    last = len(corpus) - settings.sequence
    while True:
        starts = torch.randint(last, (settings.batch,), generator=random).tolist()
        yield torch.stack([corpus[start : start + settings.sequence] for start in starts]).long()


def _count_saved(forward: Callable[[], Any]) -> int:
    """Bytes that autograd saves in ``forward``."""
    from torch.autograd.graph import saved_tensors_hooks

    nbytes = 0

    def pack(tensor: Any) -> Any:
        nonlocal nbytes
        nbytes += tensor.numel() * tensor.element_size()
        return tensor.detach()  # the tensor itself would keep its own node alive

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return nbytes


def _traffic_of(stats: Any, steps: int) -> Traffic:
    return Traffic(
        saved_bytes=stats.saved_bytes // steps,
        unique_bytes=stats.unique_bytes // steps,
        moved_out_bytes=stats.d2h_bytes // steps,
        moved_in_bytes=stats.h2d_bytes // steps,
        peak_tier_bytes=max(stats.peak_disk_bytes, stats.peak_host_bytes),
    )


def _checksum(model: Any) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().contiguous().numpy())
    return digest.hexdigest()


def _has_accelerator(torch: Any) -> bool:
    return hasattr(torch, "accelerator") and bool(torch.accelerator.is_available())


def main() -> int:
    parser = argparse.ArgumentParser(description="One mode of `ebbtide demo`.")
    parser.add_argument("--mode", choices=tuple(MODES), required=True)
    parser.add_argument("--settings", type=Settings.from_json, default=Settings(), metavar="JSON")
    options = parser.parse_args()
    # Libraries may print: stdout is for our lines alone.
    lines, sys.stdout = sys.stdout, sys.stderr

    def tell(event: dict[str, Any]) -> None:
        print(json.dumps(event), file=lines, flush=True)

    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        result = train(options.mode, options.settings, lambda done: tell({"step": done}))
    except EbbtideError as error:
        print(error, file=sys.stderr)
        return 2
    tell({"result": dataclasses.asdict(result)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
