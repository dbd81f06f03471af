"""MindSpore gives parameters their names when cells become attributes; wrapping must not change them."""

from __future__ import annotations

import mindspore
import pytest
from mindspore import nn

import ebbtide.hyper_parallel as hp

WRAPPERS = (hp.swap_wrapper, hp.checkpoint_wrapper)


class Layer(nn.Cell):
    def __init__(self, wrap=lambda cell: cell):
        super().__init__()
        self.attention = wrap(nn.SequentialCell([nn.Dense(2, 2), nn.LayerNorm((2,))]))
        self.perceptron = nn.Dense(2, 2)


class Model(nn.Cell):
    def __init__(self, wrap=lambda cell: cell):
        super().__init__()
        self.layers = nn.CellList([Layer(wrap) for _ in range(2)])


def names(model):
    return [weight.name for weight in model.trainable_params()]


@pytest.mark.parametrize("wrap", WRAPPERS, ids=lambda wrap: wrap.__name__)
def test_wrapped_in_a_model_that_is_there(wrap):
    model, expected = Model(), names(Model())
    for layer in model.layers:
        layer.attention = wrap(layer.attention)
    assert names(model) == expected
    assert [name for name, _ in model.parameters_and_names()] == expected
    nn.SGD(model.trainable_params(), learning_rate=0.1)  # refuses two parameters of one name


@pytest.mark.parametrize("wrap", WRAPPERS, ids=lambda wrap: wrap.__name__)
def test_wrapped_while_the_model_is_made(wrap):
    assert names(Model(wrap)) == names(Model())


def test_a_name_of_the_users_own_is_theirs():
    cell = hp.swap_wrapper(nn.Dense(2, 2))
    cell.weight.name = "mine"
    assert [weight.name for weight in cell.get_parameters()][0] == "mine"
    assert isinstance(cell.weight, mindspore.Parameter)
