"""Every call to the device fails once: nothing in flight is freed, the error names its cause, the next step is right."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from faulty_steps import STATED, Step, no_leaks, offload

OPERATIONS = ["copy", "record", "wait", "allocate"]
LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {},
    "packed": {"group_swap": True},
    "no guesses": {"prefetch_bytes": 0},
    "in flight": {"in_flight_bytes": 1 << 30},
    "packed, in flight": {"group_swap": True, "in_flight_bytes": 1 << 30},
}


@pytest.fixture
def step(control: ModuleType) -> Iterator[Step]:
    gc.collect()
    gc.disable()
    yield Step(control)
    gc.enable()


# Loads on a guess may fail without a word: so many failures in a row that nobody noticed are the end of the calls.
UNNOTICED = 8

pytestmark = pytest.mark.filterwarnings("ignore:.*no room for")


def calls(control: ModuleType, unnoticed: list[None]) -> Iterator[int]:
    nth = 0
    while len(unnoticed) < UNNOTICED:
        nth += 1
        assert nth < 200, "there is no end of calls"
        control.clear_races()
        yield nth


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_call_of_a_forward_fails_once(
    operation: str, layout: str, step: Step, control: ModuleType
) -> None:
    unnoticed: list[None] = []
    for nth in calls(control, unnoticed):
        tide = offload(**LAYOUTS[layout])
        with no_leaks(control):
            control.fail(operation, nth)
            try:
                output = step.output(tide)
            except STATED as failure:
                assert "injected failure" in str(failure)
                unnoticed.clear()
            else:
                unnoticed.append(None)
                control.clear_faults()
                assert step.is_right(step.gradient(output))
                del output
            control.clear_faults()
            step.assert_trains_on(tide)
    assert nth > UNNOTICED


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_call_of_a_backward_fails_once(
    operation: str, layout: str, step: Step, control: ModuleType
) -> None:
    """The copies outside of the device stay: the same backward is right when it is run again."""
    unnoticed: list[None] = []
    for nth in calls(control, unnoticed):
        tide = offload(**LAYOUTS[layout])
        with no_leaks(control):
            output = step.output(tide, settled=True)
            control.fail(operation, nth)
            try:
                grad = step.gradient(output, retain_graph=True)
            except STATED as failure:
                assert "injected failure" in str(failure)
                unnoticed.clear()
            else:
                unnoticed.append(None)
                control.clear_faults()
                assert step.is_right(grad)
                del grad
            control.clear_faults()
            assert step.is_right(step.gradient(output))
            del output
            step.assert_trains_on(tide)
    assert nth > UNNOTICED
