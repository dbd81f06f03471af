"""Statistics of everything that went through the layer in this process."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from typing import Any

from ebbtide.hyper_parallel.runtime import live_sessions
from ebbtide.offload import group_totals, totals
from ebbtide.peaks import render_peaks
from ebbtide.report import GroupTotals, Stats, render_report


def stats() -> Stats:
    """Sums over the sessions that have a pool or something saved; pools, devices and ``group_swap`` have their own.

    A pool that is dropped takes its counts along. Peaks are sums of peaks, and so bounds.
    """
    sums: dict[str, Any] = {}
    kept: Counter[str] = Counter()
    reserved: dict[int, int] = {}
    for session, _, _ in live_sessions():
        found = totals(session)
        kept.update(found.kept)
        if session.transfers.tiers.first == "host":
            # Host memory is the process's, sessions share it.
            reserved[id(session.transfers.tiers.space)] = found.host_reserved_bytes
        for item in fields(Stats):
            if item.name != "kept":
                sums[item.name] = sums.get(item.name, 0) + getattr(found, item.name)
    if sums:
        sums["host_reserved_bytes"] = sum(reserved.values())
    return Stats(kept=kept, **sums)


def reset_stats() -> None:
    """Totals to zero; what is held now stays and is the new peak."""
    for session, _, _ in live_sessions():
        session.reset_stats()


def report() -> str:
    """The statistics as a table, with a second one of groups; below, which devices' peak sits where a region is recomputed."""
    groups: dict[str, GroupTotals] = {}
    devices = set()
    for session, framework, options in live_sessions():
        devices.add(f"{framework.device_type} to {options.tier}")
        for group in group_totals(session):
            known = groups.get(group.name, GroupTotals(group.name))
            sums = {
                item.name: getattr(known, item.name) + getattr(group, item.name)
                for item in fields(GroupTotals)
                if item.name != "name"
            }
            groups[group.name] = GroupTotals(group.name, **sums)
    title = f"ebbtide.hyper_parallel: {', '.join(sorted(devices)) or 'nothing moved'}"
    return render_report(stats(), title, list(groups.values())) + render_peaks()


def synchronize() -> None:
    """Blocks until no copy is running."""
    for session, _, _ in live_sessions():
        session.synchronize()
