"""Time that a run may take, shared out to its sections, and what was cut to keep to it."""

from __future__ import annotations

import time


class Budget:
    def __init__(self, minutes: float) -> None:
        self._started = time.monotonic()
        self.total_s = minutes * 60
        self._section_end_s = self.total_s
        self.cut: list[str] = []

    @property
    def used_s(self) -> float:
        return time.monotonic() - self._started

    def begin(self, share: float) -> None:
        """A section begins, that may take this share of all the time."""
        self._section_end_s = min(self.total_s, self.used_s + share * self.total_s)

    def left_s(self) -> float:
        """For the section that runs."""
        return self._section_end_s - self.used_s

    def allows(self, seconds: float, what: str) -> bool:
        """Whether so much time is left; if not, `what` is noted as cut."""
        if self.left_s() >= seconds:
            return True
        if what not in self.cut:
            self.cut.append(what)
        return False
