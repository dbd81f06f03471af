"""Every measurement in a process of its own, a few at a time.

They are forked from one that has imported everything and has used nothing of it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess

from peers.cases import Case
from peers.measure import Result, measure
from peers.offloaders import Offloader

TIMEOUT_S = 180
_FORK = multiprocessing.get_context("fork")

# Slow to import, and only some measurements need them.
_IMPORTS = (
    "ebbtide.torch",
    "torch._dynamo",  # dispatch modes import it
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "trl.models.activation_offloading",
)

Pair = tuple[Case, Offloader]


@dataclass
class _Running:
    pair: Pair
    process: BaseProcess
    receiver: connection.Connection
    started_s: float

    def result(self, answer: Result | str) -> Result:
        case, offloader = self.pair
        return Result(case.name, offloader.name, answer) if isinstance(answer, str) else answer

    def receive(self) -> Result:
        try:
            return self.result(self.receiver.recv())
        except EOFError:
            self.process.join()
            return self.result(f"the process ends with {self.process.exitcode}")
        finally:
            self.end()

    def overdue(self) -> bool:
        return time.monotonic() - self.started_s > TIMEOUT_S

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.receiver.close()


def measure_all(pairs: Iterable[Pair], jobs: int) -> Iterator[tuple[Pair, Result]]:
    """In the order in which they end."""
    for name in _IMPORTS:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # the collections of every process would go over all of that
    waiting = iter(pairs)
    running: list[_Running] = []
    try:
        while True:
            while len(running) < jobs and (pair := next(waiting, None)) is not None:
                running.append(_start(pair))
            if not running:
                return
            ready = connection.wait([each.receiver for each in running], timeout=1)
            for each in list(running):
                if each.receiver in ready:
                    running.remove(each)
                    yield each.pair, each.receive()
                elif each.overdue():
                    running.remove(each)
                    each.end()
                    yield each.pair, each.result(f"hangs ({TIMEOUT_S} s)")
    finally:
        for each in running:
            each.end()


def _start(pair: Pair) -> _Running:
    receiver, sender = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=_child, args=(*pair, sender))
    process.start()
    sender.close()
    return _Running(pair, process, receiver, time.monotonic())


def _child(case: Case, offloader: Offloader, sender: connection.Connection) -> None:
    try:
        sender.send(measure(case, offloader))
    except Exception as error:
        sender.send(f"{type(error).__name__}: {str(error).splitlines()[0]}")
