"""Trace: one step of a model as a list of events, in the order in which the host goes through them.

Storages, tickets, views and names are indices. A storage's own life (``born`` to ``let_go``) is what the model does
with it; what autograd adds are tickets, from ``save`` to ``drop``, and the tensors it got back, from ``unpack`` to
``unused``. Weights are in no event but the operations that read them.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

OP = "op"  # index of the operation
BORN = "born"  # storage: allocated for the operation after this
SAVE = "save"  # ticket
LET_GO = "let_go"  # storage: only what autograd saved is left
UNPACK = "unpack"  # ticket
UNUSED = "unused"  # ticket: what its unpack gave is gone
DROP = "drop"  # ticket: autograd asks for it no more
BEGIN_GROUP = "begin"  # label
END_GROUP = "end"  # label
BACKWARD = "backward"  # 0; once, where forward has ended


class Event(NamedTuple):
    kind: str
    number: int


class Op(NamedTuple):
    """One kernel. ``nbytes`` are read and written; ``flops`` is 0 where memory bandwidth decides."""

    name: int
    module: int
    flops: int
    nbytes: int
    dtype: str


class View(NamedTuple):
    """As a saved tensor lies in its storage; ``storage_offset``, sizes and strides in elements."""

    storage_offset: int
    itemsize: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


class Ticket(NamedTuple):
    storage: int
    view: int
    version: int  # of the in-place counter


@dataclass
class Trace:
    model: str
    settings: dict[str, Any] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    storages: list[int] = field(default_factory=list)  # bytes
    views: list[View] = field(default_factory=list)
    tickets: list[Ticket] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    weight_saves: int = 0  # saved tensors that were weights, left out

    def __post_init__(self) -> None:
        self.views = [
            View(offset, itemsize, tuple(sizes), tuple(strides))
            for offset, itemsize, sizes, strides in self.views
        ]
        self.tickets = [Ticket(*ticket) for ticket in self.tickets]
        self.ops = [Op(*op) for op in self.ops]
        self.events = [Event(*event) for event in self.events]

    def save(self, path: Path) -> None:
        """Equal traces give equal files."""
        content = json.dumps(asdict(self), separators=(",", ":")).encode()
        path.write_bytes(gzip.compress(content, compresslevel=9, mtime=0))

    @classmethod
    def load(cls, path: Path) -> Trace:
        return cls(**json.loads(gzip.decompress(path.read_bytes())))

    @cached_property
    def lives(self) -> list[Life]:
        """Of each storage."""
        lives = [Life() for _ in self.storages]
        started: dict[int, int] = {}
        op = 0
        for kind, index in self.events:
            if kind == OP:
                op += 1
            elif kind == BORN:
                lives[index].born = op
            elif kind == LET_GO:
                lives[index].let_go = op - 1
            elif kind == UNPACK:
                started[index] = op
            elif kind == UNUSED:
                lives[self.tickets[index].storage].uses.append((started[index], op - 1))
            elif kind == DROP:
                lives[self.tickets[index].storage].dropped = op - 1
        return lives

    def check(self) -> None:
        """Raises ValueError where the events contradict each other."""
        for problem in self._problems():
            raise ValueError(f"[{self.model}] {problem}")

    def _problems(self) -> Iterator[str]:
        born: set[int] = set()
        let_go: set[int] = set()
        saved: set[int] = set()
        in_use: set[int] = set()
        dropped: set[int] = set()
        groups: list[int] = []
        for place, (kind, index) in enumerate(self.events):
            at = f"event {place} ({kind} {index})"
            if kind == BORN:
                if index in born:
                    yield f"{at}: born twice"
                born.add(index)
            elif kind == LET_GO:
                if index not in born or index in let_go:
                    yield f"{at}: not alive"
                let_go.add(index)
            elif kind == SAVE:
                storage = self.tickets[index].storage
                if storage not in born or storage in let_go:
                    yield f"{at}: its storage is not alive"
                saved.add(index)
            elif kind == UNPACK:
                if index not in saved or index in dropped or index in in_use:
                    yield f"{at}: not saved, dropped, or in use"
                in_use.add(index)
            elif kind == UNUSED:
                if index not in in_use:
                    yield f"{at}: not in use"
                in_use.discard(index)
            elif kind == DROP:
                if index not in saved or index in dropped:
                    yield f"{at}: not saved"
                dropped.add(index)
            elif kind == BEGIN_GROUP:
                groups.append(index)
            elif kind == END_GROUP and (not groups or groups.pop() != index):
                yield f"{at}: not the group begun last"
        if groups or in_use or saved - dropped or born - let_go:
            yield "something is left at the end"


@dataclass
class Life:
    """When a storage is there without offloading, in indices of operations, both ends included."""

    born: int = 0
    let_go: int = -1  # the last one while the model holds it
    dropped: int = -1  # the last one while a ticket is there
    uses: list[tuple[int, int]] = field(default_factory=list)  # of what unpacks gave

    @property
    def end(self) -> int:
        return max([self.let_go, self.dropped, *(end for _, end in self.uses)])
