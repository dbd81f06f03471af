"""Groups as a user sees them: names, nesting, exceptions, and what stays when they are left in an odd way."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref

import pytest
import torch
from support import assert_at_rest
from torch import nn
from torch.utils.hooks import RemovableHandle
from training import make_input, make_model, offload, raised_text

import ebbtide.torch as ebb
from ebbtide.errors import UsageError


def test_what_is_saved_counts_for_the_innermost_group() -> None:
    tide = offload(to="host")
    x = make_input().requires_grad_()
    with tide:
        with tide.group("outer"):
            y = x.sin()
            with tide.group("inner"):
                y = y.exp()
            y = y.cos()
        y = y.tanh().sum()
    y.backward()
    totals = {group.name: group for group in tide.group_stats()}
    assert totals["outer"].runs == totals["inner"].runs == 1
    assert totals["inner"].storages == 1
    assert sum(group.storages for group in totals.values()) < tide.stats().storages
    del y
    assert_at_rest(tide)


def test_a_group_that_is_left_by_an_exception_is_over() -> None:
    tide = offload(to="host")
    x = make_input().requires_grad_()
    with tide:
        with pytest.raises(ZeroDivisionError), tide.group("outer"), tide.group("inner"):
            raise ZeroDivisionError
        y = x.sin().exp().sum()
    assert [group.storages for group in tide.group_stats()] == [0, 0]
    y.backward()
    del y
    assert_at_rest(tide)


@pytest.mark.parametrize("name", ["", "  ", "two\nlines", "\x1b[31mred", 3, None])
def test_names(name: object) -> None:
    tide = offload(to="host")
    with raised_text(UsageError) as text, tide, tide.group(name):  # type: ignore[arg-type]
        pass
    assert text[0].startswith("[offload.group]") and "is no name" in text[0]


def test_outside_of_the_context_and_on_another_thread() -> None:
    tide = offload(to="host")
    texts: list[str] = []

    def enter() -> None:
        with raised_text(UsageError) as text, tide.group("encoder"):
            pass
        texts.extend(text)

    enter()
    with tide:
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
    assert len(texts) == 2 and all("thread" in text for text in texts)


def test_an_interrupted_exit_leaves_no_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    x = make_input()
    model = torch.nn.Sequential(*[torch.nn.Sequential(make_model()) for _ in range(3)])
    tide = ebb.offload(model, device="cpu", to="host", keep_last_groups=0)
    remove, calls = RemovableHandle.remove, []

    def interrupted(handle: RemovableHandle) -> None:
        calls.append(handle)
        if len(calls) == 3:
            raise KeyboardInterrupt
        remove(handle)

    monkeypatch.setattr(RemovableHandle, "remove", interrupted)
    try:
        with tide:
            model(x).sum().backward()
    except KeyboardInterrupt:
        pass
    monkeypatch.setattr(RemovableHandle, "remove", remove)
    for _ in range(2):
        with tide:
            model(x).sum().backward()
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    assert hooks == 0
    alive = weakref.ref(tide)
    del tide
    gc.collect()
    assert alive() is None


def test_a_cap_holds_also_after_another_object_has_filled_the_pool() -> None:
    model, x = make_model(), make_input()
    first = offload(model, to="host")
    with first:
        loss = model(x).sum()
    loss.backward()
    assert first.stats().host_reserved_bytes > 0
    second = offload(model, to="host", max_host_bytes=1)
    with pytest.warns(RuntimeWarning, match="no room"), second:
        loss = model(x).sum()
    loss.backward()
    del loss
    assert second.stats().peak_host_bytes <= 1
    assert second.stats().kept["host_full"] > 0
    ebb.trim()


class Raising(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.block(x)
        raise ArithmeticError


class Catching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Raising(block) for block in make_model(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            with contextlib.suppress(ArithmeticError):
                layer(x)
        return x


def test_what_is_saved_behind_a_block_that_raised_is_in_no_group() -> None:
    """Nor does it wait for the group to end."""
    model, x = Catching(), make_input().requires_grad_()
    tide = offload(model, keep_last_bytes=None, keep_last_groups=0)
    with tide:
        model(x)
        y = (make_input(seed=2).requires_grad_() * 2).sin().exp()
    in_groups = {group.name: group.storages for group in tide.group_stats()}
    assert list(in_groups) == ["layers.0", "layers.1"] and all(in_groups.values())
    # What sin was given, and exp's result.
    assert tide.stats().storages - sum(in_groups.values()) == 2
    y.sum().backward()
    del y
    assert_at_rest(tide)
