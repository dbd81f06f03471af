"""The layer's sessions, and what those that are gone have counted."""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ebbtide import process
from ebbtide.framework import Framework
from ebbtide.offload import named_totals, totals_of
from ebbtide.report import GroupTotals, Stats
from ebbtide.resolved import Resolved
from ebbtide.session import Session
from ebbtide.transfers import Transfers

_NOW = frozenset(
    {"parked", "entries", "device_bytes", "host_bytes", "host_reserved_bytes", "disk_bytes"}
)
_PEAKS = ("peak_host_bytes", "peak_disk_bytes")


@dataclass
class Counted:
    """Sums of statistics: counts, peaks, and what is held now where a session is alive."""

    sums: Counter[str] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)
    groups: dict[str, Counter[str]] = field(default_factory=dict)
    moved: set[str] = field(default_factory=set)  # from which devices to where

    def add(self, stats: Stats, groups: Iterable[GroupTotals], moved: str) -> None:
        self.kept.update(stats.kept)
        self.sums.update({name: getattr(stats, name) for name in _SUMMED})
        for group in groups:
            found = {name: getattr(group, name) for name in _SUMMED_OF_GROUPS}
            self.groups.setdefault(group.name, Counter()).update(found)
        self.moved.add(moved)

    def merge(self, other: Counted) -> None:
        """Peaks too are the larger ones: they are of different times."""
        peaks = {name: max(self.sums[name], other.sums[name]) for name in _PEAKS}
        self.sums.update(other.sums)
        for name, peak in peaks.items():
            self.sums[name] = peak
        self.kept.update(other.kept)
        for name, group in other.groups.items():
            self.groups.setdefault(name, Counter()).update(group)
        self.moved |= other.moved

    def stats(self) -> Stats:
        sums: dict[str, Any] = dict(self.sums)
        return Stats(kept=self.kept, **sums)

    def group_totals(self) -> list[GroupTotals]:
        return [GroupTotals(name, **group) for name, group in self.groups.items()]


_SUMMED = [item.name for item in fields(Stats) if item.name != "kept"]
_SUMMED_OF_GROUPS = [item.name for item in fields(GroupTotals) if item.name != "name"]

_live: weakref.WeakKeyDictionary[Session, tuple[Framework, Resolved]] = weakref.WeakKeyDictionary()
# A session's end may come in any garbage collection: it only appends, and whoever holds the lock adds up.
_gone: deque[Counted] = deque()
_past = Counted()
_lock = threading.Lock()


def count(session: Session, framework: Framework, options: Resolved) -> None:
    """From now on, also when it is gone, the session counts."""
    with _lock:
        _add_up()
    _live[session] = framework, options
    moved = moved_by(framework, options)
    weakref.finalize(session, _end, session.transfers, session.labels, moved).atexit = False


def moved_by(framework: Framework, options: Resolved) -> str:
    return f"{framework.device_type} to {options.tier}"


def live_sessions() -> list[tuple[Session, Framework, Resolved]]:
    """Of every session with a pool or a ticket."""
    return [(session, *made_of) for session, made_of in list(_live.items())]


def past() -> Counted:
    """What sessions that are gone have counted; nothing of it is held. Its peaks are bounds: at each session's end, the
    sum over those that were there."""
    total = Counted()
    with _lock:
        _add_up()
        total.merge(_past)
    return total


def forget_past() -> None:
    global _past
    with _lock:
        _gone.clear()
        _past = Counted()


def _add_up() -> None:
    while _gone:
        _past.merge(_gone.popleft())


def _end(
    transfers: Transfers,
    labels: Mapping[str, int],
    moved: str,
    finalizing: Callable[[], bool] = sys.is_finalizing,
) -> None:
    if finalizing() or not process.usable():
        return
    engine = transfers.engine
    counted = Counted()
    groups = named_totals(labels, engine.group_stats())
    counted.add(totals_of(engine.stats(), transfers), groups, moved)
    for name in _NOW:
        counted.sums[name] = 0
    for other, _, _ in live_sessions():
        found = totals_of(other.transfers.engine.stats(), other.transfers)
        counted.sums.update({name: getattr(found, name) for name in _PEAKS})
    _gone.append(counted)
