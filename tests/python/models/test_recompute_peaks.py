"""Decoders whose layers are recomputed: the report says that the device's peak sits there exactly where it does."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from model_training import Training
from support import DEVICE, EXACT
from torch import nn
from torch_support import end_backward
from zoo import Size, layers_of

import ebbtide.hyper_parallel as hp
import ebbtide.torch as ebb

pytestmark = pytest.mark.skipif(DEVICE == "cpu", reason="the CPU has no counter of a peak")

SIZE = Size(layers=4, width=64, sequence=64, samples=4)
HIDDEN_BYTES = 4 * SIZE.samples * SIZE.sequence * SIZE.width
# With so many words the gradient of the logits is larger than what a layer computes.
WORDS = 8192

LINE = (
    r"device peak: in the recomputation of a checkpointed region \(REGION\) or its backward, ([0-9.]+) MiB above what was "
    "allocated when that began: more offload does not lower these"
)
MODELS = {
    "gpt2": "GPT2Block",
    "llama": "LlamaDecoderLayer",
    "mixtral": "MixtralDecoderLayer",
}


class Peaks:
    """Where a step's peak is reached: seen as gradients come to the results of the layers, and to the first one's input."""

    def __init__(self, model: nn.Module) -> None:
        self._seen: list[tuple[int, int]] = []  # allocated and peak in bytes
        layers = layers_of(model)
        layers[0].register_forward_pre_hook(self._before)
        for layer in layers:
            layer.register_forward_hook(self._after)

    def _before(self, layer: nn.Module, args: Any) -> None:
        args[0].register_hook(self._see)

    def _after(self, layer: nn.Module, args: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        first.register_hook(self._see)

    def _see(self, gradient: torch.Tensor) -> None:
        memory = torch.accelerator
        self._seen.append((memory.memory_allocated(), memory.max_memory_allocated()))

    def nbytes_inside(self) -> int:
        """Of the peak, what came on top of what was allocated when the layer's backward began; 0 if it is elsewhere."""
        assert len(self._seen) == SIZE.layers + 1
        peak = torch.accelerator.max_memory_allocated()
        if self._seen[0][1] == peak or self._seen[-1][1] < peak:
            return 0
        return peak - [allocated for allocated, before in self._seen if before < peak][-1]


def wrapped(training: Training, **options: Any) -> tuple[nn.Module, Any, Callable[[], str]]:
    model = training.make_model()
    layers = layers_of(model)
    for index, layer in enumerate(layers):
        layers[index] = hp.checkpoint_wrapper(layer, **options)
    return model, nullcontext(), hp.report


def offloaded(
    training: Training, reentrant: bool, only: str
) -> tuple[nn.Module, Any, Callable[[], str]]:
    """With the gradient checkpointing of transformers."""
    model = replace(training, reentrant=reentrant).make_model()
    tide = ebb.offload(model, device=DEVICE, only=only, prefetch_bytes=0, **EXACT)
    return model, tide, tide.report


WAYS: dict[str, Callable[[Training], tuple[nn.Module, Any, Callable[[], str]]]] = {
    "checkpoint": wrapped,
    "swap_inputs": partial(wrapped, swap_inputs=True),
    "layer_inputs": partial(offloaded, reentrant=False, only="layer_inputs"),
    "layer_inputs, reentrant": partial(offloaded, reentrant=True, only="layer_inputs"),
    "saved": partial(offloaded, reentrant=False, only="saved"),
}


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is held back or loaded ahead, and no copy is left running."""
    for name in ("KEEP_LAST_BYTES", "IN_FLIGHT_BYTES", "PREFETCH_BYTES"):
        monkeypatch.setenv(f"EBBTIDE_{name}", "0")
    yield


def step(name: str, way: str, size: Size) -> tuple[int, str]:
    """What the layers' own hooks have seen of the step's peak, and what the report says of it."""
    training = Training(name, size=size)
    model, context, report = WAYS[way](training)
    peaks = Peaks(model)
    batch = training.batch(0)
    end_backward()
    torch.accelerator.reset_peak_memory_stats()
    report()  # looks at it: an equal peak is to be found anew
    with context:
        loss = model(**batch, use_cache=False).loss
    loss.backward()
    end_backward()
    _, found, line = " ".join(report().split()).partition("device peak: ")
    return peaks.nbytes_inside(), found + line


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_the_peak_sits_in_a_layer(name: str, way: str) -> None:
    nbytes, text = step(name, way, SIZE)
    assert nbytes > 0
    named = way in ("checkpoint", "swap_inputs")
    region = f"{MODELS[name]} on device 0" if named else "device 0"
    found = re.fullmatch(LINE.replace("REGION", region), text)
    assert found is not None, text
    # That of the report does not count the region's input, which is back by then.
    assert abs(nbytes - float(found[1]) * 2**20) <= 2 * HIDDEN_BYTES, (nbytes, text)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_the_peak_sits_at_the_logits(name: str, way: str) -> None:
    nbytes, text = step(name, way, replace(SIZE, vocabulary=WORDS))
    assert nbytes == 0
    assert not text
