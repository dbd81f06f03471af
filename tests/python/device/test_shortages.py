"""Too little memory, a full queue, a lost device, a graph capture: stated errors or none, and training goes on."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from types import ModuleType

import pytest
from faulty_steps import STATED, Step, no_leaks, offload
from saving import NBYTES, NEXT_BLOCK, assert_all_at_rest

import ebbtide.torch as ebb
from ebbtide import transfers

LAYOUTS = [{}, {"group_swap": True}, {"in_flight_bytes": 1 << 30}]
pytestmark = pytest.mark.filterwarnings("ignore:.*no room for")


@pytest.fixture
def step(control: ModuleType) -> Iterator[Step]:
    gc.collect()
    gc.disable()
    yield Step(control)
    gc.enable()


@pytest.mark.parametrize("nth", range(1, 4))
@pytest.mark.parametrize("options", LAYOUTS, ids=str)
def test_page_locked_memory_is_refused(
    options: dict, nth: int, step: Step, control: ModuleType
) -> None:
    ebb.trim()
    # Slabs of one block each, so that there are several to refuse.
    tide = offload(max_host_bytes=5 * NEXT_BLOCK, **options)
    control.fail("pin", nth)
    output = step.output(tide, settled=True)
    control.clear_faults()
    assert step.is_right(step.gradient(output))
    del output
    assert nth > 1 or tide.stats().kept["host_full"] > 0
    assert_all_at_rest(tide)
    ebb.trim()
    step.assert_trains_on(offload(**options))


@pytest.mark.parametrize("blocks", range(6))
@pytest.mark.parametrize("options", LAYOUTS, ids=str)
def test_the_cap_is_reached_within_a_group(
    options: dict, blocks: int, step: Step, control: ModuleType
) -> None:
    ebb.trim()
    tide = offload(max_host_bytes=max(1, blocks * NEXT_BLOCK), **options)
    output = step.output(tide, settled=True)
    assert tide.stats().peak_host_bytes <= blocks * NEXT_BLOCK
    assert tide.stats().kept["host_full"] > 0
    assert step.is_right(step.gradient(output))
    del output
    assert_all_at_rest(tide)
    assert not control.races()


@pytest.mark.parametrize("room", range(6))
@pytest.mark.parametrize("options", LAYOUTS, ids=str)
def test_device_memory_runs_short_in_backward(
    options: dict, room: int, step: Step, control: ModuleType
) -> None:
    tide = offload(**options | {"prefetch_bytes": 1 << 30})
    with no_leaks(control):
        output = step.output(tide, settled=True)
        control.set_limit(0, control.memory().used_bytes + room * NBYTES)
        try:
            grad = step.gradient(output, retain_graph=True)
            assert step.is_right(grad)
            del grad
        except STATED as failure:
            assert "bytes asked" in str(failure) or "no memory for" in str(failure)
        control.set_limit(0, None)
        assert step.is_right(step.gradient(output))
        del output
        step.assert_trains_on(tide)


@pytest.mark.parametrize("where", ["forward", "between", "backward"])
@pytest.mark.parametrize("options", LAYOUTS, ids=str)
def test_the_device_is_lost(options: dict, where: str, step: Step, control: ModuleType) -> None:
    for nth in range(1, 14):
        tide = offload(**options)
        if where == "forward":
            control.fail("copy", nth, sticky=True)
        try:
            output = step.output(tide)
            if where == "between":
                control.lose()
            elif where == "backward":
                control.fail("run_copy", nth)
            step.gradient(output)
        except STATED as failure:
            assert "lost" in str(failure) or "injected failure" in str(failure)
        else:
            assert where != "between"
        output = None
        control.recover()
        control.clear_faults()
        control.clear_races()
        step.assert_trains_on(tide)


def test_a_full_queue_lets_other_threads_run(
    step: Step, control: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "_MAX_QUEUED", 2)
    tide, beats, stop = offload(), [], threading.Event()

    def beat() -> None:
        while not stop.is_set():
            beats.append(time.monotonic())
            time.sleep(0.001)

    with control.changed(mode="worker", queue_depth=16, delay_us=20_000):
        other = threading.Thread(target=beat)
        other.start()
        begin = time.monotonic()
        outputs = [step.output(tide) for _ in range(3)]
        took = time.monotonic() - begin
        stop.set()
        other.join()
        gaps = [b - a for a, b in zip(beats, beats[1:], strict=False)]
        assert took > 0.1, "the queue was never full"
        assert max(gaps) < took / 2, (max(gaps), took)
        assert all(step.is_right(step.gradient(output)) for output in outputs)
        outputs.clear()
        assert_all_at_rest(tide)
    assert not control.races()


def test_during_a_graph_capture_tensors_pass_through(step: Step, control: ModuleType) -> None:
    tide = offload()
    control.set_capturing(True)
    output = step.output(tide)
    control.set_capturing(False)
    assert tide.stats().kept["capture"] == tide.stats().saved_tensors > 0
    assert tide.stats().d2h_copies == 0
    assert step.is_right(step.gradient(output))
    del output
    step.assert_trains_on(tide)


def test_a_hundred_objects_leave_nothing_behind(step: Step, control: ModuleType) -> None:
    step.assert_trains_on(offload())
    events = len(gc.get_objects())
    pinned = control.memory().pinned_bytes
    with no_leaks(control):
        for _ in range(100):
            tide = offload()
            assert step.is_right(step.gradient(step.output(tide)))
            assert_all_at_rest(tide)
            del tide
    assert control.memory().pinned_bytes == pinned
    gc.collect()
    assert len(gc.get_objects()) < events + 1000
