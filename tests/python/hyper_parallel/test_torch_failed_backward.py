"""After Ebbtide's own error in backward: once the graph is dropped nothing is held, without another call of anything.

Each graph has a branch that torch has queued, and not run, when the error comes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from descriptors import flipped
from harness import Hyper
from recompute_regions import SWAP, products
from support import disk_first
from torch_layers import blocks, chained, wrapped
from torch_support import assert_same_bits
from training import gradients, make_input, raised_text

import ebbtide.hyper_parallel as hp
from ebbtide import CorruptionError, DeviceError, InplaceModificationError
from ebbtide.torch.framework import TorchFramework

Layers = list[Callable[[torch.Tensor], torch.Tensor]]


def called_with(call: Callable[..., Any], hyper: Hyper, **options: Any) -> Layers:
    return [partial(call, block, **options, **hyper.options) for block in blocks(3)]


def in_groups(hyper: Hyper) -> Layers:
    def in_group(name: str, layer: Any, x: torch.Tensor) -> torch.Tensor:
        with hyper.manager.group_context(name):
            y: torch.Tensor = layer(x)
        hyper.manager.launch_offload(name)
        hyper.manager.wait_offload(name)
        return y

    layers = wrapped(blocks(3), hyper)
    return [partial(in_group, f"failed-{i}", layer) for i, layer in enumerate(layers)]


def in_context(hyper: Hyper) -> Layers:
    def call(layer: Any, x: torch.Tensor, **options: Any) -> torch.Tensor:
        with hp.async_save_on_cpu(**options):
            y: torch.Tensor = layer(x)
        return y

    return called_with(call, hyper)


KINDS: dict[str, Callable[[Hyper], Layers]] = {
    "swap": partial(called_with, hp.swap),
    "context": in_context,
    "wrapper": lambda hyper: list(wrapped(blocks(3), hyper)),
    "chain": lambda hyper: list(chained(hyper, 3)),
    "groups": in_groups,
    "region inputs": partial(called_with, hp.checkpoint, swap_inputs=True),
    "region results": partial(called_with, hp.checkpoint, policy_fn=products(SWAP)),
}

kinds = pytest.mark.parametrize("kind", KINDS)


class Graph:
    def __init__(self, layers: Layers) -> None:
        x = make_input().requires_grad_()
        self.hidden = layers[0](x * 1)
        queued = self.hidden * 2
        self.loss = layers[2](layers[1](self.hidden)).square().mean() + queued.sum()


@contextmanager
def no_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def allocate(self: TorchFramework, nbytes: int, residue: int, device: int) -> Any:
        raise MemoryError("none left")

    with monkeypatch.context() as patch:
        patch.setattr(TorchFramework, "allocate", allocate)
        yield


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "region results"])
def test_a_write_before_backward(hyper: Hyper, kind: str) -> None:
    layers = KINDS[kind](hyper)
    for _ in range(2):
        graph = Graph(layers)
        with torch.no_grad():
            graph.hidden.add_(1)
        with raised_text(InplaceModificationError):
            graph.loss.backward()
        assert hyper.stats().entries > 0
        del graph
        hyper.assert_at_rest()
    assert hyper.stats().d2h_bytes > 0


@kinds
def test_no_memory(hyper: Hyper, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = KINDS[kind](hyper)
    graph = Graph(layers)
    with no_memory(monkeypatch), raised_text(DeviceError):
        graph.loss.backward()
    del graph
    hyper.assert_at_rest()


@disk_first
@kinds
def test_bytes_that_are_not_what_was_written(
    hyper: Hyper, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EBBTIDE_TO", str(tmp_path))
    layers = KINDS[kind](hyper)
    graph = Graph(layers)
    hp.synchronize()
    with flipped(tmp_path), raised_text(CorruptionError):
        graph.loss.backward()
    del graph
    hyper.assert_at_rest()


def test_inside_of_another_backward(hyper: Hyper) -> None:
    """Nothing of Ebbtide is asked for in the outer one before the inner one raises."""

    def spoilt(x: torch.Tensor) -> torch.Tensor:
        saved = x.exp()
        result = saved * 2
        with torch.no_grad():
            saved.add_(1)
        return result

    region = partial(hp.swap, spoilt, **hyper.options)
    hidden = wrapped(blocks(1), hyper)(make_input())
    queued = hidden * 2
    result = torch_checkpoint.checkpoint(region, hidden, use_reentrant=True)
    with raised_text(InplaceModificationError):
        (result + queued).sum().backward()
    assert hyper.stats().entries > 0
    del hidden, queued, result
    hyper.assert_at_rest()


def test_the_graph_may_live_on(hyper: Hyper, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch had queued is dropped with the error; the next backward begins anew."""
    model = chained(hyper, 3)
    graph = Graph(list(model))
    graph.loss.backward(retain_graph=True)
    expected = gradients(model)
    with no_memory(monkeypatch), raised_text(DeviceError):
        graph.loss.backward(retain_graph=True)
    model.zero_grad()
    graph.loss.backward()
    assert_same_bits(gradients(model), expected)
    del graph
    hyper.assert_at_rest()


def test_on_another_thread(hyper: Hyper, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a thread that lives on and calls no backward again."""
    done, over = threading.Event(), threading.Event()
    graphs = [Graph(list(chained(hyper, 3)))]

    def backward() -> None:
        with no_memory(monkeypatch), raised_text(DeviceError):
            graphs.pop().loss.backward()
        done.set()
        over.wait()

    thread = threading.Thread(target=backward)
    thread.start()
    assert done.wait(60)
    try:
        hyper.assert_at_rest()
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize(
    "around",
    [
        torch.no_grad,
        torch.inference_mode,
        partial(torch.autograd.set_multithreading_enabled, False),
        partial(torch.autograd.set_detect_anomaly, True),
    ],
    ids=["no_grad", "inference_mode", "one thread", "anomaly"],
)
@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
@pytest.mark.filterwarnings("ignore:Error detected in:UserWarning")
def test_in_any_mode(
    hyper: Hyper, around: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = Graph(list(chained(hyper, 3)))
    with around(), no_memory(monkeypatch), raised_text(DeviceError):
        graph.loss.backward()
    del graph
    hyper.assert_at_rest()
