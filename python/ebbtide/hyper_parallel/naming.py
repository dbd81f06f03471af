"""Tensors that are named one by one, to leave with a group."""

from __future__ import annotations

import warnings
from typing import Any

from ebbtide.hyper_parallel.groups import Current, Joins
from ebbtide.hyper_parallel.pool import PinnedMemoryPool
from ebbtide.hyper_parallel.runtime import hooks_now, saves_through_scope, saving, session_for
from ebbtide.modules import Modules, tensors_in


def name_in_group(
    place: str,
    now: Current,
    target: object,
    modules: Modules,
    group_swap: bool,
    cpu_pool: PinnedMemoryPool | None,
) -> None:
    """The storages of the tensors in ``target`` leave with the current group, saved in it so far or later.

    For what is saved outside of wrappers a scope is entered, which the group's ``with`` statement leaves. Warns where that
    cannot be.
    """
    swap = session_for(modules, group_swap=group_swap, cpu_pool=cpu_pool)
    now.joins = Joins(group_swap, cpu_pool)
    if now.scope is not None:
        now.scope.request(swap)
    elif not saves_through_scope() and not _enter_scope(now, modules):
        warnings.warn(
            f"[{place}] group {now.group.name!r} is current, but what is saved here does not come to it: nothing leaves; "
            f"put the code into SwapManager().group_context({now.group.name!r}), outside of recomputed regions and of other "
            f"saved-tensor hooks, or call it under swap ({now.group.state()})",
            RuntimeWarning,
            stacklevel=3,
        )
    # Nobody else holds the run before something is saved in it.
    now.named = now.run()
    now.named.request(tensors_in(target, modules), swap.session)


def _enter_scope(now: Current, modules: Modules) -> bool:
    """Whether the scope could be entered so that it is the first to be left."""
    if now.hooks is None or now.hooks != hooks_now():
        return False
    joins: Any = now.joins
    scope = saving(
        None,
        modules=modules,
        on_request=True,
        name=now.group.name,
        group_swap=joins.group_swap,
        cpu_pool=joins.cpu_pool,
    )
    scope.__enter__()
    now.scope = scope
    return True
