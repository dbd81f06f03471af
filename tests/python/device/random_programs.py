"""Random programs of forwards and backwards on several streams, from a seed; run with and without offload.

Between streams the program orders what plain autograd needs ordered and no more. In one half of the programs it tells
the allocator of every stream that uses a tensor of another one; in the other half it keeps every graph until the device
has come to rest, so that what is reused earlier, is so by Ebbtide.
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from copy_streams import copy_stream

ELEMENTS = 300
NBYTES = 4 * ELEMENTS


class _Save(torch.autograd.Function):
    @staticmethod
    def forward(ctx, anchor, *tensors):
        ctx.save_for_backward(*tensors)
        return anchor.clone()

    @staticmethod
    def backward(ctx, grad):
        for _ in range(2):
            for i, tensor in enumerate(ctx.saved_tensors):
                grad = grad * 0.5 + (tensor * (i + 1)).sum()
        return grad, *(None for _ in ctx.needs_input_grad[1:])


@dataclass(eq=False)
class Value:
    """A tensor and the stream that wrote it."""

    tensor: torch.Tensor
    stream: torch.Stream


@dataclass(eq=False)
class Graph:
    leaf: torch.Tensor
    anchors: list[Value] = field(default_factory=list)
    retained: bool = False


def options(seed: int, directory: Path) -> dict[str, Any]:
    """For ``offload``. Sizes are of the order of one storage, one graph, everything."""
    choose = random.Random(f"options {seed}").choice
    sizes = [0, 3 * NBYTES, 1 << 30]
    given = {
        "min_bytes": choose([0, 0, NBYTES]),
        "in_flight_bytes": choose(sizes),
        "group_swap": choose([False, True]),
        "to": "host",
    }
    kept = choose(["keep_last_bytes", "keep_last_groups"])
    given[kept] = choose(sizes if kept == "keep_last_bytes" else [0, 0, 1])
    ahead = choose(["prefetch_bytes", "prefetch_groups"])
    given[ahead] = choose(sizes if ahead == "prefetch_bytes" else [0, 1, 2])
    if choose([False, False, True]):
        given |= {"to": directory, "max_host_bytes": choose([4, 16]) * NBYTES}
    return given


class Program:
    """One run. Everything random comes from the seed alone, so that every run of it does the same."""

    def __init__(self, seed: int, streams: list[torch.Stream], tide: Any, control: Any) -> None:
        self.random = random.Random(seed)
        self.schedule = random.Random(f"schedule {seed}")
        self.streams = streams
        self.tide = tide
        self.control = control
        self.recorded = self.random.random() < 0.5
        self.base = (torch.arange(ELEMENTS, dtype=torch.float32) % 17 / 16).to("tide")
        self.main = torch.accelerator.current_stream(0)
        self.pool: list[Value] = []
        self.graphs: list[Graph] = []
        self.kept: list[torch.Tensor] = []
        self.results: list[torch.Tensor] = []

    def run(self) -> list[torch.Tensor]:
        """Every gradient and every read of a saved tensor, as host tensors."""
        inside = self.random.random() < 0.3  # the backwards too
        with contextlib.ExitStack() as stack:
            if inside and self.tide is not None:
                stack.enter_context(self.tide)
            for _ in range(self.random.randint(1, 3)):
                with self._context(again=not inside):
                    for _ in range(self.random.randint(1, 2)):
                        self._forward()
                self._maybe_drop_values(0.8)
                while self.graphs and self.random.random() < 0.4:
                    self._backward()
            self.pool.clear()
            while self.graphs:
                self._backward()
        for device in range(torch.accelerator.device_count()):
            torch.accelerator.synchronize(device)
        self.kept.clear()
        return [result.cpu() for result in self.results]

    def _context(self, again: bool) -> contextlib.AbstractContextManager[Any]:
        return self.tide if again and self.tide is not None else contextlib.nullcontext()

    # --- what is done

    def _forward(self) -> None:
        leaf = (self.base + len(self.graphs)).requires_grad_()
        graph = Graph(leaf, [Value(leaf, self.main)])
        for name in range(self.random.randint(1, 3)):
            grouped = self.random.random() < 0.7
            with contextlib.ExitStack() as stack:
                if grouped and self.tide is not None:
                    stack.enter_context(self.tide.group(f"group {name}"))
                for _ in range(self.random.randint(1, 4)):
                    self._step_streams()
                    self._operation(graph)
                    self._maybe_drop_values(0.2)
        self.graphs.append(graph)

    def _operation(self, graph: Graph) -> None:
        stream = self.random.choice(self.streams)
        kind = self.random.choice(["save", "save", "mul", "sin", "tanh"])
        inputs = [self._any_view(stream) for _ in range(self.random.randint(1, 3))]
        factor = self._any_storage(stream)
        anchor = self._used(graph.anchors[-1], stream)
        with stream:
            if kind == "save":
                result = _Save.apply(anchor, *inputs)
            elif kind == "mul":
                result = anchor * factor
            else:
                result = getattr(torch, kind)(anchor)
        graph.anchors.append(Value(result, stream))

    def _backward(self) -> None:
        self._step_streams()
        graph = self.random.choice(self.graphs)
        act = self.random.choice(["run", "run", "run", "again", "part", "read", "drop"])
        if act == "drop" and not self.recorded:
            torch.accelerator.synchronize(0)
        if act == "read":
            return self._read_saved(graph)
        if act != "drop":
            last = self.random.randrange(1, len(graph.anchors)) if act == "part" else -1
            output = graph.anchors[last].tensor
            retain = act != "run" or not self.recorded
            ones = torch.ones_like(self._used(graph.anchors[last], self.main))
            grads = torch.autograd.grad(output, graph.leaf, ones, retain_graph=retain)
            self.results.append(grads[0])
        if act in ("run", "drop"):
            self.graphs.remove(graph)
            if not self.recorded and act == "run":
                self.kept.extend(value.tensor for value in graph.anchors)

    def _read_saved(self, graph: Graph) -> None:
        """Outside of a backward, on any stream."""
        stream = self.random.choice(self.streams)
        value = self.random.choice(graph.anchors[1:])
        node = value.tensor.grad_fn
        names = ("saved_tensors", "_saved_other", "_saved_self", "_saved_result")
        name = next(name for name in names if hasattr(type(node), name))
        stream.wait_stream(value.stream)
        with stream:
            saved = getattr(node, name)
            saved = saved[0] if name == "saved_tensors" else saved
            host = torch.empty(saved.shape).pin_memory()
            host.copy_(saved.detach(), non_blocking=True)
        if self.recorded:
            saved.record_stream(stream)
        self.results.append(host.detach())

    # --- what it is done with

    def _any_storage(self, stream: torch.Stream) -> torch.Tensor:
        if not self.pool or self.random.random() < 0.4:
            on = self.random.choice(self.streams)
            number = self.random.randint(1, 50)
            on.wait_stream(self.main)
            with on:
                made = self.base * number
                if self.random.random() < 0.5:
                    made = made.clone()
            self.pool.append(Value(made, on))
        return self._used(self.random.choice(self.pool), stream)

    def _any_view(self, stream: torch.Stream) -> torch.Tensor:
        whole = self._any_storage(stream)
        begin = self.random.randrange(ELEMENTS)
        step = self.random.randint(1, 4)
        views = [
            whole,
            whole[begin:],
            whole[begin::step],
            whole.view(15, 20).t(),
            whole[begin : begin + 1].expand(5),
        ]
        return self.random.choice(views)

    def _used(self, value: Value, stream: torch.Stream) -> torch.Tensor:
        if value.stream != stream:
            stream.wait_stream(value.stream)
            if self.recorded:
                value.tensor.record_stream(stream)
        return value.tensor

    def _maybe_drop_values(self, chance: float) -> None:
        if self.random.random() < chance:
            self.random.shuffle(self.pool)
            del self.pool[: self.random.randint(0, len(self.pool))]

    def _step_streams(self) -> None:
        """Only with offload, and not of the program: the device may run what is queued at any time."""
        if self.tide is None:
            return
        streams = [copy_stream(to_device) for to_device in (False, True)] + self.streams
        for _ in range(self.schedule.choice([0, 0, 1, 2, 5])):
            self.control.step(self.schedule.choice(streams))
