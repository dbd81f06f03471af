from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import virtual_clock
from steps import chain
from virtual_clock import trace as events
from virtual_clock.trace import Event, Trace

TRACES = sorted((Path(virtual_clock.__file__).parent / "traces").glob("*.json.gz"))


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    trace, _ = chain([3, 5])
    trace.save(tmp_path / "chain.json.gz")
    assert Trace.load(tmp_path / "chain.json.gz") == trace
    first = (tmp_path / "chain.json.gz").read_bytes()
    trace.save(tmp_path / "chain.json.gz")
    assert (tmp_path / "chain.json.gz").read_bytes() == first


def test_lives() -> None:
    trace, _ = chain([3, 5])
    first, second = trace.lives
    assert (first.born, first.let_go, first.uses, first.end) == (0, 0, [(3, 3)], 3)
    assert (second.born, second.let_go, second.uses, second.end) == (1, 1, [(2, 2)], 2)


@pytest.mark.parametrize(
    ("kind", "index"),
    [
        (events.BORN, 0),
        (events.LET_GO, 0),
        (events.SAVE, 0),
        (events.UNPACK, 0),
        (events.UNUSED, 0),
        (events.DROP, 0),
        (events.END_GROUP, 0),
        (events.BEGIN_GROUP, 0),
    ],
)
def test_contradictions_are_found(kind: str, index: int) -> None:
    trace, _ = chain([3, 5])
    broken = replace(trace, events=[*trace.events, Event(kind, index)])
    with pytest.raises(ValueError, match="chain"):
        broken.check()


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name)
def test_recorded_traces(path: Path) -> None:
    assert path.stat().st_size < 200_000
    trace = Trace.load(path)
    trace.check()
    groups = [event for event in trace.events if event.kind == events.BEGIN_GROUP]
    assert len(groups) == (12 if "gpt2" in path.name else 32)


def test_there_are_recorded_traces() -> None:
    assert len(TRACES) == 3


def test_flops_of_llama() -> None:
    """8 billion parameters, less the embedding that multiplies nothing: 6 operations each and token, and attention."""
    trace = Trace.load(next(path for path in TRACES if path.name == "llama-8b.json.gz"))
    tokens, hidden, layers = 8192, 4096, 32
    parameters = layers * (2 * hidden**2 + 2 * hidden * 1024 + 3 * hidden * 14336) + hidden * 128256
    causal = 2 * tokens**2 * hidden // 2
    attention = layers * (2 + 5) * causal
    assert sum(op.flops for op in trace.ops) == 6 * tokens * parameters + attention
