"""The command line: ``ebbtide --version`` and ``ebbtide demo``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import ebbtide
from ebbtide.demo import command as demo
from ebbtide.errors import EbbtideError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command (``sys.argv`` by default) and returns the exit code of the process.

    0: done. 1: done, and what was checked does not hold. 2: could not be done; one line on stderr
    says why. 130: interrupted.
    """
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
        return code
    except EbbtideError as error:
        print(f"ebbtide: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("ebbtide: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ebbtide", description=ebbtide.__doc__)
    parser.add_argument("--version", action="version", version=f"ebbtide {ebbtide.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    demo.add_to(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
