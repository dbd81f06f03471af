#!/usr/bin/env python3
"""Print requirements from pyproject.toml, one a line, so that each is written down in one place.

Usage: ``requirements.py NAME...``, where a name is ``build`` (the build system's), ``runtime``
(the package's own) or an extra.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:  # pip brings a reader for the Python that has none
    from pip._vendor import tomli as tomllib

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def requirements(names: list[str], pyproject: dict[str, Any]) -> list[str]:
    """Requirements of the named sets, with extras of the package itself resolved."""
    project = pyproject["project"]
    sets = {
        **project["optional-dependencies"],
        "build": pyproject["build-system"]["requires"],
        "runtime": project["dependencies"],
    }
    own_extra = f"{project['name']}["
    found: list[str] = []
    for name in names:
        if name not in sets:
            raise SystemExit(
                f"[requirements] no set {name!r}: take one of {', '.join(sorted(sets))}"
            )
        for requirement in sets[name]:
            if requirement.startswith(own_extra):
                extras = requirement[len(own_extra) : requirement.index("]")].split(",")
                found += requirements([extra.strip() for extra in extras], pyproject)
            else:
                found.append(requirement)
    return list(dict.fromkeys(found))


def read_requirements(*names: str) -> list[str]:
    return requirements(list(names), tomllib.loads(PYPROJECT.read_text(encoding="utf-8")))


if __name__ == "__main__":
    print("\n".join(read_requirements(*sys.argv[1:])))
