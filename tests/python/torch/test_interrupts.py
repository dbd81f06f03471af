"""Exceptions out of signal handlers, such as Ctrl-C, may cut Ebbtide's own code short at any instruction."""

from __future__ import annotations

import contextlib
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import DEVICE, assert_at_rest, assert_loaded
from torch.autograd.graph import saved_tensors_hooks
from torch_support import same_bits

import ebbtide.torch as ebb
from ebbtide import process
from ebbtide.errors import EbbtideError
from ebbtide.transfers import Transfers

# An interrupt inside torch's code for a default device leaves that half done.
NAMES_ITS_DEVICE = True


@pytest.fixture(params=[KeyboardInterrupt, TimeoutError])
def interrupting(request: pytest.FixtureRequest) -> Iterator[type[BaseException]]:
    """What the handler of SIGALRM raises."""

    def handler(*_: object) -> None:
        raise request.param

    before = signal.signal(signal.SIGALRM, handler)
    yield request.param
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    # An interrupt inside torch's own __exit__ leaves its hooks pushed.
    while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()


def forward(x: torch.Tensor) -> torch.Tensor:
    y = x
    for _ in range(20):
        y = (y @ x).tanh() * 0.9
        y = y + y.sin()
    return y.sum()


def leave_where_python_did_not(tide: ebb.Offload) -> None:
    """An exception at the first instruction of ``__exit__`` is one before it, and the context is still entered."""
    scopes = tide._entered.scopes
    while scopes:
        scopes.pop().exit()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("to", ["disk", "host"])
def test_an_interrupt_reaches_the_caller_and_later_steps_are_equal(
    interrupting: type[BaseException], tmp_path: Path, to: str
) -> None:
    """Wherever it comes. Memory under a running copy stays alive: no crash."""
    x = torch.randn(130, 130, device=DEVICE, requires_grad=True)
    expected = torch.autograd.grad(forward(x), x)[0]
    # A device that is not waited for may seem to finish no copy.
    in_flight = {} if DEVICE == "cpu" else {"in_flight_bytes": "256KiB"}
    tide = ebb.offload(
        to=tmp_path if to == "disk" else "host", min_bytes=0, keep_last_bytes=0, **in_flight
    )
    delays = random.Random(0)
    interrupted = 0
    for _ in range(150):
        loss = None
        try:
            signal.setitimer(signal.ITIMER_REAL, delays.random() * 0.02 + 1e-4)
            with tide:
                loss = forward(x)
            found = torch.autograd.grad(loss, x)[0]
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert same_bits(found, expected)
        except interrupting:
            interrupted += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            leave_where_python_did_not(tide)
    assert interrupted > 20
    for _ in range(2):
        with tide:
            loss = forward(x)
        assert same_bits(torch.autograd.grad(loss, x)[0], expected)
    assert_loaded(tide)
    del loss
    assert_at_rest(tide)


class Interrupting:
    """``Copies`` that raises as the n-th copy was handed over."""

    def __init__(self, copies: Any, number: int) -> None:
        self.copies = copies
        self._left = number

    def __getattr__(self, name: str) -> Any:
        return getattr(self.copies, name)

    def submit(self, *arguments: Any) -> None:
        self.copies.submit(*arguments)
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt


@pytest.mark.skipif(DEVICE != "cpu", reason="copies of a device are not handed to a thread")
@pytest.mark.parametrize("number", [1, 2, 25, 60, 110])
def test_interrupt_as_a_copy_is_handed_over(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The copy is queued when the exception comes: it is neither lost nor reported twice."""
    x = torch.randn(64, 64, requires_grad=True)
    expected = torch.autograd.grad(forward(x), x)[0]
    tide = ebb.offload(to="host", min_bytes=0, keep_last_bytes=0, prefetch_bytes=0)
    transfers = tide._session.transfers
    copies = transfers.copies
    executor = process.executor()

    def wait(self: Any, copy: int) -> None:
        executor.wait(copy, copies)
        self.settle()

    loss = None
    with monkeypatch.context() as patch:
        patch.setattr(transfers, "copies", Interrupting(copies, number))
        patch.setattr(type(transfers), "wait", wait)
        with pytest.raises(KeyboardInterrupt):
            with tide:
                loss = forward(x)
            torch.autograd.grad(loss, x)
    loss = None
    with tide:
        loss = forward(x)
    assert same_bits(torch.autograd.grad(loss, x)[0], expected)
    assert_loaded(tide)
    loss = None
    assert_at_rest(tide)


_ANY = [KeyboardInterrupt, TimeoutError, RecursionError]


def raising_once(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, error: type[BaseException]
) -> None:
    """As where the exception comes at the first instruction of the method."""
    original = getattr(owner, name)

    def method(self: Any, *arguments: Any) -> Any:
        monkeypatch.setattr(owner, name, original)
        raise error

    monkeypatch.setattr(owner, name, method)


@pytest.mark.parametrize("error", _ANY)
@pytest.mark.parametrize("method", ["await_load", "copy_by_threads", "settle", "wait"])
@pytest.mark.parametrize("prefetch_bytes", [0, 1 << 20])
def test_a_backward_that_was_cut_short_runs_again(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException], method: str, prefetch_bytes: int
) -> None:
    """Or says that what it needs is lost: it does not wait for ever."""
    x = torch.randn(64, 64, device=DEVICE, requires_grad=True)
    expected = torch.autograd.grad(forward(x), x)[0]
    tide = ebb.offload(to="host", min_bytes=0, keep_last_bytes=0, prefetch_bytes=prefetch_bytes)
    with tide:
        loss = forward(x)
    tide.synchronize()
    with monkeypatch.context() as patch:
        raising_once(patch, Transfers, method, error)
        with contextlib.suppress(error):
            torch.autograd.grad(loss, x, retain_graph=True)
    with contextlib.suppress(EbbtideError):
        assert same_bits(torch.autograd.grad(loss, x)[0], expected)
    with tide:
        loss = forward(x)
    assert same_bits(torch.autograd.grad(loss, x)[0], expected)
    loss = None
    assert_at_rest(tide)


def test_an_entry_that_nobody_leaves_ends_with_its_object() -> None:
    """So that what a later call leaves behind is given up."""
    tide = ebb.offload(to="host", device=DEVICE)
    session = tide._session
    entered = session.begin_epoch()
    session.transfers.cut_short()
    session.begin_epoch().end()
    assert session.transfers.interrupted  # somebody may be inside
    del entered
    session.begin_epoch().end()
    assert not session.transfers.interrupted


def test_hooks_that_an_interrupted_entry_left_pushed_move_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tide = ebb.offload(to="host", min_bytes=0, keep_last_bytes=0)
    enter = saved_tensors_hooks.__enter__

    def interrupted(self: saved_tensors_hooks) -> None:
        enter(self)
        raise KeyboardInterrupt

    x = torch.randn(64, 64, device=DEVICE, requires_grad=True)
    with monkeypatch.context() as patch:
        patch.setattr(saved_tensors_hooks, "__enter__", interrupted)
        with pytest.raises(KeyboardInterrupt), tide:
            pass
    tide._session.transfers.cut_short()
    with tide:
        pass
    assert not tide._session.transfers.interrupted  # nobody is taken to be inside
    try:
        found = torch.autograd.grad(forward(x), x)[0]
    finally:
        torch._C._autograd._pop_saved_tensors_default_hooks()
    assert same_bits(found, torch.autograd.grad(forward(x), x)[0])
    assert tide.stats().storages == 0
