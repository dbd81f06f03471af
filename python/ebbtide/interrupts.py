"""Exceptions out of signal handlers, such as Ctrl-C or a time limit's, may come in the middle of any call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from ebbtide.errors import EbbtideError

_Call = TypeVar("_Call", bound=Callable[..., Any])


def noting_interrupts(call: _Call) -> _Call:
    """For methods of an object with ``transfers``: those are told that a call was cut short."""

    @functools.wraps(call)
    def noting(self: Any, *arguments: Any) -> Any:
        try:
            return call(self, *arguments)
        except EbbtideError:  # raised on purpose, with everything in order
            raise
        except BaseException:
            self.transfers.cut_short()
            raise

    return cast(_Call, noting)
