"""Whatever fails, nothing is lost: type and message stay, all comes to rest, the next step is equal."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from descriptors import bad_disk, flipped, full_disk, truncated
from support import assert_at_rest, assert_loaded, disk_first
from torch import nn
from torch_support import assert_same_bits
from training import (
    assert_step_equal,
    gradients,
    make_input,
    make_model,
    offload,
    raised_text,
    step,
)

import ebbtide.torch as ebb
from ebbtide import (
    CheckpointPolicy,
    CorruptionError,
    DeviceError,
    InplaceModificationError,
    SpillError,
    UsageError,
)
from ebbtide.torch.framework import TorchFramework


class Odd(Exception):
    """Nothing that torch or Ebbtide would raise."""


class Interrupt(BaseException):
    """As KeyboardInterrupt: not caught by ``except Exception``."""


def nth_call(n: int, act: Callable[[], None]) -> Callable[[torch.Tensor], CheckpointPolicy]:
    calls = iter(range(1, 1 << 30))

    def policy(tensor: torch.Tensor) -> CheckpointPolicy:
        if next(calls) == n:
            act()
        return CheckpointPolicy.MUST_SWAP

    return policy


@pytest.mark.parametrize("kind", [Odd, Interrupt, UsageError])
@pytest.mark.parametrize("n", [1, 3, 10])
def test_policy_raises(n: int, kind: type[BaseException]) -> None:
    def fail() -> None:
        raise kind("the seventh wave")

    model, x = make_model(), make_input()
    tide = offload(model, policy=nth_call(n, fail))
    with raised_text(kind) as text:
        step(model, x, tide)
    assert text == ["the seventh wave"]
    assert_at_rest(tide)
    assert_step_equal(tide, model, x)


def test_policy_answers_nonsense() -> None:
    model, x = make_model(), make_input()
    tide = offload(model, policy=lambda tensor: "swap")
    with raised_text(UsageError) as text:
        step(model, x, tide)
    assert "[OffloadConfig.policy]" in text[0] and "'swap'" in text[0] and "MUST_SWAP" in text[0]
    assert_at_rest(tide)


@pytest.mark.parametrize("place", ["weak", "witness", "view_meta", "storage_ref"])
@pytest.mark.parametrize("n", [1, 4])
def test_pack_fails_half_way(place: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = make_model(), make_input()
    original, calls = getattr(TorchFramework, place), iter(range(1, 1 << 30))

    def failing(self: TorchFramework, *arguments: Any) -> Any:
        if next(calls) == n:
            raise Odd(place)
        return original(self, *arguments)

    monkeypatch.setattr(TorchFramework, place, failing)
    tide = offload(model)
    with raised_text(Odd) as text:
        step(model, x, tide)
    assert text == [place]
    assert_at_rest(tide)
    assert_step_equal(tide, model, x)


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        raise Odd(f"{x.shape[0]} rows")


class Failing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise Odd("forward")


class Spoilt(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return FailingBackward.apply(x)


@pytest.mark.parametrize(("module", "message"), [(Failing, "forward"), (Spoilt, "16 rows")])
@pytest.mark.parametrize("position", [0, 2, 3])
def test_user_code_raises(module: type[nn.Module], message: str, position: int) -> None:
    model, x = make_model(), make_input().requires_grad_()
    broken = nn.Sequential(*model[:position], module(), *model[position:])
    tide = offload(model)
    with raised_text(Odd) as text:
        step(broken, x, tide)
    assert text == [message]
    assert_at_rest(tide)
    assert_step_equal(tide, model, x)


def failing_hook(grad: torch.Tensor) -> None:
    raise Odd("hook")


@pytest.mark.parametrize("kind", [Odd, InplaceModificationError])
def test_what_torch_had_queued_is_dropped(kind: type[Exception]) -> None:
    model, x = make_model(), make_input()
    tide = offload(model)
    with tide:
        hidden = model[0](x)
        queued = hidden * 2
        between = model[1](hidden)
        loss = model[2](between).square().mean() + queued.sum()
    if kind is Odd:
        between.register_hook(failing_hook)
    else:
        with torch.no_grad():
            hidden.add_(1)
    with raised_text(kind):
        loss.backward()
    assert tide.stats().entries > 0
    del hidden, queued, between, loss
    assert_at_rest(tide)


def test_gradient_hook_raises_and_the_graph_lives_on() -> None:
    model, x = make_model(), make_input()
    expected = step(model, x)
    tide = offload(model)
    armed = [True]

    def hook(grad: torch.Tensor) -> None:
        if armed:
            armed.clear()
            raise Odd("once")

    model.zero_grad()
    with tide:
        hidden = model[:2](x)
        hidden.register_hook(hook)
        loss = model[2](hidden).square().mean()
    with raised_text(Odd):
        loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()
    assert_same_bits([loss.detach(), *gradients(model)], expected)
    assert_loaded(tide)
    del loss, hidden
    assert_at_rest(tide)


@disk_first
def test_full_disk_keeps_everything_on_the_device(tmp_path: Path) -> None:
    model, x = make_model(), make_input()
    expected = step(model, x)
    tide = offload(model, to=tmp_path)
    with full_disk(tmp_path), pytest.warns(RuntimeWarning, match="no room") as warned:
        found = step(model, x, tide)
    assert_same_bits(found, expected)
    assert len(warned) == 1  # once, not once per tensor
    assert not warned[0].filename.startswith(str(Path(ebb.__file__).parents[1])), "points at users"
    text = str(warned[0].message)
    assert "max_disk_bytes" not in text, "no cap was reached: raising one would not help"
    assert "[SpillFile.write]" in text and str(tmp_path) in text and "kept['disk_full']" in text
    stats = tide.stats()
    assert stats.kept["disk_full"] > 5 and stats.kept["host_full"] == 0
    assert (stats.d2h_bytes, stats.spilled_bytes, stats.unique_bytes > 0) == (0, 0, True)
    assert_at_rest(tide)
    assert_step_equal(tide, model, x)


@disk_first
def test_third_of_many_copies_fails(tmp_path: Path) -> None:
    model, x = make_model(), make_input()
    expected = step(model, x)
    trouble: list[AbstractContextManager[Any]] = []
    calls = iter(range(1, 1 << 30))

    def policy(tensor: torch.Tensor) -> CheckpointPolicy:
        call = next(calls)
        if call == 8:
            trouble.append(full_disk(tmp_path))
            trouble[0].__enter__()
        if call == 14:
            trouble[0].__exit__(None, None, None)
        return CheckpointPolicy.MUST_SWAP

    tide = offload(model, to=tmp_path, policy=policy)
    with pytest.warns(RuntimeWarning, match="no room"):
        found = step(model, x, tide)
    assert_same_bits(found, expected)
    assert 0 < tide.stats().kept["disk_full"] < tide.stats().storages
    assert_loaded(tide)
    assert_at_rest(tide)
    assert_step_equal(tide, model, x)


READS: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "EIO": (bad_disk, SpillError, "Input/output error"),
    "truncated": (truncated, SpillError, "ends early"),
    "flipped": (flipped, CorruptionError, "not what was written"),
}


@disk_first
@pytest.mark.parametrize("prefetch_bytes", [0, 1 << 20])
@pytest.mark.parametrize("trouble", READS)
def test_load_fails(trouble: str, prefetch_bytes: int, tmp_path: Path) -> None:
    broken, kind, words = READS[trouble]
    model, x = make_model(), make_input()
    expected = step(model, x)
    tide = offload(model, to=tmp_path, prefetch_bytes=prefetch_bytes)
    model.zero_grad()
    with tide:
        loss = model(x).square().mean()
    tide.synchronize()
    with broken(tmp_path), raised_text(kind) as text:
        loss.backward(retain_graph=True)
    assert "[SpillFile.read]" in text[0] and words in text[0] and str(tmp_path) in text[0]
    assert "choose another directory" in text[0]
    # The copy in the file was kept: backward can be run again.
    model.zero_grad()
    loss.backward()
    assert_same_bits([loss.detach(), *gradients(model)], expected)
    assert_loaded(tide)
    del loss
    assert_at_rest(tide)
    assert_step_equal(tide, model, x)


@disk_first
def test_load_error_carries_errno(tmp_path: Path) -> None:
    x = make_input().requires_grad_()
    tide = offload(to=tmp_path)
    with tide:
        loss = x.exp().sin().sum()
    caught = None
    with bad_disk(tmp_path):
        try:
            loss.backward()
        except SpillError as error:
            caught = error.errno
    assert caught == errno.EIO
    del loss
    assert_at_rest(tide)


@contextmanager
def no_memory(monkeypatch: pytest.MonkeyPatch, failures: int) -> Iterator[list[int]]:
    """The next ``failures`` allocations for restored storages fail; hands out their sizes."""
    original: Callable[..., Any] = TorchFramework.allocate
    asked: list[int] = []

    def allocate(self: TorchFramework, nbytes: int, residue: int, device: int) -> Any:
        if len(asked) < failures:
            asked.append(nbytes)
            raise MemoryError("none left")
        return original(self, nbytes, residue, device)

    with monkeypatch.context() as patch:
        patch.setattr(TorchFramework, "allocate", allocate)
        yield asked


@pytest.mark.parametrize("prefetch_bytes", [0, 1 << 20])
def test_no_memory_once_is_tried_again(
    prefetch_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = make_model(), make_input()
    tide = offload(model, prefetch_bytes=prefetch_bytes)
    with no_memory(monkeypatch, 1) as asked:
        assert_step_equal(tide, model, make_input())
    assert len(asked) == 1 and asked[0] > 0
    assert_step_equal(tide, model, x)


def test_no_memory_at_all_says_so_and_keeps_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = make_model(), make_input()
    expected = step(model, x)
    tide = offload(model)
    model.zero_grad()
    with tide:
        loss = model(x).square().mean()
    with no_memory(monkeypatch, 1 << 30) as asked, raised_text(DeviceError) as text:
        loss.backward(retain_graph=True)
    assert asked
    assert "[unpack]" in text[0] and "KiB" in text[0] and "retain_graph=True" in text[0]
    model.zero_grad()
    loss.backward()
    assert_same_bits([loss.detach(), *gradients(model)], expected)
    del loss
    assert_at_rest(tide)


@disk_first
def test_failure_while_leaving_does_not_hide_the_users(tmp_path: Path) -> None:
    model, x = make_model(), make_input()
    tide = offload(model, to=tmp_path, in_flight_bytes=1 << 30)
    with full_disk(tmp_path), pytest.warns(RuntimeWarning), raised_text(Odd) as text, tide:
        held = model(x)
        raise Odd("mine")
    assert text == ["mine"]
    del held
    assert_at_rest(tide)
    assert_step_equal(tide, model, x)


def test_one_object_survives_failures_at_every_save() -> None:
    model, x = make_model(), make_input()
    fail_at = [0]
    calls = [0]

    def policy(tensor: torch.Tensor) -> CheckpointPolicy:
        calls[0] += 1
        if calls[0] == fail_at[0]:
            raise Odd
        return CheckpointPolicy.MUST_SWAP

    tide = offload(model, policy=policy)
    step(model, x, tide)
    saves, calls[0] = calls[0], 0
    for fail_at[0] in range(1, saves + 1):
        with raised_text(Odd):
            step(model, x, tide)
        assert_at_rest(tide)
        calls[0] = 0
    fail_at[0] = 0
    assert_step_equal(tide, model, x)
