"""MindSpore's recompute, both kinds, with offload inside and around: the gradients without either."""

from __future__ import annotations

from collections.abc import Callable

import mindspore as ms
import numpy as np
import pytest
from harness import Hyper
from mindspore import Tensor, mint, nn

import ebbtide.hyper_parallel as hp
import ebbtide.mindspore as ebb

WIDTH, ROWS, DEPTH = 32, 16, 4
HIDDEN_BYTES = ROWS * WIDTH * 4
Call = Callable[[nn.Cell, Tensor], Tensor]


class Block(nn.Cell):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.up, self.down = nn.Dense(WIDTH, 2 * WIDTH), nn.Dense(2 * WIDTH, WIDTH)
        random = np.random.RandomState(seed)
        for parameter in self.get_parameters():
            values = random.randn(*parameter.shape) * 0.1
            parameter.set_data(Tensor(values.astype(np.float32)))

    def construct(self, x: Tensor) -> Tensor:
        return x + self.down(mint.tanh(self.up(x)))


@pytest.fixture
def blocks() -> nn.CellList:
    return nn.CellList([Block(seed) for seed in range(DEPTH)])


def run(blocks: nn.CellList, call: Call) -> list[np.ndarray]:
    x = Tensor(np.random.RandomState(9).randn(ROWS, WIDTH).astype(np.float32))

    def forward(x: Tensor) -> Tensor:
        for block in blocks:
            x = call(block, x)
        return mint.sum(x * x)

    value, gradients = ms.value_and_grad(forward, None, list(blocks.trainable_params()))(x)
    return [value.asnumpy(), *(gradient.asnumpy() for gradient in gradients)]


def check(blocks: nn.CellList, call: Call) -> None:
    expected = run(blocks, lambda block, x: block(x))
    for _ in range(2):
        for found, wanted in zip(run(blocks, call), expected, strict=True):
            assert np.array_equal(found, wanted)


@pytest.mark.parametrize("way", ["direct", "listed"])
def test_inputs_leave(hyper: Hyper, blocks: nn.CellList, way: str) -> None:
    def call(block: nn.Cell, x: Tensor) -> Tensor:
        if way == "direct":
            return hp.checkpoint(block, x, swap_inputs=True, **hyper.options)
        return hp.checkpoint(lambda xs: block(xs[0]), [x], swap_inputs=True, **hyper.options)

    check(blocks, call)
    stats = hp.stats()
    assert stats.storages == 2 * DEPTH
    # The last input is its caller's; the two before it are still known when backward begins.
    assert stats.d2h_bytes == stats.h2d_bytes == 2 * (DEPTH - 3) * HIDDEN_BYTES
    assert stats.entries == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_swap_around(hyper: Hyper, blocks: nn.CellList, reentrant: bool) -> None:
    def call(block: nn.Cell, x: Tensor) -> Tensor:
        def body(x: Tensor) -> Tensor:
            return ms.recompute(block, x, use_reentrant=reentrant)

        return hp.swap(body, x, **hyper.options)

    check(blocks, call)
    assert hp.stats().entries == 0


def test_swap_inside(hyper: Hyper, blocks: nn.CellList) -> None:
    def call(block: nn.Cell, x: Tensor) -> Tensor:
        def body(x: Tensor) -> Tensor:
            return hp.swap(block, x, **hyper.options)

        return ms.recompute(body, x, use_reentrant=False)

    check(blocks, call)
    assert hp.stats().entries == 0


@pytest.mark.parametrize("only", ["saved", "layer_inputs"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_offload_around(hyper: Hyper, blocks: nn.CellList, reentrant: bool, only: str) -> None:
    """The reentrant kind holds its inputs itself: hooks are not shown them."""
    tide = ebb.offload(blocks, to="host", only=only, min_bytes=0, keep_last_bytes=0)

    def call(block: nn.Cell, x: Tensor) -> Tensor:
        with tide:
            return ms.recompute(block, x, use_reentrant=reentrant)

    check(blocks, call)
    stats = tide.stats()
    assert (stats.storages > 0) == (only == "saved" or not reentrant)
    assert stats.entries == 0
