"""SwapManager: names, the order of calls, several forwards of a group in flight."""

from __future__ import annotations

import contextvars
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from harness import Hyper
from torch_layers import blocks, wrapped
from torch_support import assert_same_bits
from training import gradients, make_input

import ebbtide.hyper_parallel as hp
from ebbtide.errors import UsageError


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def plain_gradients(*seeds: int) -> Any:
    plain = blocks(2)
    for seed in seeds:
        plain(make_input(seed=seed)).square().mean().backward()
    return gradients(plain)


def forward(hyper: Hyper, model: torch.nn.Module, name: str, seed: int = 1) -> torch.Tensor:
    with hyper.manager.group_context(name):
        return model(make_input(seed=seed)).square().mean()


def offload(hyper: Hyper, name: str) -> None:
    hyper.manager.launch_offload(name)
    hyper.manager.wait_offload(name)


def test_it_is_one_object() -> None:
    assert hp.SwapManager() is hp.SwapManager()


def test_a_schedule(hyper: Hyper) -> None:
    model, manager = wrapped(blocks(2), hyper), hyper.manager
    with quiet():
        for _ in range(3):
            hp.reset_stats()
            model.zero_grad(set_to_none=True)
            loss = forward(hyper, model, "a")
            assert manager.active_group_count() == 1
            offload(hyper, "a")
            assert hyper.stats().device_bytes == 0
            manager.launch_load("a")
            manager.wait_load("a")
            loss.backward()
            manager.release_group_storage("a")
            stats = hyper.stats()
            assert stats.d2h_bytes == stats.h2d_bytes == stats.unique_bytes > 0, stats
            assert stats.prefetch_misses == 0, stats
            assert_same_bits(gradients(model), plain_gradients(1))
            del loss
            hyper.assert_at_rest()


def test_nothing_leaves_before_it_is_told_to(hyper: Hyper) -> None:
    model = wrapped(blocks(2), hyper)
    loss = forward(hyper, model, "a")
    loss.backward()
    assert hyper.stats().d2h_bytes == 0
    assert_same_bits(gradients(model), plain_gradients(1))
    del loss
    hyper.assert_at_rest()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("loads", [True, False])
def test_two_launches_before_a_load(hyper: Hyper, order: tuple[int, int], loads: bool) -> None:
    model, manager = wrapped(blocks(2), hyper), hyper.manager
    # Loads are launched for the oldest: where the newest comes first, one is launched too often.
    with quiet() if order == (0, 1) or not loads else pytest.warns(match="loaded already"):
        losses = []
        for i in range(2):
            losses.append(forward(hyper, model, "a", seed=i))
            offload(hyper, "a")
        for i in order:
            if loads:
                manager.launch_load("a")
                manager.wait_load("a")
            losses[i].backward()
        losses.clear()
    assert_same_bits(gradients(model), plain_gradients(*order))
    stats = hyper.stats()
    assert stats.d2h_bytes == stats.h2d_bytes == stats.unique_bytes > 0, stats
    hyper.assert_at_rest()


WRONG_ORDERS = {
    "wait before launch": (["wait_offload", "launch_offload"], "launch_offload first"),
    "launched twice": (["launch_offload", "launch_offload"], "launched already"),
    "load of what was never launched": (["launch_load"], "nothing of it was offloaded"),
    "wait for a load that was never launched": (
        ["launch_offload", "wait_offload", "wait_load"],
        "launch_load first",
    ),
    "loaded twice": (
        ["launch_offload", "wait_offload", "launch_load", "launch_load"],
        "loaded already",
    ),
}


@pytest.mark.parametrize("case", WRONG_ORDERS)
def test_wrong_orders_warn_and_backward_is_right(hyper: Hyper, case: str) -> None:
    calls, text = WRONG_ORDERS[case]
    model = wrapped(blocks(2), hyper)
    loss = forward(hyper, model, "a")
    with pytest.warns(RuntimeWarning, match=f"group 'a': .*{text}.*its forwards are") as caught:
        for call in calls:
            getattr(hyper.manager, call)("a")
    assert len(caught) == 1
    assert caught[0].filename == __file__
    loss.backward()
    assert_same_bits(gradients(model), plain_gradients(1))
    del loss
    hyper.assert_at_rest()


@pytest.mark.parametrize("name", ["  ", "two\nlines", 3])
def test_names(hyper: Hyper, name: Any) -> None:
    with pytest.raises(UsageError, match="is no name of a group"):
        hyper.manager.ensure_group(name)


def test_the_current_group(hyper: Hyper) -> None:
    manager = hyper.manager
    assert manager.get_current_group_name() is None
    with manager.group_context("outer"):
        with pytest.raises(ZeroDivisionError), manager.group_context("inner"):
            assert manager.get_current_group_name() == "inner"
            raise ZeroDivisionError
        assert manager.get_current_group_name() == "outer"
        seen: list[Any] = []
        thread = threading.Thread(target=lambda: seen.append(manager.get_current_group_name()))
        thread.start()
        thread.join()
        assert seen == [None]
    assert manager.get_current_group_name() is None

    def set_and_read() -> str | None:
        manager.set_current_group_name("mine")
        return manager.get_current_group_name()

    assert contextvars.copy_context().run(set_and_read) == "mine"
    assert manager.get_current_group_name() is None
    manager.set_current_group_name("mine")
    manager.set_current_group_name(None)
    assert manager.get_current_group_name() is None
    assert not manager.is_last_group("mine")


@pytest.mark.parametrize("when", ["saving", "launched", "away", "loading", "loaded"])
def test_aborted_groups_still_have_a_backward(hyper: Hyper, when: str) -> None:
    model, manager = wrapped(blocks(2), hyper), hyper.manager
    loss = forward(hyper, model, "a")
    calls = ["saving", "launch_offload", "wait_offload", "launch_load", "wait_load"]
    states = ["saving", "launched", "away", "loading", "loaded"]
    for call in calls[1 : states.index(when) + 1]:
        getattr(manager, call)("a")
    manager.abort_group("a")
    assert manager.active_group_count() == 0
    with quiet():
        manager.launch_load("a")
        manager.wait_load("a")
    loss.backward()
    assert_same_bits(gradients(model), plain_gradients(1))
    del loss
    hyper.assert_at_rest()


def test_released_storages_can_be_loaded_again(hyper: Hyper) -> None:
    model, manager = wrapped(blocks(2), hyper), hyper.manager
    loss = forward(hyper, model, "a")
    offload(hyper, "a")
    manager.launch_load("a")
    manager.wait_load("a")
    manager.release_group_storage("a")
    assert hyper.stats().device_bytes == 0
    with quiet():
        manager.launch_load("a")
        manager.wait_load("a")
    loss.backward()
    assert_same_bits(gradients(model), plain_gradients(1))
    stats = hyper.stats()
    assert stats.h2d_bytes == 2 * stats.d2h_bytes > 0, stats
    del loss
    hyper.assert_at_rest()


def test_nothing_grows_over_200_steps_of_two_micro_batches(hyper: Hyper) -> None:
    model, manager = wrapped(blocks(1), hyper), hyper.manager
    with quiet():
        for step in range(200):
            losses = []
            for i in range(2):
                losses.append(forward(hyper, model, "a", seed=i))
                offload(hyper, "a")
            for loss in losses:
                if step % 3:
                    manager.launch_load("a")
                    manager.wait_load("a")
                loss.backward()
            losses.clear()
            del loss
            if step % 50 == 10:
                hyper.assert_at_rest()
                assert not manager._groups["a"]._runs
    hyper.assert_at_rest()


def test_threads_with_groups_of_their_own(hyper: Hyper) -> None:
    found: dict[int, Any] = {}

    models = [wrapped(blocks(2), hyper) for _ in range(3)]

    def work(index: int) -> None:
        model = models[index]
        for _ in range(4):
            model.zero_grad(set_to_none=True)
            loss = forward(hyper, model, f"thread {index}")
            offload(hyper, f"thread {index}")
            hyper.manager.launch_load(f"thread {index}")
            loss.backward()
            del loss
        found[index] = gradients(model)

    right = plain_gradients(1)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(3):
        assert_same_bits(found[index], right)
    hyper.assert_at_rest()


def test_added_storages(hyper: Hyper) -> None:
    manager = hyper.manager
    x = make_input().requires_grad_()
    with manager.group_context("added"):
        y = hp.swap(lambda x: x.sin().exp(), x, **hyper.options)
        manager.add_storage("added", [y], **hyper.options)
    offload(hyper, "added")
    y.sum().backward()
    assert torch.equal(x.grad, (x.cos() * x.sin().exp()).detach())  # type: ignore[arg-type]
    del y
    hyper.assert_at_rest()


def test_names_under_other_hooks_in_a_group_warn(hyper: Hyper) -> None:
    """Hooks are left in the order they were entered in: those inside of the group's must go first."""
    x = make_input().requires_grad_()
    with hyper.manager.group_context("hooked"), torch.autograd.graph.save_on_cpu():
        with pytest.warns(RuntimeWarning, match="outside of recomputed regions and of other"):
            y = hp.swap_tensor_wrapper(x.sin(), **hyper.options)
        y = y * y
    y.sum().backward()
    assert torch.equal(x.grad, (2 * x.sin() * x.cos()).detach())  # type: ignore[arg-type]
    del y
    hyper.assert_at_rest()
