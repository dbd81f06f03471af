"""Which parts of a model make good groups, and when they run; for any framework.

A *module* is what the framework builds models of; how it is put together is told by a ``Structure``.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

Module = Any
NamedModule = tuple[str, Module]


class Structure(Protocol):
    """How models of one framework are put together."""

    def unwrapped(self, module: Module) -> Module:
        """What a wrapper wraps, to the innermost; the module itself where it is none."""

    def class_of(self, module: Module) -> type:
        """The class that the user's code gave a module, or what it wraps."""

    def children(self, module: Module) -> Iterable[NamedModule]:
        """Those directly inside, by their own names, in order of registration."""

    def is_container(self, module: Module) -> bool:
        """Whether it is a list of modules, a sequence or a dict."""

    def has_parameters(self, module: Module) -> bool: ...

    def is_hookable(self, module: Module) -> bool:
        """Whether it is called, as plain lists of modules are not, and takes hooks."""


def repeated_blocks(model: Module, structure: Structure) -> list[NamedModule]:
    """The layers of a model: outermost modules of classes that occur more than once, with their names.

    Where a model (or a part of it) names its blocks in ``_no_split_modules``, as those of transformers do, these are
    taken. Elsewhere children of containers are, if they have parameters and submodules of their own.

    A wrapped block counts by what it wraps: the module listed is the outermost wrapper, as only that one is called from
    outside, and names go without wrappers. A module that occurs several times is listed once, under its first name. In
    order of registration, which usually is that of forward.
    """
    names: dict[Module, str] = {}
    for name, module in _Search(structure).find(model, ""):
        names.setdefault(module, name)
    return [(name, module) for module, name in names.items()]


class BlockCalls:
    """Pairs what hooks tell of the beginnings and ends of blocks.

    ``begin`` and ``end`` are called on the thread that runs the block, one block at a time: every begin has its end
    before the next begin on that thread. Where it is not told, for a signal handler raised in forward, it comes with the
    next begin or with ``finish``.
    What ``begin`` raises is raised by the block, which then has not begun.
    """

    def __init__(self, begin: Callable[[str], None], end: Callable[[str], None]) -> None:
        self._begin = begin
        self._end = end
        self._running = _Running()

    def start(self, name: str) -> None:
        self.finish()
        self._running.name = name
        try:
            self._begin(name)
        except BaseException:
            self._running.name = None
            raise

    def stop(self, name: str) -> None:
        if self._running.name == name:
            self.finish()

    def finish(self) -> None:
        name, self._running.name = self._running.name, None
        if name is not None:
            self._end(name)


class _Running(threading.local):
    name: str | None = None


class _Search:
    def __init__(self, structure: Structure) -> None:
        self._of = structure

    def find(self, module: Module, name: str) -> list[NamedModule]:
        """Every place of a block below ``module``."""
        core = self._of.unwrapped(module)
        if declared := self._declared(core):
            places = list(self._outermost(core, name, declared))
            repeated = self._repeated_classes(place for _, place in places)
            if places := [place for place in places if self._of.class_of(place[1]) in repeated]:
                return places
        found: list[NamedModule] = []
        children = list(self._children(core, name))
        repeated = set()
        if self._of.is_container(core):
            repeated = self._repeated_classes(child for _, child in children)
        for child_name, child in children:
            is_block = self._of.class_of(child) in repeated and self._may_be_block(child)
            inside: list[NamedModule] = []
            if not is_block or self._is_divisible(child):
                inside = self.find(child, child_name)
            found += [(child_name, child)] if is_block and not inside else inside
        return found

    def _outermost(self, core: Module, name: str, class_names: set[str]) -> Iterator[NamedModule]:
        for child_name, child in self._children(core, name):
            inner = self._of.unwrapped(child)
            names = {type(inner).__name__, self._of.class_of(inner).__name__}
            if names & class_names and self._of.is_hookable(child):
                yield child_name, child
            else:
                yield from self._outermost(inner, child_name, class_names)

    def _children(self, core: Module, name: str) -> Iterator[NamedModule]:
        for child_name, child in self._of.children(core):
            yield f"{name}.{child_name}" if name else child_name, child

    def _declared(self, core: Module) -> set[str]:
        """Class names in ``_no_split_modules`` of a module that has any, and of those inside it."""
        names: set[str] = set()
        if getattr(core, "_no_split_modules", None):
            for module in self._all_inside(core):
                given = getattr(module, "_no_split_modules", None) or ()
                names.update((given,) if isinstance(given, str) else given)
        return names

    def _all_inside(self, core: Module) -> Iterator[Module]:
        seen: set[int] = set()
        left = [core]
        while left:
            module = left.pop()
            if id(module) not in seen:
                seen.add(id(module))
                yield module
                left += [child for _, child in self._of.children(module)]

    def _repeated_classes(self, modules: Iterable[Module]) -> set[type]:
        counts = Counter(map(self._of.class_of, modules))
        return {module_class for module_class, count in counts.items() if count > 1}

    def _may_be_block(self, module: Module) -> bool:
        core = self._of.unwrapped(module)
        # A parametrized layer has its parametrizations as a submodule.
        has_submodules = any(name != "parametrizations" for name, _ in self._of.children(core))
        return has_submodules and self._of.has_parameters(core) and self._of.is_hookable(module)

    def _is_divisible(self, module: Module) -> bool:
        """Whether blocks inside are better groups: a list of layers or a whole model among its like."""
        core = self._of.unwrapped(module)
        return self._of.is_container(core) or bool(self._declared(core))
