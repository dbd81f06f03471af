"""Decoders whose layers are recomputed, with inputs or products swapped: the bits of plain training, and a device peak
that falls by the bytes that left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from model_training import STEPS, Training, plain
from support import DEVICE, assert_at_rest
from torch import nn
from torch_support import assert_same_bits
from zoo import Size, layers_of

import ebbtide.hyper_parallel as hp

SIZE = Size(layers=8, width=64, sequence=64, samples=4)
MODELS = ("gpt2", "llama", "mixtral")
HIDDEN_BYTES = 4 * SIZE.samples * SIZE.sequence * SIZE.width

_PRODUCTS = {
    torch.ops.aten.addmm.default,
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
}


def products(answer: hp.CheckpointPolicy) -> Callable[..., hp.CheckpointPolicy]:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> hp.CheckpointPolicy:
        return answer if op in _PRODUCTS else hp.CheckpointPolicy.MUST_RECOMPUTE

    return policy


SAVED, SWAPPED = (
    {"policy_fn": products(answer)}
    for answer in (hp.CheckpointPolicy.MUST_SAVE, hp.CheckpointPolicy.MUST_SWAP)
)
# What stays on the device, and the same with what leaves it.
WAYS = {
    "inputs": ({}, {"swap_inputs": True}),
    "products": (SAVED, SWAPPED),
    "inputs and products": (SAVED, {"swap_inputs": True, **SWAPPED}),
}


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is held back or loaded ahead, and no copy is left running."""
    for name in ("KEEP_LAST_BYTES", "IN_FLIGHT_BYTES", "PREFETCH_BYTES"):
        monkeypatch.setenv(f"EBBTIDE_{name}", "0")
    yield


class Totals:
    """Of all sessions, under the names that the at-rest check asks for."""

    stats = staticmethod(hp.stats)
    synchronize = staticmethod(hp.synchronize)


def recomputed(training: Training, options: dict[str, Any]) -> nn.Module:
    model = training.make_model()
    layers = layers_of(model)
    for index, layer in enumerate(layers):
        layers[index] = hp.checkpoint_wrapper(layer, **options)
    return model


class LastRegion:
    """The backward of the last layer, from the gradient of its output to that of its input: how far the device's memory
    grows above what the step began with, and how many bytes are away by then, in bytes."""

    def __init__(self, layer: nn.Module) -> None:
        self.began_bytes = self.peak_bytes = self.away_bytes = 0
        layer.register_forward_pre_hook(self._before)
        layer.register_forward_hook(self._after)

    def begin_step(self) -> None:
        if DEVICE != "cpu":
            torch.accelerator.synchronize()
            self.began_bytes = torch.accelerator.memory_allocated()

    def _before(self, layer: nn.Module, args: Any) -> None:
        if DEVICE != "cpu" and args[0].requires_grad:
            args[0].register_hook(self._end)

    def _after(self, layer: nn.Module, args: Any, output: Any) -> None:
        if DEVICE != "cpu":
            first = output[0] if isinstance(output, tuple) else output
            first.register_hook(self._begin)

    def _begin(self, gradient: torch.Tensor) -> None:
        torch.accelerator.reset_peak_memory_stats()

    def _end(self, gradient: torch.Tensor) -> None:
        self.peak_bytes = torch.accelerator.max_memory_allocated() - self.began_bytes
        stats = hp.stats()
        self.away_bytes = stats.d2h_bytes - stats.h2d_bytes


def run(training: Training, options: dict[str, Any]) -> LastRegion:
    """Trains as `plain` does, and compares; what is returned is of the last step."""
    model = recomputed(training, options)
    last = LastRegion(layers_of(model)[-1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number, expected in zip(range(STEPS), plain(training), strict=True):
        optimizer.zero_grad()
        hp.reset_stats()
        batch = training.batch(number)
        torch.manual_seed(number)
        last.begin_step()
        # Not through the zoo, which asks for the hidden states: whoever holds a layer's input keeps it on the device.
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        loss = loss.detach()
        assert_at_rest(Totals)
        assert_same_bits([loss], [expected.loss])
        assert_same_bits([parameter.grad for parameter in model.parameters()], expected.gradients)
        optimizer.step()
    return last


@pytest.mark.parametrize(("way", "group_swap"), [("inputs", False), ("inputs and products", True)])
@pytest.mark.parametrize("name", MODELS)
def test_bits(name: str, way: str, group_swap: bool) -> None:
    training = Training(name, size=SIZE)
    pool = hp.PinnedMemoryPool("1GiB")
    run(training, {"group_swap": group_swap, "cpu_pool": pool, **WAYS[way][1]})
    stats = hp.stats()
    assert stats.d2h_bytes >= (SIZE.layers - 2) * HIDDEN_BYTES
    assert stats.unfreed_bytes == 0


@pytest.mark.skipif(DEVICE == "cpu", reason="the CPU has no counter of a peak")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_the_peak_falls_by_what_is_away(name: str, way: str) -> None:
    """It sits where the last layer is recomputed: all inputs, and all that was saved, would be there besides."""
    training = Training(name, size=SIZE)
    stays, leaves = WAYS[way]
    before = run(training, stays)
    assert before.away_bytes == 0
    pool = hp.PinnedMemoryPool("1GiB")  # its session, and the counts, live as long
    after = run(training, {"cpu_pool": pool, **leaves})
    assert after.away_bytes >= (SIZE.layers - 2) * HIDDEN_BYTES
    fallen = before.peak_bytes - after.peak_bytes
    print(f"{name}, {way}: {before.peak_bytes} B - {fallen} B, {fallen / after.away_bytes:.4f}")
    assert fallen >= 0.98 * after.away_bytes
