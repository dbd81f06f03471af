"""Statistics keep their names, flatten for loggers, and read as a table."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
from types import SimpleNamespace
from typing import Literal

import pytest

from ebbtide.report import KEEP_REASONS, GroupTotals, Stats, metrics, render_report

MIB = 1 << 20

# Tools read these names.
NAMES = (
    "saved_tensors saved_bytes exact_duplicates storages unique_bytes kept d2h_copies d2h_bytes "
    "h2d_copies h2d_bytes spilled_bytes freed_bytes unfreed_bytes parked live_hits prefetch_hits "
    "prefetch_misses exposed_wait_s entries device_bytes host_bytes host_reserved_bytes disk_bytes "
    "peak_host_bytes peak_disk_bytes"
).split()
REASONS = (
    "parameter parameter_cast small policy last unsupported device budget host_full disk_full capture"
).split()


def sample() -> Stats:
    return Stats(
        saved_tensors=12_345,
        saved_bytes=400 * MIB,
        exact_duplicates=34,
        storages=200,
        unique_bytes=100 * MIB,
        kept={"parameter": 120, "host_full": 3, "disk_full": 5, "small": 0},
        d2h_copies=210,
        d2h_bytes=50 * MIB,
        h2d_copies=190,
        h2d_bytes=40 * MIB,
        spilled_bytes=7 * MIB,
        freed_bytes=45 * MIB,
        parked=6,
        live_hits=11,
        prefetch_hits=9,
        prefetch_misses=1,
        exposed_wait_s=0.0123,
        entries=2,
        device_bytes=3 * MIB,
        host_bytes=4 * MIB,
        host_reserved_bytes=5 * MIB,
        disk_bytes=8 * MIB,
        peak_host_bytes=64 * MIB,
        peak_disk_bytes=96 * MIB,
    )


def row_of(text: str, label: str) -> str:
    rows = [line for line in text.splitlines() if line.strip().startswith(label)]
    assert len(rows) == 1, (label, text)
    return " ".join(rows[0].split())


def test_names() -> None:
    assert [item.name for item in dataclasses.fields(Stats)] == NAMES
    assert list(KEEP_REASONS) == REASONS


def test_stats_are_frozen_and_own_their_mapping() -> None:
    kept = {"small": 1}
    stats = Stats(kept=kept)
    kept["small"] = 2
    assert stats.kept == {"small": 1}
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.entries = 1  # type: ignore[misc]


def test_stats_compare_hash_pickle_and_copy() -> None:
    stats = sample()
    assert stats == sample() and hash(stats) == hash(sample()) and stats != Stats()
    assert pickle.loads(pickle.dumps(stats)) == stats
    assert copy.deepcopy(stats) == stats
    assert Stats(**dataclasses.asdict(stats)) == stats


@pytest.mark.parametrize(
    ("first_tier", "behind", "host", "disk"),
    [
        ("disk", (0, 0), (0, 0), (21, 22)),
        ("host", (0, 0), (21, 22), (0, 0)),
        ("host", (31, 32), (21, 22), (31, 32)),
    ],
)
def test_from_core(
    first_tier: Literal["host", "disk"],
    behind: tuple[int, int],
    host: tuple[int, int],
    disk: tuple[int, int],
) -> None:
    given = dataclasses.asdict(sample())
    held = [name for name in NAMES if name.endswith(("host_bytes", "disk_bytes"))]
    for name in (*held, "host_reserved_bytes", "exposed_wait_s"):
        del given[name]
    core = SimpleNamespace(
        **given,
        tier_bytes=21,
        peak_tier_bytes=22,
        backing_bytes=behind[0],
        peak_backing_bytes=behind[1],
    )
    stats = Stats.from_core(core, first_tier=first_tier, host_reserved_bytes=23, exposed_wait_s=2.5)
    found = dataclasses.asdict(stats)
    assert {name: found[name] for name in given} == given
    assert (stats.host_reserved_bytes, stats.exposed_wait_s) == (23, 2.5)
    assert (stats.host_bytes, stats.peak_host_bytes) == host
    assert (stats.disk_bytes, stats.peak_disk_bytes) == disk


def test_metrics_are_flat_floats() -> None:
    flat = metrics(sample())
    assert flat["ebbtide/d2h_bytes"] == 50 * MIB
    assert flat["ebbtide/kept/parameter"] == 120
    assert flat["ebbtide/exposed_wait_s"] == 0.0123
    assert all(type(value) is float for value in flat.values())


def test_metrics_have_the_same_names_every_time() -> None:
    expected = {f"ebbtide/{name}" for name in NAMES if name != "kept"}
    expected |= {f"ebbtide/kept/{reason}" for reason in REASONS}
    assert set(metrics(Stats())) == set(metrics(sample())) == expected
    assert metrics(Stats(kept={"new": 2}))["ebbtide/kept/new"] == 2


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ("saved by autograd", "saved by autograd 12,345 400.0 MiB tensors"),
        ("exact duplicates", "exact duplicates 34 "),
        ("left to move", "left to move 200 100.0 MiB storages, each byte once; 25 % of"),
        ("kept: parameter", "kept: parameter 120 a parameter"),
        ("kept: host_full", "kept: host_full 3 storages: host memory full (max_host_bytes)"),
        ("kept: disk_full", "kept: disk_full 5 storages: disk full or failed (max_disk_bytes)"),
        ("moved out (D2H)", "moved out (D2H) 210 50.0 MiB copies; 50 % of"),
        ("spilled", "spilled 7.0 MiB"),
        ("freed", "freed 45.0 MiB"),
        ("parked now", "parked now 6 "),
        ("moved in (H2D)", "moved in (H2D) 190 40.0 MiB"),
        ("live hits", "live hits 11 "),
        ("prefetch hits", "prefetch hits 9 90 % of"),
        ("prefetch misses", "prefetch misses 1 "),
        ("exposed wait", "exposed wait 12.3 ms"),
        ("held now: entries", "held now: entries 2 "),
        ("held now: device", "held now: device 3.0 MiB"),
        ("held now: host", "held now: host 4.0 MiB 5.0 MiB reserved; peak 64.0 MiB"),
        ("held now: disk", "held now: disk 8.0 MiB peak 96.0 MiB"),
    ],
)
def test_report_rows(label: str, expected: str) -> None:
    assert row_of(render_report(sample(), "tide"), label).startswith(expected)


def test_report_names_only_reasons_that_occurred() -> None:
    text = render_report(sample(), "tide")
    assert "kept: small" not in text and "kept: last" not in text
    assert row_of(render_report(Stats(), "tide"), "kept").startswith("kept 0 nothing")


def test_report_shows_unfreed_bytes_only_when_there_are_some() -> None:
    assert "not freed" not in render_report(sample(), "tide")
    text = render_report(dataclasses.replace(sample(), unfreed_bytes=MIB), "tide")
    assert row_of(text, "copied, not freed").startswith("copied, not freed 1.0 MiB somebody else")


def test_empty_report_says_what_to_do() -> None:
    assert "nothing yet: run forward inside the context" in render_report(Stats(), "tide")


def test_seconds() -> None:
    text = render_report(Stats(exposed_wait_s=3.14159), "tide")
    assert row_of(text, "exposed wait").startswith("exposed wait 3.14 s")


@pytest.mark.parametrize("variable", ["FORCE_COLOR", "TTY_COMPATIBLE"])
def test_report_is_plain_ascii_of_at_most_100_columns(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("COLUMNS", "250")
    every = {name: 10**15 for name in NAMES if name not in ("kept", "exposed_wait_s")}
    stats = Stats(**every, kept=dict.fromkeys(REASONS, 10**9), exposed_wait_s=1e6)
    group = GroupTotals("layer." * 50, 10**5, 10**5, 10**15, 10**15, 10**15, 10**5)
    total = dataclasses.replace(stats, storages=10**9, prefetch_misses=10**9)
    texts = (
        render_report(stats, "tide"),
        render_report(Stats(), "tide"),
        render_report(total, "tide", [group] * 1000),
    )
    for text in texts:
        assert text.isascii() and "\x1b" not in text
        assert max(map(len, text.splitlines())) <= 100
        assert text.endswith("\n") and not text.endswith("\n\n")


def test_title_and_reasons_are_no_markup() -> None:
    text = render_report(Stats(kept={"[bold]odd[/bold]": 1}), "step [red]1[/red] :smile:")
    assert text.splitlines()[0] == "step [red]1[/red] :smile:"
    assert "kept: [bold]odd[/bold]" in text


# --- groups


def group(number: int) -> GroupTotals:
    return GroupTotals(
        name=f"layers.{number}",
        runs=3,
        storages=10,
        unique_bytes=5 * MIB,
        d2h_bytes=2 * MIB,
        h2d_bytes=MIB,
        prefetch_misses=1,
    )


def group_rows(text: str) -> list[list[str]]:
    """The second table's cells, row by row, without its head."""
    rows = text.split("\n\n groups ")[1].splitlines()[2:]
    return [re.split(r"\s{2,}", row.strip()) for row in rows if "--" not in row]


def test_report_without_groups_has_one_table() -> None:
    assert render_report(sample(), "tide", []) == render_report(sample(), "tide")
    assert "groups" not in render_report(sample(), "tide")


def test_groups_and_the_rest_add_up() -> None:
    stats = dataclasses.replace(sample(), prefetch_misses=9)
    text = render_report(stats, "tide", [group(0), group(1)])
    assert text.startswith(render_report(stats, "tide"))
    assert group_rows(text) == [
        ["layers.0", "3", "10", "5.0 MiB", "2.0 MiB", "1.0 MiB", "1"],
        ["layers.1", "3", "10", "5.0 MiB", "2.0 MiB", "1.0 MiB", "1"],
        ["outside groups", "180", "90.0 MiB", "46.0 MiB", "38.0 MiB", "7"],
    ]


@pytest.mark.parametrize(("count", "listed"), [(1, 1), (12, 12), (13, 11), (200, 11)])
def test_many_groups_are_cut_short_and_still_add_up(count: int, listed: int) -> None:
    stats = Stats(
        storages=10 * count + 4,
        unique_bytes=5 * MIB * count,
        d2h_bytes=2 * MIB * count,
        h2d_bytes=MIB * count,
        prefetch_misses=count,
    )
    rows = group_rows(render_report(stats, "tide", [group(number) for number in range(count)]))
    assert [row[0] for row in rows[:listed]] == [f"layers.{number}" for number in range(listed)]
    assert rows[-1] == ["outside groups", "4", "0 B", "0 B", "0 B", "0"]
    if count == listed:
        assert len(rows) == listed + 1
        return
    assert len(rows) == listed + 2
    rest = count - listed
    assert rows[listed][:3] == [f"... and {rest} more", f"{3 * rest}", f"{10 * rest:,}"]
    assert rows[listed][-1] == f"{rest}"


def test_what_lies_outside_is_never_below_zero() -> None:
    rows = group_rows(render_report(Stats(), "tide", [group(0)]))
    assert rows[-1] == ["outside groups", "0", "0 B", "0 B", "0 B", "0"]


def test_long_group_names_keep_their_end() -> None:
    names = ["base_model.model.model.layers.31", "model." * 20 + "layers.31"]
    text = render_report(sample(), "tide", [GroupTotals(name) for name in names])
    whole, cut, _ = (row[0] for row in group_rows(text))
    assert whole == names[0]
    assert cut.startswith("...") and cut.endswith(".model.model.layers.31")


def test_group_names_are_no_markup() -> None:
    text = render_report(sample(), "tide", [GroupTotals("[red]a[/red] :smile:")])
    assert "[red]a[/red] :smile:" in text
