"""What was saved, moved and held: the numbers, their flat form for loggers, and a table."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from rich.box import Box
from rich.console import Console
from rich.table import Table

from ebbtide.sizes import format_bytes

__all__ = ["KEEP_REASONS", "GroupTotals", "Stats", "metrics", "render_paragraph", "render_report"]

# Why a tensor stayed on the device, and what the report says about it.
KEEP_REASONS: Mapping[str, str] = {
    "parameter": "a parameter, a buffer or a view of one",
    "parameter_cast": "autocast's cast of a parameter",
    "small": "storage below min_bytes",
    "policy": "the policy asked for it",
    "last": "storages: the end of forward (keep_last_*)",
    "unsupported": "of a kind that is not offloaded",
    "device": "on another device",
    "budget": "not needed to stay within the memory budget",
    "host_full": "storages: host memory full (max_host_bytes)",
    "disk_full": "storages: disk full or failed (max_disk_bytes)",
    "capture": "saved while a device graph was captured",
}

_WIDTH = 100
_COLUMN_GAP = 3
_MAX_GROUP_ROWS = 12
_MIN_GROUP_NAME = 16


@dataclass(frozen=True)
class Stats:
    """Totals since the offload object was made or reset, and where marked "now" what is held.

    ``_bytes`` are bytes, ``_s`` are seconds, the rest are counts.
    """

    saved_tensors: int = 0
    """Tensors that autograd saved, duplicates and kept ones counted."""
    saved_bytes: int = 0
    """Their bytes: elements times itemsize, duplicates and kept ones counted."""
    exact_duplicates: int = 0
    """Saves that met an equal view of the same storage: one look-up, no new bytes."""
    storages: int = 0
    """Storages that were candidates for offload."""
    unique_bytes: int = 0
    """Union of the extents of their views: what had to move."""
    kept: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Reason (see ``KEEP_REASONS``) to count of what stayed on the device."""
    d2h_copies: int = 0
    d2h_bytes: int = 0
    """Bytes that left the device, for any tier."""
    h2d_copies: int = 0
    h2d_bytes: int = 0
    spilled_bytes: int = 0
    """Bytes written to the disk tier."""
    freed_bytes: int = 0
    """Bytes of copied storages that nobody else held."""
    unfreed_bytes: int = 0
    """Bytes of storages that were copied, yet are held by somebody else."""
    parked: int = 0
    """Now: storages held by others and therefore not copied."""
    live_hits: int = 0
    """Restores that used the original storage: nothing was loaded."""
    prefetch_hits: int = 0
    prefetch_misses: int = 0
    exposed_wait_s: float = 0.0
    """Time that was spent waiting for copies."""
    entries: int = 0
    """Now: storages under care."""
    device_bytes: int = 0
    """Now: device bytes held by the engine."""
    host_bytes: int = 0
    """Now: host bytes in use, of ``host_reserved_bytes``."""
    host_reserved_bytes: int = 0
    """Now: host bytes allocated."""
    disk_bytes: int = 0
    """Now: bytes in use on disk."""
    peak_host_bytes: int = 0
    peak_disk_bytes: int = 0

    def __post_init__(self) -> None:
        # A copy of its own, and a plain dict: pickle and dataclasses.asdict take nothing else.
        object.__setattr__(self, "kept", dict(self.kept))

    @classmethod
    def from_core(
        cls,
        core: Any,
        *,
        first_tier: Literal["host", "disk"],
        host_reserved_bytes: int,
        exposed_wait_s: float,
    ) -> Stats:
        """The engine's ``core`` statistics.

        The engine knows a tier and what stands behind it, and does no I/O. So where its first tier
        is, what the host reserves (bytes) and how long was waited (seconds) is the session's to say.

        Args:
            first_tier: ``"disk"``: storages go to the file directly, and nothing stands behind it.
                ``"host"``: they go to host memory; a file, if there is one, stands behind it.
        """
        first = core.tier_bytes, core.peak_tier_bytes
        behind = core.backing_bytes, core.peak_backing_bytes
        host, disk = ((0, 0), first) if first_tier == "disk" else (first, behind)
        given: dict[str, Any] = {
            "host_bytes": host[0],
            "peak_host_bytes": host[1],
            "disk_bytes": disk[0],
            "peak_disk_bytes": disk[1],
            "host_reserved_bytes": host_reserved_bytes,
            "exposed_wait_s": exposed_wait_s,
        }
        names = [item.name for item in fields(cls) if item.name not in given]
        return cls(**given, **{name: getattr(core, name) for name in names})


@dataclass(frozen=True)
class GroupTotals:
    """One group's share of :class:`Stats`, under the same names, runs of equal name added up.

    A storage counts for the first group it was saved in.
    """

    name: str
    runs: int = 0
    """How often the group began."""
    storages: int = 0
    unique_bytes: int = 0
    d2h_bytes: int = 0
    h2d_bytes: int = 0
    prefetch_misses: int = 0


def metrics(stats: Stats) -> dict[str, float]:
    """``stats`` flat, for loggers: ``"ebbtide/d2h_bytes"``, ``"ebbtide/kept/parameter"``, …

    The same names every time: reasons that did not occur are 0.
    """
    flat: dict[str, float] = {}
    for item in fields(stats):
        if item.name == "kept":
            for reason in {**dict.fromkeys(KEEP_REASONS), **dict.fromkeys(stats.kept)}:
                flat[f"ebbtide/kept/{reason}"] = float(stats.kept.get(reason, 0))
        else:
            flat[f"ebbtide/{item.name}"] = float(getattr(stats, item.name))
    return flat


# Only a line under the head and between sections, in ASCII: prints wherever a log goes.
_BOX = Box(
    "    \n    \n -- \n    \n -- \n -- \n    \n    \n",
    ascii=True,
)


def render_report(stats: Stats, title: str, groups: Sequence[GroupTotals] = ()) -> str:
    """``stats`` as a table of at most 100 columns: plain text, no escape sequences.

    A second table follows where there are ``groups``, in their order; with what lies outside of
    them its rows add up to ``stats``.
    """
    tables = [_totals_table(stats, title)]
    if groups:
        tables.append(_groups_table(stats, groups))
    return "\n".join(_render(table) for table in tables)


def render_paragraph(text: str) -> str:
    """The text below a report, in lines as long as its own."""
    return textwrap.fill(text, _WIDTH, subsequent_indent="  ") + "\n"


def _totals_table(stats: Stats, title: str) -> Table:
    table = Table(title=title, title_justify="left", box=_BOX, pad_edge=False)
    table.add_column("storages on their way", no_wrap=True)
    table.add_column("count", justify="right", no_wrap=True)
    table.add_column("bytes or time", justify="right", no_wrap=True)
    table.add_column("meaning")
    for section in (_forward_rows, _kept_rows, _transfer_rows, _restore_rows, _held_rows):
        for row in section(stats):
            table.add_row(*row)
        table.add_section()
    return table


def _groups_table(stats: Stats, groups: Sequence[GroupTotals]) -> Table:
    shown = list(groups)
    if len(shown) > _MAX_GROUP_ROWS:
        rest = shown[_MAX_GROUP_ROWS - 1 :]
        shown[_MAX_GROUP_ROWS - 1 :] = [_sum(f"... and {len(rest)} more", rest)]
    inside = _sum("", groups)
    outside = {
        name: max(0, getattr(stats, name) - getattr(inside, name)) for name in _SHARED_TOTALS
    }
    rows = [_group_row(group, f"{group.runs:,}") for group in shown]
    last = _group_row(GroupTotals("outside groups", **outside), "")

    numbers = [_GROUP_HEADS, *rows, last]
    widths = [max(len(row[i]) for row in numbers) for i in range(1, len(_GROUP_HEADS))]
    name_width = _WIDTH - 2 - sum(_COLUMN_GAP + width for width in widths)
    table = Table(box=_BOX, pad_edge=False)
    for i, head in enumerate(_GROUP_HEADS):
        table.add_column(head, justify="right" if i else "left", no_wrap=True)
    for name, *cells in rows:
        table.add_row(_end_of(name, name_width), *cells)
    table.add_section()
    table.add_row(*last)
    return table


_GROUP_HEADS = ("groups", "runs", "storages", "left to move", "moved out", "moved in", "misses")
_SHARED_TOTALS = [item.name for item in fields(GroupTotals) if item.name not in ("name", "runs")]


def _sum(name: str, groups: Sequence[GroupTotals]) -> GroupTotals:
    sums = {total: sum(getattr(group, total) for group in groups) for total in _SHARED_TOTALS}
    return GroupTotals(name, runs=sum(group.runs for group in groups), **sums)


def _group_row(group: GroupTotals, runs: str) -> tuple[str, ...]:
    return (
        group.name,
        runs,
        f"{group.storages:,}",
        format_bytes(group.unique_bytes),
        format_bytes(group.d2h_bytes),
        format_bytes(group.h2d_bytes),
        f"{group.prefetch_misses:,}",
    )


def _end_of(name: str, width: int) -> str:
    """At most ``width`` characters of ``name``, with its end: that tells layers apart."""
    width = max(width, _MIN_GROUP_NAME)
    return name if len(name) <= width else f"...{name[3 - width :]}"


def _render(table: Table) -> str:
    out = io.StringIO()
    console = Console(
        file=out,
        width=_WIDTH,
        force_terminal=False,
        color_system=None,
        markup=False,
        emoji=False,
        highlight=False,
    )
    console.print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip("\n") + "\n"


_Row = tuple[str, str, str, str]


def _row(label: str, count: int | None, nbytes: int | None, meaning: str) -> _Row:
    return (
        label,
        "" if count is None else f"{count:,}",
        "" if nbytes is None else format_bytes(nbytes),
        meaning,
    )


def _share(part: float, whole: float, of_what: str) -> str:
    return f"{100 * part / whole:.0f} % of {of_what}" if whole else ""


def _forward_rows(stats: Stats) -> list[_Row]:
    nothing = "nothing yet: run forward inside the context"
    share = _share(stats.unique_bytes, stats.saved_bytes, "what autograd saved")
    return [
        _row(
            "saved by autograd",
            stats.saved_tensors,
            stats.saved_bytes,
            "tensors; duplicates and kept ones counted" if stats.saved_tensors else nothing,
        ),
        _row("exact duplicates", stats.exact_duplicates, None, "one look-up each, no new bytes"),
        _row(
            "left to move",
            stats.storages,
            stats.unique_bytes,
            f"storages, each byte once{share and f'; {share}'}",
        ),
    ]


def _kept_rows(stats: Stats) -> list[_Row]:
    rows = [
        _row(f"kept: {reason}", count, None, KEEP_REASONS.get(reason, ""))
        for reason, count in sorted(stats.kept.items(), key=lambda item: (-item[1], item[0]))
        if count
    ]
    return rows or [_row("kept", 0, None, "nothing was kept from the start")]


def _transfer_rows(stats: Stats) -> list[_Row]:
    moved = _share(stats.d2h_bytes, stats.unique_bytes, "what was left to move")
    rows = [
        _row(
            "moved out (D2H)", stats.d2h_copies, stats.d2h_bytes, f"copies{moved and f'; {moved}'}"
        ),
        _row("  spilled", None, stats.spilled_bytes, "of these to disk"),
        _row(
            "stayed",
            None,
            max(0, stats.unique_bytes - stats.d2h_bytes),
            "the rest of what was left to move: kept last, no room, held by others until backward, changed",
        ),
        _row("freed", None, stats.freed_bytes, "storages that nobody else held"),
    ]
    if stats.unfreed_bytes:
        rows.append(
            _row("copied, not freed", None, stats.unfreed_bytes, "somebody else holds the storage")
        )
    rows.append(
        _row("parked now", stats.parked, None, "storages others hold: a copy would free nothing")
    )
    return rows


def _restore_rows(stats: Stats) -> list[_Row]:
    guesses = stats.prefetch_hits + stats.prefetch_misses
    in_time = _share(stats.prefetch_hits, guesses, "loads began before they were needed")
    return [
        _row("moved in (H2D)", stats.h2d_copies, stats.h2d_bytes, "copies"),
        _row("live hits", stats.live_hits, None, "original still there: nothing loaded"),
        _row("prefetch hits", stats.prefetch_hits, None, in_time),
        _row("prefetch misses", stats.prefetch_misses, None, "loaded when needed: a wait"),
        ("exposed wait", "", _format_seconds(stats.exposed_wait_s), "spent waiting for copies"),
    ]


def _held_rows(stats: Stats) -> list[_Row]:
    host = (
        f"{format_bytes(stats.host_reserved_bytes)} reserved; "
        f"peak {format_bytes(stats.peak_host_bytes)}"
    )
    return [
        _row("held now: entries", stats.entries, None, "storages under care"),
        _row("held now: device", None, stats.device_bytes, "held by Ebbtide itself"),
        _row("held now: host", None, stats.host_bytes, host),
        _row(
            "held now: disk",
            None,
            stats.disk_bytes,
            f"peak {format_bytes(stats.peak_disk_bytes)}",
        ),
    ]


def _format_seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
