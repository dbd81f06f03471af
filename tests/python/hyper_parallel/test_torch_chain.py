"""Chains of layers on PyTorch: what the hooks launch, and that nothing but time depends on them."""

from __future__ import annotations

import copy
import itertools
import threading
import warnings
import weakref
from typing import Any

import pytest
import torch
from harness import Hyper
from support import DEVICE
from torch import nn
from torch_layers import assert_equal_and_moved, blocks, chained, expected, train, wrapped
from torch_support import assert_same_bits
from training import gradients, make_input

import ebbtide.hyper_parallel as hp
from ebbtide.errors import UsageError


def moved_by_layer() -> dict[str, tuple[int, int]]:
    from ebbtide.hyper_parallel.counted import live_sessions
    from ebbtide.offload import group_totals

    groups: dict[str, tuple[int, int]] = {}
    for session, _, _ in live_sessions():
        for group in group_totals(session):
            if group.runs:
                groups[group.name] = (group.d2h_bytes, group.h2d_bytes)
    return groups


def test_all_but_the_last_layer_leave_and_come_back(hyper: Hyper) -> None:
    model = chained(hyper)
    for _ in range(3):
        assert_equal_and_moved(hyper, model)
        layers = list(moved_by_layer().values())
        assert len(layers) == 4
        assert all(out == back > 0 for out, back in layers[:3]), layers
        assert layers[3] == (0, 0)
    # Loads are launched by the layer behind, none is waited for on demand.
    assert hyper.stats().prefetch_misses == 0, hyper.stats()


def test_layers_that_are_not_adjacent(hyper: Hyper) -> None:
    model = torch.nn.Sequential(
        *(hp.swap_wrapper(b, **hyper.options) if i % 2 else b for i, b in enumerate(blocks(6)))
    )
    hyper.chain(model[1], model[3], model[5])
    for _ in range(2):
        assert_equal_and_moved(hyper, model, 6)
    assert [out > 0 for out, _ in moved_by_layer().values()] == [True, True, False]


def test_links_may_come_in_any_order_and_twice(hyper: Hyper) -> None:
    model = chained(hyper, 3)
    hyper.manager.set_forward_prefetch_layer(model[1], model[2])
    hyper.manager.set_forward_prefetch_layer(model[0], model[1])
    assert_equal_and_moved(hyper, model, 3)
    with pytest.raises(UsageError, match="order of forward"):
        hyper.manager.set_forward_prefetch_layer(model[2], model[0])
    with pytest.raises(UsageError, match="order of forward"):
        hyper.manager.set_forward_prefetch_layer(model[1], model[1])
    with pytest.raises(UsageError, match="is no module"):
        hyper.manager.set_forward_prefetch_layer(model[1], print)


def test_a_layer_linked_anew_leaves_its_old_chain(hyper: Hyper) -> None:
    model = chained(hyper, 4)
    hyper.manager.set_forward_prefetch_layer(model[0], model[2])
    # 0-2-3 is a chain, and 1 is alone: last of a chain of its own.
    assert_equal_and_moved(hyper, model)
    assert [out > 0 for out, _ in moved_by_layer().values()] == [True, False, True, False]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_micro_batches_in_every_order_of_backward(hyper: Hyper, order: tuple[int, ...]) -> None:
    plain, model = blocks(), chained(hyper)
    gradients_of = []
    for network in (plain, model):
        losses = [network(make_input(seed=i)).square().mean() for i in range(3)]
        for i in order:
            losses[i].backward()
        gradients_of.append(gradients(network))
        del losses
    assert_same_bits(gradients_of[1], gradients_of[0])
    layers = list(moved_by_layer().values())
    assert all(out == back > 0 for out, back in layers[:3]), layers
    assert hyper.stats().prefetch_misses == 0, hyper.stats()
    hyper.assert_at_rest()


def test_gradients_accumulate_over_ragged_batches(hyper: Hyper) -> None:
    plain, model = blocks(), chained(hyper)
    for network in (plain, model):
        for rows in (16, 5, 31):
            network(make_input(rows=rows)).square().mean().backward()
    assert_same_bits(gradients(model), gradients(plain))
    hyper.assert_at_rest()


def test_forwards_without_a_graph_between(hyper: Hyper) -> None:
    model = chained(hyper)
    y = model(make_input())
    with torch.no_grad():
        model(make_input(seed=2))
    model.eval()
    model(make_input(seed=3))  # recorded, and dropped
    model.train()
    y.square().mean().backward()
    assert_same_bits([y.detach(), *gradients(model)], expected())
    del y
    hyper.assert_at_rest()


@pytest.mark.parametrize("failing", range(4))
def test_an_exception_in_a_forward(hyper: Hyper, failing: int) -> None:
    model = chained(hyper)
    inner = model[failing].wrapped
    inner.down.register_forward_hook(_raise_once())
    with pytest.raises(ZeroDivisionError):
        model(make_input())
    assert hyper.manager.get_current_group_name() is None
    hyper.assert_at_rest()
    for _ in range(2):
        assert_equal_and_moved(hyper, model)


@pytest.mark.parametrize("failing", range(4))
def test_ctrl_c_in_a_forward(hyper: Hyper, failing: int) -> None:
    """Torch calls no hooks for it: the layer's group is current until the chain begins again."""
    model = chained(hyper)
    inner = model[failing].wrapped
    inner.down.register_forward_hook(_raise_once(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        model(make_input())
    for _ in range(2):
        assert_equal_and_moved(hyper, model)
    assert hyper.manager.get_current_group_name() is None
    # What is in no chain leaves by itself again.
    assert_equal_and_moved(hyper, wrapped(blocks(), hyper))


def test_ctrl_c_in_a_chain_within_a_layer(hyper: Hyper) -> None:
    first, second = chained(hyper, 2), chained(hyper, 2)
    model = nn.Sequential(first, second)
    hyper.chain(first, second)
    second[1].wrapped.down.register_forward_hook(_raise_once(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        model(make_input())
    hp.reset_stats()
    for _ in range(2):
        plain = nn.Sequential(blocks(2), blocks(2))
        assert_same_bits(train(model, make_input()), train(plain, make_input()))
    assert hyper.stats().d2h_bytes > 0
    assert hyper.manager.get_current_group_name() is None
    hyper.assert_at_rest()


def _raise_once(error: type[BaseException] = ZeroDivisionError) -> Any:
    left = [1]

    def hook(module: Any, args: Any, output: Any) -> None:
        if left and left.pop():
            raise error

    return hook


def test_an_exception_in_a_backward(hyper: Hyper) -> None:
    model = chained(hyper)
    y = model[:2](make_input())
    y.register_hook(lambda _: 1 / 0)
    y = model[2:](y)
    with pytest.raises(ZeroDivisionError):
        y.sum().backward()
    del y
    hyper.assert_at_rest()
    assert_equal_and_moved(hyper, model)


def test_a_backward_that_stops_at_the_second_layer(hyper: Hyper) -> None:
    model = chained(hyper)
    y = model(make_input())
    weight = model[1].down.weight
    (found,) = torch.autograd.grad(y.square().mean(), [weight])
    plain = blocks()
    (right,) = torch.autograd.grad(
        plain(make_input()).square().mean(),
        [plain[1].down.weight],  # type: ignore[union-attr]
    )
    assert_same_bits([found], [right])
    del y
    hyper.assert_at_rest()


def test_two_backwards_over_one_graph(hyper: Hyper) -> None:
    plain, model = blocks(), chained(hyper)
    for network in (plain, model):
        loss = network(make_input()).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        del loss
    assert_same_bits(gradients(model), gradients(plain))
    hyper.assert_at_rest()


class Inputs(torch.nn.Module):
    """Gives back what it was given, beside nothing at all."""

    def forward(self, x: torch.Tensor) -> Any:
        return {"x": x, "nothing": None, "sum": [x.sin()]}


def test_outputs_that_are_leaves_get_no_hook(hyper: Hyper) -> None:
    first, second = (hp.swap_wrapper(Inputs(), **hyper.options) for _ in range(2))
    hyper.chain(first, second)
    x = make_input().requires_grad_()
    for _ in range(3):
        y = first(x)
        second(y["x"])["sum"][0].sum().backward()
        del y
    assert not x._backward_hooks
    hyper.assert_at_rest()


class Pair(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x.sin(), x.exp()


def test_results_that_backward_never_reaches(hyper: Hyper) -> None:
    layers = [hp.swap_wrapper(Pair(), **hyper.options) for _ in range(3)]
    hyper.chain(*layers)
    x = make_input().requires_grad_()
    y = x
    for layer in layers:
        y, _ = layer(y)
    y.sum().backward()
    plain = make_input().requires_grad_()
    plain.sin().sin().sin().sum().backward()
    assert_same_bits([x.grad], [plain.grad])
    del y, _
    hyper.assert_at_rest()


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_inside_of_checkpointed_regions(hyper: Hyper, reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    def forward(network: torch.nn.Sequential) -> list[torch.Tensor | None]:
        x = make_input().requires_grad_()
        y = x
        for layer in network:
            y = checkpoint(layer, y, use_reentrant=reentrant)
        y.square().mean().backward()
        return [x.grad, *gradients(network)]

    # First: what torch imports at the first checkpoint of a process leaves its caller's frame in a reference cycle.
    plain = forward(blocks())
    model = chained(hyper)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        assert_same_bits(forward(model), plain)
        hyper.assert_at_rest()


def test_copies_are_not_in_the_chain(hyper: Hyper) -> None:
    model = chained(hyper)
    other = copy.deepcopy(model)
    assert_same_bits(train(other, make_input()), expected())
    assert moved_by_layer().keys() == {"Block"}  # the automatic schedule
    hyper.assert_at_rest()
    assert_equal_and_moved(hyper, model)


def test_layers_taken_out(hyper: Hyper) -> None:
    model = chained(hyper)
    hyper.manager.unregister_forward_prefetch_layer(model[1])
    assert_equal_and_moved(hyper, model)
    assert [out > 0 for name, (out, _) in moved_by_layer().items() if name != "Block"] == [
        True,
        True,
        False,
    ]
    with pytest.raises(UsageError, match="is in no chain"):
        hyper.manager.unregister_forward_prefetch_layer(model[1])
    hyper.manager.unregister_forward_prefetch_hooks()
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model)
    assert_equal_and_moved(hyper, model)


def test_hooks_taken_away_before_backward(hyper: Hyper) -> None:
    model = chained(hyper)
    y = model(make_input())
    hyper.manager.unregister_forward_prefetch_hooks(list(model))
    y.square().mean().backward()
    assert_same_bits([y.detach(), *gradients(model)], expected())
    del y
    hyper.assert_at_rest()


def test_dropped_layers_leave_no_group(hyper: Hyper) -> None:
    manager = hyper.manager
    before = set(manager._groups)
    model = chained(hyper)
    train(model, make_input())
    assert len(set(manager._groups) - before) == 4
    gone = weakref.ref(model[0])
    del model
    hyper.assert_at_rest()
    assert gone() is None
    assert set(manager._groups) == before


def test_threads_with_chains_of_their_own(hyper: Hyper) -> None:
    if DEVICE != "cpu":
        pytest.skip("order between threads' streams is what tests/python/device is for")
    right = expected()
    models = [chained(hyper) for _ in range(3)]
    found: list[Any] = [None] * 3

    def work(index: int) -> None:
        for _ in range(5):
            found[index] = train(models[index], make_input())

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for results in found:
        assert_same_bits(results, right)
    hyper.assert_at_rest()


def test_nothing_grows_over_200_steps(hyper: Hyper) -> None:
    model = chained(hyper, 3)
    x = make_input(rows=4)
    for step in range(200):
        kept = model(x) if step % 5 == 0 else None  # a graph that is dropped
        del kept
        y = model(x)
        y.sum().backward()
        del y
        if step % 50 == 10:
            hyper.assert_at_rest()
            for group in hyper.manager._groups.values():
                assert not group._runs
    hyper.assert_at_rest()


def test_a_pool_that_runs_out_in_the_middle_of_a_group(hyper: Hyper) -> None:
    hyper.use_pool("20KiB")
    model = chained(hyper)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            hp.reset_stats()
            assert_same_bits(train(model, make_input()), expected())
            stats = hyper.stats()
            assert stats.kept["host_full"] > 0, stats
            assert 0 < stats.peak_host_bytes <= 20 << 10, stats
            hyper.assert_at_rest()
