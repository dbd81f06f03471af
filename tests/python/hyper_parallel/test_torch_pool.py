"""PinnedMemoryPool: a cap, and blocks for users of their own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from harness import Hyper
from support import DEVICE
from training import make_input

import ebbtide.hyper_parallel as hp
from ebbtide.errors import UsageError


class Event:
    """Done after it was waited for, or ``finish``."""

    def __init__(self) -> None:
        self.done = False
        self.waits = 0

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True
        self.waits += 1


def test_blocks_are_the_size_that_was_asked_for(backend: Any) -> None:
    pool = hp.PinnedMemoryPool("1MiB")
    block = pool.acquire(1000)
    assert (block.dtype, block.shape, block.device.type) == (torch.uint8, (1000,), "cpu")
    assert block.is_pinned() == (DEVICE != "cpu")
    block.fill_(7)
    other = pool.acquire("2KiB")
    other.fill_(1)
    assert block.unique().tolist() == [7]


def test_released_blocks_are_used_again(backend: Any) -> None:
    pool = hp.PinnedMemoryPool("64KiB")
    for _ in range(50):
        block = pool.acquire(40 << 10)
        pool.release(block)
    pool.release(pool.acquire(60 << 10))  # another size: the free one makes room


def test_over_the_cap_it_waits_for_what_is_pending(backend: Any) -> None:
    pool = hp.PinnedMemoryPool("64KiB")
    first, second = pool.acquire(30 << 10), pool.acquire(30 << 10)
    event = Event()
    pool.release(first, event)
    third = pool.acquire(30 << 10)
    assert event.waits == 1
    assert third.data_ptr() == first.data_ptr()
    done = Event()
    done.done = True
    pool.release(second, done)
    pool.acquire(30 << 10)
    assert done.waits == 0


def test_without_a_pending_block_it_is_an_error_with_numbers(backend: Any) -> None:
    pool = hp.PinnedMemoryPool("64KiB")
    block = pool.acquire(40 << 10)
    with pytest.raises(RuntimeError, match=r"40.0 KiB asked, 40.0 KiB acquired .* of 64.0 KiB"):
        pool.acquire(40 << 10)
    pool.release(block)
    with pytest.raises(UsageError, match="not acquired from this pool, or was released"):
        pool.release(block)
    with pytest.raises(UsageError, match="not acquired from this pool"):
        pool.release(torch.empty(3, dtype=torch.uint8))


def test_what_is_offloaded_counts(hyper: Hyper) -> None:
    hyper.use_pool("64KiB")
    pool = hyper.options["cpu_pool"]
    x = make_input(rows=256).requires_grad_()
    y = hp.swap(lambda x: (x * 2).sin(), x, **hyper.options)
    hyper.synchronize()
    assert hyper.stats().host_bytes == 32 << 10
    with pytest.raises(RuntimeError, match="32.0 KiB offloaded"):
        pool.acquire(40 << 10)
    pool.acquire(30 << 10)
    y.sum().backward()
    del y
    hyper.assert_at_rest()


@pytest.mark.parametrize("size", [0, -1, "much", None, 1.5])
def test_caps(size: Any) -> None:
    with pytest.raises(UsageError, match="PinnedMemoryPool"):
        hp.PinnedMemoryPool(size)


def test_copies_are_the_pool_itself() -> None:
    pool = hp.PinnedMemoryPool(1 << 20, align_limit=1 << 30)
    assert copy.deepcopy(pool) is pool
    assert pool.max_host_bytes == 1 << 20 and pool.align_limit == 1 << 30
