"""Every ordering edge through the real session: with it all is right, without it wrong values and a race, every time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import edges
import pytest
import torch
from copy_streams import host_copies_seen
from edge_scenarios import Scenarios
from edges import EDGES, Edge
from outcomes import SECTION

REPEATS = 10
ORDERING = Path(__file__).resolve().parents[3] / "docs" / "ordering.md"

pytestmark = pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")


@pytest.fixture
def scenarios(control: ModuleType, tmp_path: Path) -> Iterator[Scenarios]:
    with host_copies_seen(control):
        yield Scenarios(control, tmp_path)


def run(
    scenarios: Scenarios, control: ModuleType, name: str, cut: contextlib.AbstractContextManager
) -> tuple[bool, int]:
    """Whether values were right, and the number of races."""
    control.clear_races()
    with cut:
        is_right = scenarios.run(name)
        for device in range(torch.accelerator.device_count()):
            torch.accelerator.synchronize(device)
    return is_right, len(control.races())


@pytest.mark.parametrize("name", sorted({edge.scenario for edge in EDGES}))
def test_with_every_edge_all_is_right(name: str, scenarios: Scenarios, control: ModuleType) -> None:
    for _ in range(REPEATS):
        assert run(scenarios, control, name, contextlib.nullcontext()) == (True, 0), (
            control.races()[:1]
        )


@pytest.mark.parametrize("edge", EDGES, ids=[edge.number for edge in EDGES])
def test_without_the_edge_values_are_wrong_and_a_race_is_found(
    edge: Edge,
    scenarios: Scenarios,
    control: ModuleType,
    record_property: Callable[[str, object], None],
) -> None:
    wrong = raced = 0
    for _ in range(REPEATS):
        is_right, races = run(scenarios, control, edge.scenario, edge.cut())
        wrong += not is_right
        raced += races > 0
    record_property(f"{SECTION}ordering edges taken out", edges.seen(edge, wrong, raced, REPEATS))
    assert (wrong, raced) == (REPEATS, REPEATS)


def test_the_table_of_the_docs_is_the_one_that_is_tested() -> None:
    assert edges.markdown() in ORDERING.read_text(encoding="utf-8"), (
        f"write what 'python {Path(edges.__file__).name}' prints into {ORDERING.name}"
    )
