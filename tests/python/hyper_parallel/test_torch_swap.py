"""swap, async_save_on_cpu and swap_tensor_wrapper on PyTorch."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import warnings
import weakref

import pytest
import torch
from harness import Hyper
from support import DEVICE
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch_layers import assert_equal_and_moved, blocks, expected, train
from torch_support import assert_same_bits
from training import make_input

import ebbtide.hyper_parallel as hp
from ebbtide.hyper_parallel import counted


def test_every_layer_under_swap(hyper: Hyper) -> None:
    model = blocks()

    def forward(x: torch.Tensor) -> torch.Tensor:
        for block in model:
            x = hp.swap(block, x, **hyper.options)
        return x

    for _ in range(2):
        hp.reset_stats()
        assert_same_bits(train(model, make_input(), forward), expected())
        stats = hyper.stats()
        # But for the model's input, which the caller holds, and what was saved last.
        assert stats.d2h_bytes == stats.h2d_bytes > stats.unique_bytes * 0.9, stats
        hyper.assert_at_rest()


def test_the_bare_context_around_a_whole_model(hyper: Hyper) -> None:
    model = blocks()
    with hp.async_save_on_cpu(**hyper.options):
        y = model(make_input())
    y.square().mean().backward()
    found = [y.detach(), *(p.grad for p in model.parameters())]
    assert_same_bits(found, expected())
    assert hyper.stats().h2d_bytes > 0
    del y
    hyper.assert_at_rest()


def test_parameters_of_the_function_and_of_a_bound_method_stay(hyper: Hyper) -> None:
    model = blocks(1)
    for function in (model, model.forward):
        hp.reset_stats()
        y = hp.swap(function, make_input(), **hyper.options)
        # Views of weights that nothing marks as such: found by the storages of the module.
        assert hyper.stats().kept["parameter"] > 0
        y.sum().backward()
        del y
        hyper.assert_at_rest()


def test_what_layers_share_is_one_entry_for_the_forward_and_another_for_the_next(
    hyper: Hyper,
) -> None:
    first = hp.swap_wrapper(torch.nn.ReLU(), **hyper.options)
    second = hp.swap_wrapper(torch.nn.Tanh(), **hyper.options)
    third = hp.swap_wrapper(lambda x: x * x, **hyper.options)
    x = make_input().requires_grad_()
    # tanh's result is saved by tanh, and twice by the product.
    y = third(second(first(x))) + third(second(first(x)))
    stats = hyper.stats()
    assert (stats.storages, stats.exact_duplicates) == (4, 4), stats
    y.sum().backward()
    del y
    hyper.assert_at_rest()


def test_static_input_written_without_a_counter_between_two_forwards(hyper: Hyper) -> None:
    layer = hp.swap_wrapper(lambda x, w: x * w, **hyper.options)
    w = torch.ones(64, device=DEVICE, requires_grad=True)
    buffer = torch.full((64,), 2.0, device=DEVICE)
    layer(buffer, w).sum().backward()
    buffer.data.fill_(3.0)
    layer(buffer, w).sum().backward()
    assert w.grad is not None
    assert w.grad.tolist() == [5.0] * 64
    hyper.assert_at_rest()


@pytest.mark.parametrize("enum", [hp.CheckpointPolicy, torch.utils.checkpoint.CheckpointPolicy])
def test_policies_answer_by_tensor(hyper: Hyper, enum: type) -> None:
    seen = []
    swap_member = getattr(enum, "MUST_SWAP", hp.CheckpointPolicy.MUST_SWAP)

    def policy(tensor: torch.Tensor) -> object:
        seen.append(tensor.shape)
        return swap_member if len(seen) % 2 else enum.MUST_SAVE  # type: ignore[attr-defined]

    model = blocks(1)
    found = train(
        model, make_input(), lambda x: hp.swap(model, x, policy_fn=policy, **hyper.options)
    )
    assert_same_bits(found, expected(1))
    stats = hyper.stats()
    assert stats.kept["policy"] == len(seen) // 2 > 0
    assert stats.h2d_bytes > 0
    hyper.assert_at_rest()


@pytest.mark.parametrize("answer", [None, True, "MUST_SWAP", hp.CheckpointPolicy.PREFER_SAVE])
def test_other_answers_are_refused_by_name(hyper: Hyper, answer: object) -> None:
    x = make_input().requires_grad_()
    with pytest.raises(RuntimeError) as error:
        hp.swap(torch.sin, x, policy_fn=lambda _: answer, **hyper.options)
    assert str(error.value).startswith("[swap] policy_fn answered ")
    assert (str(answer) if not isinstance(answer, str) else answer) in str(error.value)
    with pytest.raises(ZeroDivisionError):
        hp.swap(torch.sin, x, policy_fn=lambda _: 1 / 0, **hyper.options)
    error = None  # type: ignore[assignment]
    assert torch.equal(hp.swap(torch.sin, x, **hyper.options), x.sin())
    hyper.assert_at_rest()


def test_nothing_happens_where_nothing_is_recorded(hyper: Hyper) -> None:
    model = blocks(1)
    with torch.no_grad():
        hp.swap(model, make_input(), **hyper.options)
    assert hyper.stats().saved_tensors == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_of_torchs_checkpoint(hyper: Hyper, reentrant: bool) -> None:
    model = blocks(2)

    def region(x: torch.Tensor) -> torch.Tensor:
        return hp.swap(model, x, **hyper.options)

    x = make_input().requires_grad_()
    y = torch_checkpoint(region, x, use_reentrant=reentrant)
    y.square().mean().backward()
    plain = blocks(2)
    other = make_input().requires_grad_()
    plain(other).square().mean().backward()
    assert_same_bits(
        [x.grad, *(p.grad for p in model.parameters())],
        [other.grad, *(p.grad for p in plain.parameters())],
    )
    del y
    hyper.assert_at_rest()


def test_a_session_goes_with_its_pool_and_its_tickets(hyper: Hyper) -> None:
    def sessions() -> int:
        return len(counted.live_sessions())

    before = sessions()
    pool = hp.PinnedMemoryPool("64MiB")
    x = make_input().requires_grad_()
    y = hp.swap(torch.sin, x, cpu_pool=pool)
    assert sessions() == before + 1
    gone = weakref.ref(pool)
    del pool
    assert gone() is None
    y.sum().backward()
    del y
    hyper.assert_at_rest()
    assert sessions() == before


@pytest.mark.parametrize("next_call", ["forward", "backward"])
def test_after_an_interrupt_it_recovers_at_the_next_call(hyper: Hyper, next_call: str) -> None:
    x = make_input().requires_grad_()
    y = hp.swap(torch.sin, x, **hyper.options)
    session = next(iter(hyper.options["cpu_pool"].sessions.values())).session
    session.transfers.cut_short()
    if next_call == "forward":
        hp.swap(torch.sin, x, **hyper.options)
    else:
        y.sum().backward()
    assert not session.transfers.interrupted
    y.sum().backward(retain_graph=True) if next_call == "forward" else None
    del y
    hyper.assert_at_rest()


def test_an_interpreter_that_ends_with_everything_alive() -> None:
    script = """
import torch
import ebbtide.hyper_parallel as hp
pools = [None, hp.PinnedMemoryPool("1MiB")]
x = torch.ones(1 << 12, requires_grad=True)
manager = hp.SwapManager()
layers = [hp.swap_wrapper(torch.nn.Sigmoid(), cpu_pool=pool) for pool in pools]
manager.set_forward_prefetch_layer(*layers)
kept = layers[1](layers[0](x))
with manager.group_context("open"):
    more = hp.swap(torch.sin, x * 2)
manager.launch_offload("open")
torch.kept = kept, more, layers, pools
"""
    environment = os.environ | {"EBBTIDE_DEVICE": "cpu", "EBBTIDE_KEEP_LAST_BYTES": "0"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_one_pool_is_one_cap(hyper: Hyper) -> None:
    pool = hp.PinnedMemoryPool("64MiB")
    x = make_input().requires_grad_()
    hp.swap(torch.sin, x, cpu_pool=pool)
    with pytest.warns(RuntimeWarning, match="first used with group_swap=False"):
        hp.swap(torch.sin, x, cpu_pool=pool, group_swap=True)


# --- swap_tensor_wrapper


class Named(torch.nn.Module):
    """Saves two activations; one of them is named."""

    def __init__(self, hyper: Hyper, late: bool = False) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(32, 32, device=DEVICE)
        self.options = hyper.options
        self.late = late

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).sin()
        if self.late:
            z = y.exp()
            found = hp.swap_tensor_wrapper({"y": [y, None, 3]}, **self.options)
        else:
            found = hp.swap_tensor_wrapper({"y": [y, None, 3]}, **self.options)
            z = y.exp()
        assert found["y"][0] is y
        return (z * y).cos()


@pytest.mark.parametrize("late", [False, True])
def test_of_a_layer_only_what_is_named_leaves(hyper: Hyper, late: bool) -> None:
    torch.manual_seed(3)
    model = torch.nn.Sequential(*(Named(hyper, late) for _ in range(3)))
    with pytest.warns(RuntimeWarning, match="no group is current"):
        plain = train(model, make_input())
    hyper.chain(*model)
    for _ in range(3):
        hp.reset_stats()
        assert_same_bits(train(model, make_input()), plain)
        stats = hyper.stats()
        # y of the first two layers: sin's result, saved by the product (and as the input of exp: not at all).
        assert stats.d2h_bytes == stats.h2d_bytes == 2 * 16 * 32 * 4, stats
        hyper.assert_at_rest()


def test_names_do_nothing_where_nothing_is_recorded(hyper: Hyper) -> None:
    x = make_input()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert hp.swap_tensor_wrapper(x, "x") is x


def test_a_layer_that_names_nothing_costs_no_hooks_after_its_first_forward(hyper: Hyper) -> None:
    model = blocks(3)
    hyper.chain(*model)
    train(model, make_input())
    hp.reset_stats()
    assert_same_bits(train(model, make_input()), expected(3))
    assert hyper.stats().saved_tensors == 0


def test_names_in_an_explicit_group_under_a_wrapper(hyper: Hyper) -> None:
    manager = hyper.manager
    x = make_input().requires_grad_()

    def function(x: torch.Tensor) -> torch.Tensor:
        return hp.swap_tensor_wrapper(x.sin(), **hyper.options).exp()

    with manager.group_context("named"):
        y = hp.swap(function, x, **hyper.options)
    manager.launch_offload("named")
    manager.wait_offload("named")
    y.sum().backward()
    assert torch.equal(x.grad, (x.cos() * x.sin().exp()).detach())  # type: ignore[arg-type]
    del y
    hyper.assert_at_rest()


def test_compiled_layers(hyper: Hyper) -> None:
    if DEVICE != "cpu":
        pytest.skip("the test device has no compiler")
    model = blocks(2)
    wrapped = torch.nn.Sequential(*(hp.swap_wrapper(b, **hyper.options) for b in model))
    compiled = torch.compile(wrapped, backend="aot_eager")
    for _ in range(2):
        found = train(wrapped, make_input(), compiled)
        assert_same_bits(found, expected(2))
    assert hyper.stats().d2h_bytes > 0
    torch._dynamo.reset()
    gc.collect()


def test_the_automatic_schedule(hyper: Hyper) -> None:
    assert_equal_and_moved(
        hyper, torch.nn.Sequential(*(hp.swap_wrapper(b, **hyper.options) for b in blocks()))
    )
