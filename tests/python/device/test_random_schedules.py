"""Random programs under random options and random schedules of the copies: bits as without offload, no race, at rest."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from copy_streams import host_copies_seen
from edges import EDGES, Edge
from random_programs import Program, options
from saving import assert_all_at_rest

import ebbtide.torch as ebb

SEEDS = 200
SLOW_SEEDS = 4000
SEEDS_A_TEST = 25
SEEDS_UNTIL_NOTICED = 60

pytestmark = pytest.mark.filterwarnings(
    "ignore:The AccumulateGrad node's stream", "ignore:.*no room for"
)


@pytest.fixture(scope="module")
def streams(tide_control: ModuleType) -> list[torch.Stream]:
    return [torch.accelerator.current_stream(0), *(torch.Stream(device="tide") for _ in range(2))]


@pytest.fixture(autouse=True)
def without_garbage_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def synchronize() -> None:
    for device in range(torch.accelerator.device_count()):
        torch.accelerator.synchronize(device)


def check(seed: int, streams: list[torch.Stream], control: ModuleType, directory: Path) -> int:
    """Returns the bytes that were loaded."""
    given = options(seed, directory)
    about = f"seed {seed}, {given}"
    synchronize()
    control.clear_races()
    expected = Program(seed, streams, None, control).run()
    synchronize()
    assert not control.races(), f"{about}: the program itself: {control.races()[0]}"
    tide = ebb.offload(device="tide", **given)
    with host_copies_seen(control):
        found = Program(seed, streams, tide, control).run()
        assert_all_at_rest(tide)
    synchronize()
    assert not control.races(), f"{about}: {control.races()[0]}"
    assert len(found) == len(expected), about
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.numpy().tobytes() == b.numpy().tobytes(), f"{about}: result {i} differs"
    return tide.stats().h2d_bytes


def check_all(seeds: range, streams: list[torch.Stream], control: ModuleType, path: Path) -> None:
    loaded = sum(check(seed, streams, control, path) > 0 for seed in seeds)
    assert loaded >= len(seeds) // 8, "live hits alone would prove nothing"


@pytest.mark.parametrize("first", range(0, SEEDS, SEEDS_A_TEST))
def test_random_programs(
    first: int, streams: list[torch.Stream], control: ModuleType, tmp_path: Path
) -> None:
    check_all(range(first, first + SEEDS_A_TEST), streams, control, tmp_path)


# These are rare: a fetch that is reported too early is read right or wrong by chance, and few guesses are dropped while
# they load. test_edges.py looks at both.
NOTICED = [edge for edge in EDGES if edge.number not in ("6a", "6b", "9b")]


@pytest.mark.parametrize("edge", NOTICED, ids=[edge.number for edge in NOTICED])
def test_a_missing_edge_is_noticed(
    edge: Edge, streams: list[torch.Stream], control: ModuleType, tmp_path: Path
) -> None:
    for seed in range(SEEDS_UNTIL_NOTICED):
        try:
            with edge.cut():
                check(seed, streams, control, tmp_path)
        except AssertionError:
            return
        finally:
            control.reset()
            gc.collect()
    pytest.fail(f"nothing was wrong without {edge.name}")


@pytest.mark.slow
@pytest.mark.parametrize("first", range(SEEDS, SEEDS + SLOW_SEEDS, SEEDS_A_TEST))
def test_many_more_random_programs(
    first: int, streams: list[torch.Stream], control: ModuleType, tmp_path: Path
) -> None:
    check_all(range(first, first + SEEDS_A_TEST), streams, control, tmp_path)
