"""Step time with and without offloading, on a virtual clock: real models, Ebbtide's engine, no accelerator.

    python benchmarks/step_time.py                 # every model and link; a table, in under a minute
    python benchmarks/step_time.py --smoke         # one small case, in seconds
    python benchmarks/step_time.py --record        # record the traces anew; needs transformers

What takes how long is stated, not measured (``virtual_clock/roofline.py``): compare the rows of one table, and do not
read a row as the step time of a machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from virtual_clock.optimum import Problem, best_schedule, lower_bound
from virtual_clock.roofline import Host, Link, Roofline
from virtual_clock.schedules import CopyAtPack, Result, SaveOnCpu, Schedule
from virtual_clock.trace import Trace

TRACES = Path(__file__).parent / "virtual_clock" / "traces"
MODELS = ("gpt2", "llama-8b", "llama-8b-checkpointed")
LINKS_GB_PER_S = (24.0, 55.0, 350.0)
AIM = 1.05  # times the optimum


def measure(trace: Trace, link: Link, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row a schedule; those of Ebbtide with the optimum in the same memory."""
    from virtual_clock.engine_run import EngineSchedule, Options

    times = args.roofline.times(trace)
    plain = {
        "no offload": Schedule(trace, times, link, args.host),
        "save_on_cpu": SaveOnCpu(trace, times, link, args.host),
        "naive, by tensor": CopyAtPack(trace, times, link, args.host),
        "naive, by storage": CopyAtPack(trace, times, link, args.host, by_storage=True),
    }
    for name, schedule in plain.items():
        yield _row(name, schedule.run())
    ebbtide = {
        "Ebbtide": Options(**args.options),
        "Ebbtide, no groups": Options(**args.options, groups=False),
    }
    for name, options in ebbtide.items():
        schedule = EngineSchedule(trace, times, link, args.host, options)
        result = schedule.run()
        row = _row(name, result)
        stats = schedule.engine.stats()
        for count in ("live_hits", "prefetch_hits", "prefetch_misses"):
            row[count] = getattr(stats, count)
        row["optimum"] = _optimum(trace, times, link, args.host, result.peak_bytes)
        row["optimum_in_device_peak"] = _optimum(
            trace, times, link, args.host, result.device_peak_bytes
        )
        yield row


def _row(name: str, result: Result) -> dict[str, Any]:
    return {"schedule": name, **dataclasses.asdict(result)}


def _optimum(
    trace: Trace, times: Sequence[float], link: Link, host: Host, limit: int
) -> dict[str, Any]:
    problem = Problem(trace, times, link, host, limit)
    best = best_schedule(problem)
    return {
        "limit_bytes": limit,
        "at_least_s": lower_bound(problem),
        "at_most_s": best.step_s if best is not None else None,
        "moved_bytes": best.moved_bytes if best is not None else None,
        "peak_bytes": best.peak_bytes if best is not None else None,
    }


# --- output


def show(console: Console, title: str, rows: Sequence[dict[str, Any]]) -> None:
    """One link's rows."""
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("schedule", no_wrap=True)
    for column in (
        *("step ms", "× none", "peak GiB", "on device", "exposed ms", "late ms"),
        *("out GiB", "in GiB", "out busy", "in busy", "÷ best", "÷ bound"),
    ):
        table.add_column(column, justify="right", no_wrap=True)
    none_s = rows[0]["step_s"]
    for row in rows:
        step_s, optimum = row["step_s"], row.get("optimum")
        most = optimum["at_most_s"] if optimum is not None else None
        table.add_row(
            row["schedule"],
            f"{step_s * 1e3:.1f}",
            f"{step_s / none_s:.2f}",
            _gib(row["peak_bytes"]),
            _gib(row["device_peak_bytes"]),
            f"{row['exposed_s'] * 1e3:.1f}",
            f"{row['host_late_s'] * 1e3:.1f}",
            _gib(row["d2h_bytes"]),
            _gib(row["h2d_bytes"]),
            f"{row['d2h_busy_s'] / step_s:.0%}",
            f"{row['h2d_busy_s'] / step_s:.0%}",
            _ratio(step_s, most),
            _ratio(step_s, optimum["at_least_s"] if optimum is not None else None),
        )
        if optimum is None or most is None:
            continue
        table.add_row(
            "  the best in its peak",
            f"{most * 1e3:.1f}",
            f"{most / none_s:.2f}",
            _gib(optimum["limit_bytes"]),
            _gib(optimum["peak_bytes"]),
            *("", ""),
            _gib(optimum["moved_bytes"]),
            *("", "", "", ""),
            f"{most / optimum['at_least_s']:.3f}",
            style="dim",
        )
    console.print(table)


def _ratio(step_s: float, optimum_s: float | None) -> str:
    if optimum_s is None:
        return ""
    colour = "green" if step_s <= AIM * optimum_s else "red"
    return f"[{colour}]{step_s / optimum_s:.3f}[/]"


LEGEND = """\
naive: copied at pack on a side stream, loaded at unpack. no groups: as without a model.
peak: of saved storages, as an allocator counts while the host runs ahead; on device: as the device uses them.
exposed: compute waited for a copy; late: for the host. busy: of the link, of the step.
best, bound: the best schedule found in as much memory as that peak, and what no schedule can do better than.
"""


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f}"


def _parameters(args: argparse.Namespace) -> dict[str, Any]:
    from virtual_clock.engine_run import Options

    return {
        "roofline": dataclasses.asdict(args.roofline),
        "host": dataclasses.asdict(args.host),
        "copy_s": args.copy_us * 1e-6,
        "options": dataclasses.asdict(Options(**args.options)),
    }


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="one small case")
    parser.add_argument("--record", action="store_true", help="record the traces anew first")
    parser.add_argument("--json", type=Path, help="write the numbers there too")
    parser.add_argument("--traces", type=Path, default=TRACES, help="their folder")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--links", nargs="+", type=float, default=LINKS_GB_PER_S, help="GB/s")
    machine = parser.add_argument_group("the machine")
    roofline, host = Roofline(), Host()
    machine.add_argument("--flops-share", type=float, default=roofline.flops_share)
    machine.add_argument("--memory-share", type=float, default=roofline.memory_share)
    machine.add_argument("--launch-us", type=float, default=roofline.launch_s * 1e6)
    machine.add_argument("--copy-us", type=float, default=6.0, help="that no copy is shorter than")
    machine.add_argument("--host-op-us", type=float, default=host.op_s * 1e6)
    machine.add_argument("--queued-ops", type=int, default=host.queued_ops)
    engine = parser.add_argument_group("Ebbtide's options")
    for name in (
        *("min_bytes", "keep_last_bytes", "keep_last_groups", "prefetch_bytes"),
        *("prefetch_groups", "in_flight_bytes"),
    ):
        engine.add_argument(f"--{name.replace('_', '-')}", type=int)
    args = parser.parse_args(argv)
    if args.smoke:
        args.models, args.links = ("gpt2",), (55.0,)
    args.roofline = Roofline(
        flops_share=args.flops_share,
        memory_share=args.memory_share,
        launch_s=args.launch_us * 1e-6,
    )
    args.host = Host(op_s=args.host_op_us * 1e-6, queued_ops=args.queued_ops)
    names = [action.dest for action in engine._group_actions]
    args.options = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    console = Console()
    if console.width < 150 and not console.is_terminal:
        console = Console(width=150)
    if args.record:
        from virtual_clock.record import RECIPES, record

        args.traces.mkdir(parents=True, exist_ok=True)
        for name in args.models:
            record(RECIPES[name]).save(args.traces / f"{name}.json.gz")
    console.print_json(json.dumps(_parameters(args)))
    results: list[dict[str, Any]] = []
    for name in args.models:
        trace = Trace.load(args.traces / f"{name}.json.gz")
        settings = ", ".join(f"{key} {value}" for key, value in trace.settings.items())
        console.print(f"\n[bold]{trace.model}[/] ({settings})", highlight=False)
        for gb_per_s in args.links:
            rows = list(measure(trace, Link(gb_per_s * 1e9, args.copy_us * 1e-6), args))
            show(console, f"{trace.model}, {gb_per_s:g} GB/s each way", rows)
            results += [{"model": name, "link_gb_per_s": gb_per_s, **row} for row in rows]
    console.print(LEGEND, highlight=False)
    if args.json is not None:
        content = {"parameters": _parameters(args), "results": results}
        args.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
