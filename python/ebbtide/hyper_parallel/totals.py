"""Statistics of everything that went through the layer in this process."""

from __future__ import annotations

from dataclasses import astuple

from ebbtide.hyper_parallel.counted import (
    Counted,
    forget_past,
    live_sessions,
    moved_by,
    past,
)
from ebbtide.offload import group_totals, totals
from ebbtide.peaks import render_peaks
from ebbtide.report import Stats, render_report


def stats() -> Stats:
    """Sums over all sessions since the last ``reset_stats``; pools, devices and ``group_swap`` have their own.

    What a session has counted stays when its pool is dropped. Peaks are bounds: the sum of the peaks of sessions that
    were there at one time.
    """
    return _counted().stats()


def _counted() -> Counted:
    live = live_sessions()  # held from here on: none of them is past
    found = past()
    now = Counted()
    reserved: dict[int, int] = {}
    for session, framework, options in live:
        mine = totals(session)
        now.add(mine, group_totals(session), moved_by(framework, options))
        if session.transfers.tiers.first == "host":
            # Host memory is the process's, sessions share it.
            reserved[id(session.transfers.tiers.space)] = mine.host_reserved_bytes
    if live:
        now.sums["host_reserved_bytes"] = sum(reserved.values())
    found.merge(now)
    return found


def reset_stats() -> None:
    """Totals to zero; what is held now stays and is the new peak."""
    for session, _, _ in live_sessions():
        session.reset_stats()
    forget_past()


def report() -> str:
    """The statistics as a table, with a second one of the groups that were used since the last ``reset_stats``; below,
    which devices' peak sits where a region is recomputed."""
    found = _counted()
    used = [group for group in found.group_totals() if any(astuple(group)[1:])]
    title = f"ebbtide.hyper_parallel: {', '.join(sorted(found.moved)) or 'nothing moved'}"
    return render_report(found.stats(), title, used) + render_peaks()


def synchronize() -> None:
    """Blocks until no copy is running."""
    for session, _, _ in live_sessions():
        session.synchronize()
