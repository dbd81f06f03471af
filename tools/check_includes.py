#!/usr/bin/env python3
"""Check that includes between the project's C++ files go one way.

``GROUPS`` is the rule: a unit may include units of the groups before its own, and of its own group
those that stand before it. A header and its ``.cc`` are one unit, and so are the files that carry
its name and a suffix (``engine_save.cc`` belongs to ``engine``). A unit that is not in the table
is an error, so a new file gets its place before it gets its dependants.

Usage: ``check_includes.py [ROOT]``. Exit status 1 and one line per violation if there are any.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

GROUPS = (
    ("types", "error", "config"),
    ("byte_ranges", "view_meta", "checksum", "extent_allocator"),
    (
        "storage_ref",
        "block_space",
        "plan",
        "parcel",
        "load",
        "command",
        "stats",
        "window",
        "registry",
    ),
    ("host_pool", "spill_file", "malloc_threshold"),
    ("engine", "journal"),
    ("host_executor",),
    ("bindings",),
)

# On top of the order: what decides never sees what does I/O.
FORBIDDEN = {
    unit: frozenset({"host_executor", "host_pool", "spill_file"})
    for unit in ("engine", "journal", "registry", "plan", "window")
}

HEADER_FOLDER = "include/ebbtide"
SOURCE_FOLDER = "src"
# Every file in it is the one unit "bindings", whatever its name.
BINDINGS_FOLDER = "bindings"

RANK = {unit: rank for rank, unit in enumerate(unit for group in GROUPS for unit in group)}
INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<(ebbtide/[^>]+)>)')


def unit_of(stem: str) -> str:
    """The unit that a file belongs to by its name; the stem itself if the table has none."""
    name = stem
    while name not in RANK and "_" in name:
        name = name.rpartition("_")[0]
    return name if name in RANK else stem


def units(root: Path) -> Iterator[tuple[Path, str]]:
    """The C++ files that the rule covers, each with its unit."""
    for folder in (HEADER_FOLDER, SOURCE_FOLDER, BINDINGS_FOLDER):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".h", ".cc"):
                yield path, "bindings" if folder == BINDINGS_FOLDER else unit_of(path.stem)


def project_includes(path: Path) -> Iterator[tuple[int, str]]:
    """Line number and path of each include of a file of the project."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if match := INCLUDE.match(line):
            yield number, match[1] or match[2]


def violation(unit: str, included: str) -> str | None:
    """Why ``unit`` may not include ``included``, None if it may."""
    if unit == included:
        return None
    if included not in RANK:
        return f"{included} has no place in GROUPS"
    if included in FORBIDDEN.get(unit, ()):
        return f"{unit} must not see {included}"
    if RANK[included] > RANK[unit]:
        return f"{unit} stands before {included} and may not include it"
    return None


def check(root: Path) -> tuple[list[str], int]:
    """All violations under ``root`` as printable lines, and the number of files read."""
    found: list[str] = []
    count = 0
    for path, unit in units(root):
        count += 1
        place = path.relative_to(root).as_posix()
        if unit not in RANK:
            found.append(f"{place}:1: {unit} has no place in GROUPS of {Path(__file__).name}")
            continue
        for number, include in project_includes(path):
            # A binding's own helpers lie beside it; everything else is named by its public header.
            local = unit == "bindings" and not include.startswith("ebbtide/")
            reason = None if local else violation(unit, unit_of(Path(include).stem))
            if reason:
                found.append(f"{place}:{number}: {reason}")
    return found, count


def main(arguments: list[str]) -> int:
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    found, count = check(root)
    print("\n".join([*found, f"check_includes: {count} files, {len(found)} violations"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
