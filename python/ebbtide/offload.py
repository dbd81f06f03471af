"""The context that users enter, for any framework."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from ebbtide import process
from ebbtide.config import OffloadConfig, Resolved
from ebbtide.errors import UsageError
from ebbtide.framework import Framework, Tensor, Weights
from ebbtide.report import Stats, metrics, render_report
from ebbtide.saved import Kept, Ticket
from ebbtide.session import Session


class Scope:
    """One entry of the context on one thread."""

    def __init__(self, session: Session, framework: Framework, weights: Weights) -> None:
        self._session = session
        self._weights = weights
        self._epoch = session.begin_epoch()
        self._left = False
        self._hooks: AbstractContextManager[Any] = framework.saved_tensor_hooks(
            self.pack, session.unpack
        )

    def pack(self, tensor: Tensor) -> Kept | Ticket:
        if self._left:
            # Frameworks restore the hooks that a backward began with: left inside one, they stay.
            return self._session.keep(tensor)
        return self._session.pack(tensor, self._epoch, self._weights)

    def enter(self) -> None:
        self._hooks.__enter__()

    def exit(self) -> None:
        self._left = True
        self._hooks.__exit__(None, None, None)
        self._session.end_epoch(self._epoch)


class _Entered(threading.local):
    def __init__(self) -> None:
        self.scopes: list[Scope] = []


class Offload:
    """Offloads what autograd saves while the context is entered; backward may run inside it or after it.

    May be entered many times, nested, and by several threads at once. Totals run from the object's making or from
    ``reset_stats``.
    """

    def __init__(
        self, framework: Framework, config: OffloadConfig, resolved: Resolved, model: Any
    ) -> None:
        self.config = config
        self._framework = framework
        self._resolved = resolved
        self._weights = framework.weights(model)
        self._session = Session(framework, resolved, config.policy)
        self._entered = _Entered()

    def __enter__(self) -> Offload:
        process.require_usable("offload")
        self._weights.refresh()
        scope = Scope(self._session, self._framework, self._weights)
        scope.enter()
        self._entered.scopes.append(scope)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._entered.scopes:
            raise UsageError(
                "[offload] left on a thread that has not entered it: enter and leave on one thread"
            )
        self._entered.scopes.pop().exit()

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        raise UsageError(
            "[offload] is a context, not a decorator: write 'with offload(model):' around the forward"
        )

    def stats(self) -> Stats:
        """Totals and what is held now, as a frozen dataclass. Bytes, counts, seconds."""
        on_disk = self._resolved.tier == "disk"
        return Stats.from_core(
            self._session.stats(),
            on_disk=on_disk,
            host_reserved_bytes=0 if on_disk else self._session.transfers.space.reserved_bytes,
            exposed_wait_s=self._session.transfers.exposed_wait_s,
        )

    def reset_stats(self) -> None:
        """Totals to zero; what is held now stays and is the new peak."""
        self._session.reset_stats()

    def metrics(self) -> dict[str, float]:
        """The statistics as one flat dict for loggers."""
        return metrics(self.stats())

    def report(self) -> str:
        """The statistics as a table."""
        return render_report(
            self.stats(), f"ebbtide: {self._framework.device_type} to {self._resolved.tier}"
        )

    def synchronize(self) -> None:
        """Block until no copy of this object is running."""
        self._session.synchronize()
