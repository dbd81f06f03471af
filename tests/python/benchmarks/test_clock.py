from __future__ import annotations

import pytest
from virtual_clock.clock import Machine, Memory
from virtual_clock.roofline import Host, Link


def machine(**host: float) -> Machine:
    free = {"op_s": 0.0, "pack_s": 0.0, "unpack_s": 0.0, "copy_s": 0.0}
    return Machine(Link(10.0, copy_s=1.0), Host(**{**free, **host}))  # type: ignore[arg-type]


def test_operations_run_in_order_and_after_their_issue() -> None:
    m = machine(op_s=2.0)
    assert [m.op(1.0), m.op(5.0), m.op(1.0)] == [2.0, 4.0, 9.0]
    assert m.compute_end == 10.0
    assert (m.busy_s, m.host_late_s, m.exposed_s) == (7.0, 3.0, 0.0)


def test_the_host_waits_when_too_much_is_queued() -> None:
    m = machine(queued_ops=1)
    m.op(5.0)
    m.op(5.0)
    assert m.now == 0.0
    m.op(5.0)
    assert m.now == 5.0


def test_copies_of_one_direction_run_in_turn_and_both_directions_at_once() -> None:
    m = machine()
    assert m.copy_out(20) == (0.0, 3.0)
    assert m.copy_out(10, [1.0]) == (3.0, 5.0)
    assert m.copy_in(10) == (0.0, 2.0)
    assert m.copy_in(10, [7.0]) == (7.0, 9.0)
    assert (m.d2h.copies, m.d2h.nbytes, m.d2h.busy_s) == (2, 30, 5.0)


def test_a_wait_holds_up_what_is_issued_after_it() -> None:
    m = machine()
    m.op(1.0)
    m.wait_on_compute(4.0)
    assert m.op(1.0) == 4.0
    assert m.exposed_s == 3.0
    assert m.op(1.0) == 5.0
    assert m.exposed_s == 3.0


def test_memory_is_counted_for_host_and_device() -> None:
    memory = Memory()
    first = memory.allocate(10, now=0.0)
    memory.drop(first, now=1.0, compute_end=5.0)  # to be reused in stream order
    second = memory.allocate(7, now=1.0)
    second.start = 5.0
    assert memory.peak == 10
    memory.drop(second, now=1.0, compute_end=9.0)
    assert memory.device_peak() == 10


def test_memory_that_another_stream_uses_is_not_given_out() -> None:
    memory = Memory()
    first = memory.allocate(10, now=0.0)
    first.busy_until = 3.0
    memory.drop(first, now=1.0, compute_end=1.0)
    memory.allocate(7, now=2.0)
    assert memory.peak == 17
    memory.allocate(9, now=3.0)
    assert (memory.nbytes, memory.peak) == (16, 17)


def test_letting_go_too_often_is_an_error() -> None:
    memory = Memory()
    block = memory.allocate(10, now=0.0)
    memory.drop(block, 0.0, 0.0)
    with pytest.raises(AssertionError):
        memory.drop(block, 0.0, 0.0)
