"""The results as one table."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

_MIB = 1 << 20


def show(console: Console, results: dict[str, Any]) -> None:
    machine = results["machine"]
    table = Table(
        title=f"Ebbtide {machine['ebbtide']} on {machine['device']}, torch "
        f"{machine['libraries']['torch']}",
        title_justify="left",
    )
    table.add_column("what", no_wrap=True)
    for column in (
        *("step ms", "× none", "peak MiB", "exposed ms", "pinned MiB", "allocations"),
        *("tokens/s", "copies out/in"),
    ):
        table.add_column(column, justify="right")
    table.add_column("note", overflow="fold")
    for add in (_correctness, _bandwidth, _models, _fill):
        add(table, results)
        table.add_section()
    for what in results["cut"]:
        table.add_row("[yellow]cut for time[/]", *[""] * 8, what)
    console.print(table)


def _correctness(table: Table, results: dict[str, Any]) -> None:
    entries = results["correctness"]["entries"]
    same = sum(entry["equal"] is True for entry in entries)
    open_ = sum(entry["equal"] is None for entry in entries)
    note = f"{same} of {len(entries)} equal bit for bit"
    if open_:
        note += f"; {open_} differ from run to run without Ebbtide too"
    wrong = results["correctness"]["failures"]
    verdict = "[red]wrong[/]" if wrong else "[green]right[/]"
    table.add_row("gradients", *[""] * 8, f"{verdict}: {note}")
    for line in [*wrong, *results["correctness"]["traffic_failures"]]:
        table.add_row("", *[""] * 8, f"[red]{line}[/]")


def _bandwidth(table: Table, results: dict[str, Any]) -> None:
    for row in results.get("bandwidth", []):
        note = (
            f"GB/s out {row['d2h_gb_per_s']:.1f}, in {row['h2d_gb_per_s']:.1f}, each of both "
            f"{row['each_of_both_gb_per_s']:.1f}; Ebbtide {row['ebbtide_d2h_share']:.0%} and "
            f"{row['ebbtide_h2d_share']:.0%} of it"
        )
        table.add_row(f"copies of {row['nbytes'] / _MIB:g} MiB", *[""] * 8, note)


def _models(table: Table, results: dict[str, Any]) -> None:
    for name in ("decoder", "gpt2", "lstm"):
        found = results.get(name)
        if not found:
            continue
        size = f"batch {found['batch']}" if "batch" in found else found.get("missing", "")
        table.add_row(f"[bold]{name}[/]", *[""] * 8, size)
        plain = found["variants"].get("no offload", {}).get("step_s")
        for variant, row in found["variants"].items():
            table.add_row(f"  {variant}", *_cells(row, plain))
        table.add_section()


def _cells(row: dict[str, Any], plain: float | None) -> list[str]:
    step_s = row.get("step_s")
    if step_s is None:
        return [*[""] * 8, row.get("failed") or row.get("missing") or "no time left"]
    wait, pinned = row.get("exposed_wait_s"), row.get("pinned_bytes")
    allocations = row.get("host_allocations_after_first")
    tokens = row.get("tokens_per_s")
    return [
        f"{step_s * 1e3:.1f}",
        f"{step_s / plain:.2f}" if plain else "",
        f"{row['peak_growth_bytes'] / _MIB:.1f}",
        "" if wait is None else f"{wait * 1e3:.1f}",
        "" if pinned is None else f"{pinned / _MIB:.1f}",
        "" if allocations is None else str(allocations),
        "" if tokens is None else f"{tokens:.0f}",
        f"{row['d2h_copies']:g}/{row['h2d_copies']:g}" if "d2h_copies" in row else "",
        row.get("failed", ""),
    ]


def _fill(table: Table, results: dict[str, Any]) -> None:
    found = results.get("fill")
    if not found:
        return
    for name in ("no offload", "Ebbtide"):
        row = found[name]
        least = "" if row["exact"] else "at least "
        table.add_row(
            f"largest batch, {name}",
            *[""] * 8,
            f"{least}{row['largest']} of {found['sizes']['length']} tokens ({len(row['tries'])} tries)",
        )
