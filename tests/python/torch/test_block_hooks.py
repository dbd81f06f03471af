"""Hooks tell when blocks run: in pairs, on every thread, whatever raises, compiled or not."""

from __future__ import annotations

import copy
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from block_nets import LAYERS, Log, Net
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import Block, make_input

from ebbtide.torch.blocks import repeated_blocks, watch


def test_begin_and_end() -> None:
    net, x = Net(), make_input()
    expected = net(x)
    log = Log(net)
    assert torch.equal(net(x), expected)
    assert log.take() == LAYERS
    log.remove()
    log.remove()
    assert torch.equal(net(x), expected)
    assert log.take() == []
    for _, block in log.blocks:
        assert not block._forward_hooks and not block._forward_pre_hooks


def test_before_other_hooks() -> None:
    net, order = Net(), []
    net.layers[0].register_forward_pre_hook(lambda *_: order.append("user"))
    remove = watch(repeated_blocks(net)[:1], order.append, lambda name: order.append("end"))
    net(make_input())
    remove()
    assert order == ["layers.0", "user", "end"]


def test_two_watchers() -> None:
    net, x = Net(), make_input()
    outer = Log(net)
    inner = Log(net)
    net(x)
    inner.remove()
    net(x)
    outer.remove()
    assert inner.take() == LAYERS and outer.take() == LAYERS * 2


class Failing(Block):
    error: BaseException | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        return super().forward(x)


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_a_forward_that_raises(error: BaseException) -> None:
    net, x = Net(Failing(), Failing(), Failing()), make_input()
    log = Log(net)
    net.layers[1].error = error
    for _ in range(2):
        with pytest.raises(type(error)):
            net(x)
    net.layers[1].error = None
    net(x)
    assert log.take() == LAYERS[:2] * 2 + LAYERS
    net.layers[1].error = error
    with pytest.raises(type(error)):
        net(x)
    log.remove()
    assert log.take() == LAYERS[:2]


def test_a_begin_that_raises() -> None:
    net, x = Net(), make_input()
    ended: list[str] = []

    def begin(name: str) -> None:
        if name == "layers.1":
            raise ValueError(name)

    remove = watch(repeated_blocks(net), begin, ended.append)
    with pytest.raises(ValueError, match="layers.1"):
        net(x)
    remove()
    assert ended == ["layers.0"]
    net(x)


def test_an_end_that_raises() -> None:
    net, x = Net(), make_input()
    ended: list[str] = []

    def end(name: str) -> None:
        ended.append(name)
        raise ValueError(name)

    remove = watch(repeated_blocks(net), lambda name: None, end)
    with pytest.raises(ValueError, match="layers.0"):
        net(x)
    remove()
    assert ended == ["layers.0"]


def test_a_block_inside_a_block() -> None:
    """Not what ``repeated_blocks`` finds; yet pairs stay pairs."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.block(x)

    outer, told = Outer(), []
    blocks = [("outer", outer), ("inner", outer.block)]
    remove = watch(blocks, lambda name: told.append(f"+{name}"), lambda name: told.append(name))
    outer(make_input())
    remove()
    assert told == ["+outer", "outer", "+inner", "inner"]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_is_not_told(use_reentrant: bool) -> None:
    class Checkpointed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=use_reentrant)
            return x

    net = Checkpointed()
    log = Log(net)
    loss = net(make_input().requires_grad_()).sum()
    assert log.take() == LAYERS
    loss.backward()
    assert log.take() == []
    log.remove()


def test_threads() -> None:
    net, x = Net(), make_input()
    log = Log(net)
    barrier = threading.Barrier(3)

    def run() -> None:
        barrier.wait()
        for _ in range(20):
            net(x)
        found.append(log.take())

    found: list[list[str]] = []
    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [LAYERS * 20] * 3
    log.remove()


def test_nothing_keeps_the_model() -> None:
    net = Net()
    gone = weakref.ref(net.layers[0])
    remove = watch(repeated_blocks(net), lambda name: None, lambda name: None)
    del net
    assert gone() is None
    remove()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
@pytest.mark.parametrize("removed", [True, False])
def test_copies_tell_nothing(copied: Callable[[nn.Module], nn.Module], removed: bool) -> None:
    net, x = Net(), make_input()
    log = Log(net)
    expected = net(x)
    assert log.take() == LAYERS
    if removed:
        log.remove()
    twin = copied(net)
    assert torch.equal(twin(x), expected)
    assert log.take() == []
    if removed:
        assert not twin.layers[0]._forward_hooks and not twin.layers[0]._forward_pre_hooks
    net(x)
    assert log.take() == ([] if removed else LAYERS)
    log.remove()


def test_a_module_that_takes_no_hooks_leaves_none_behind() -> None:
    block, scripted = Block(), torch.jit.script(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(RuntimeError):
        watch([("a", block), ("b", scripted)], lambda name: None, lambda name: None)
    assert not block._forward_hooks and not block._forward_pre_hooks


# --- compiled


@pytest.fixture
def compiles() -> Iterator[Callable[[], int]]:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield lambda: counters["stats"]["unique_graphs"]
    torch._dynamo.reset()


def test_a_compiled_model_has_no_breaks_and_tells_nothing(compiles: Callable[[], int]) -> None:
    net, x = Net(), make_input()
    expected = net(x)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    for step in range(5):
        log = Log(compiled if step % 2 else net)
        assert torch.equal(compiled(x), expected)
        assert log.take() == []
        log.remove()
    assert compiles() == 1
    for _ in range(3):
        compiled(x)
        log = Log(net)
        compiled(x)
        log.remove()
    assert compiles() <= 2


class Broken(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        torch._dynamo.graph_break()
        return x * 2


def compiled_in_place(net: Net) -> nn.Module:
    for layer in net.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    return net


def compiled_one_by_one(net: Net) -> nn.Module:
    for name, layer in list(net.layers.named_children()):
        setattr(net.layers, name, torch.compile(layer, fullgraph=True, backend="aot_eager"))
    return net


@pytest.mark.parametrize(
    ("block", "compiled"),
    [
        (Block, compiled_one_by_one),
        (Block, compiled_in_place),
        (Broken, lambda net: torch.compile(net, backend="aot_eager")),
    ],
    ids=["one by one", "in place", "broken"],
)
def test_blocks_that_are_called_by_plain_python(
    block: type[Block], compiled: Callable[[Net], nn.Module], compiles: Callable[[], int]
) -> None:
    net, x = Net(block(), block(), block()), make_input()
    expected = net(x)
    runner = compiled(net)
    graphs = []
    for _ in range(3):
        log = Log(runner)
        assert torch.equal(runner(x), expected)
        assert log.take() == LAYERS
        log.remove()
        graphs.append(compiles())
    assert graphs[0] == graphs[2]
