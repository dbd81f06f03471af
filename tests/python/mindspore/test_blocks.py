"""A model's blocks as groups of cells: also those whose construct raises, and those that are watched already."""

from __future__ import annotations

import contextlib
import copy

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from support import assert_at_rest

import ebbtide.hyper_parallel as hp
import ebbtide.mindspore as ebb

WIDTH = 64


class Block(nn.Cell):
    def __init__(self, raises: bool) -> None:
        super().__init__()
        self.dense = nn.Dense(WIDTH, WIDTH)
        self.raises = raises

    def construct(self, x: Tensor) -> Tensor:
        x = ops.sin(self.dense(x))
        if self.raises:
            raise ArithmeticError
        return x


class Model(nn.Cell):
    def __init__(self, raises: bool = False) -> None:
        super().__init__()
        self.layers = nn.CellList([Block(raises), Block(raises)])

    def construct(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with contextlib.suppress(ArithmeticError):
                x = layer(x)
        return ops.exp(ops.sin(x * 2))


def make_input() -> Tensor:
    return Tensor(np.random.RandomState(0).randn(8, WIDTH).astype(np.float32))


@pytest.mark.parametrize("raises", [False, True])
def test_what_is_saved_behind_a_block_is_in_no_group(raises: bool) -> None:
    """Also where the block raised."""
    model = Model(raises)
    tide = ebb.offload(model, to="host", min_bytes=0, in_flight_bytes=0, keep_last_groups=0)

    def forward(x: Tensor) -> Tensor:
        with tide:
            return model(x).sum()

    ms.value_and_grad(forward)(make_input())
    in_groups = {group.name: group.storages for group in tide.group_stats()}
    assert list(in_groups) == ["layers.0", "layers.1"] and all(in_groups.values()), in_groups
    assert tide.stats().storages - sum(in_groups.values()) >= 2, in_groups
    assert_at_rest(tide)


def test_blocks_of_a_chain_are_found_and_told_of() -> None:
    """A chain's hooks have changed the classes of its layers, each to one of its own."""
    model = Model()
    hp.SwapManager().set_forward_prefetch_layer(*model.layers)
    tide = ebb.offload(model, to="host", min_bytes=0, in_flight_bytes=0, keep_last_groups=0)
    classes = [type(layer) for layer in model.layers]
    with tide:
        assert [type(copied) for copied in copy.deepcopy(model).layers] == [Block, Block]
        model(make_input())
    assert [group.name for group in tide.group_stats()] == ["layers.0", "layers.1"]
    assert [type(layer) for layer in model.layers] == classes
    hp.SwapManager().unregister_forward_prefetch_hooks(model.layers)
    assert [type(layer) for layer in model.layers] == [Block, Block]
