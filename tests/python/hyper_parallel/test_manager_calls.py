"""Calls of the manager that are no part of a chain: unknown names, and tensors that are named one by one."""

from __future__ import annotations

import warnings

import pytest
from checks import assert_same

import ebbtide.hyper_parallel as hp
from ebbtide.errors import UsageError

ROWS, COLUMNS = 6, 8
NBYTES = ROWS * COLUMNS * 4


@pytest.mark.parametrize(
    "call",
    [
        "launch_offload",
        "wait_offload",
        "launch_load",
        "wait_load",
        "release_group_storage",
        "abort_group",
    ],
)
def test_unknown_groups_raise_and_empty_ones_say_nothing(hyper, backend, call):
    """A name that was mistyped is no state of a schedule; RuntimeError is what HyperParallel raises. Of many groups the
    message names those that may have been meant."""
    for number in range(20):
        hyper.manager.ensure_group(f"stage {number}")
    with backend.recording(), hyper.manager.group_context("decoder"):
        pass
    for kind in (UsageError, RuntimeError):
        with pytest.raises(kind, match=rf"\[SwapManager.{call}\] no group 'encodr'.*'decoder'"):
            getattr(hyper.manager, call)("encodr")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        getattr(hyper.manager, call)("decoder")  # nothing is saved in it: an evaluation, say


def add_storage(hyper, tensor):
    hyper.manager.add_storage("named", [tensor], **hyper.options)
    return tensor


def swap_tensor_wrapper(hyper, tensor):
    return hp.swap_tensor_wrapper([tensor], "tag", **hyper.options)[0]


both_ways = pytest.mark.parametrize("name", [add_storage, swap_tensor_wrapper])


def program_of(hyper, backend, name, inside):
    """Saves a tensor that is named, outside of every wrapper, and one that is not."""

    def program(x):
        with inside():
            made = name(hyper, backend.tensor(ROWS, COLUMNS))
            x = backend.save(x, [made, backend.tensor(3, seed=8)])
            made = None
        return x

    return program


def schedule(hyper):
    for call in ("launch_offload", "wait_offload", "launch_load", "wait_load"):
        getattr(hyper.manager, call)("named")


def in_group(hyper):
    return lambda: hyper.manager.group_context("named")


@both_ways
def test_what_is_named_in_a_group_leaves_also_outside_of_wrappers(hyper, backend, name):
    import contextlib

    plain = program_of(hyper, backend, lambda _, tensor: tensor, contextlib.nullcontext)
    forward = backend.forward(plain, [backend.leaf(2)])
    expected = [forward.output, *forward.gradients()]
    program = program_of(hyper, backend, name, in_group(hyper))
    for _ in range(3):
        hp.reset_stats()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            forward = backend.forward(program, [backend.leaf(2)])
            schedule(hyper)
        assert_same(backend, [forward.output, *forward.gradients()], expected)
        stats = hyper.stats()
        assert stats.d2h_bytes == stats.h2d_bytes == NBYTES, stats
        assert stats.kept["policy"] == 1, stats  # what is not named stays
        forward = None
        hyper.assert_at_rest()


@both_ways
def test_nothing_is_hooked_behind_the_group(hyper, backend, name):
    def program(x):
        x = program_of(hyper, backend, name, in_group(hyper))(x)
        hp.reset_stats()
        return backend.save(x, [backend.tensor(ROWS, COLUMNS, seed=4)])

    forward = backend.forward(program, [backend.leaf(2)])
    assert hyper.stats().saved_tensors == 0
    del forward
    hyper.assert_at_rest()


def currently(hyper):
    import contextlib

    @contextlib.contextmanager
    def inside():
        hyper.manager.set_current_group_name("named")
        try:
            yield
        finally:
            hyper.manager.set_current_group_name(None)

    return inside


@both_ways
def test_where_nothing_can_leave_a_warning_names_the_state(hyper, backend, name):
    """Without a `with` statement there is no end at which hooks could be left."""
    program = program_of(hyper, backend, name, currently(hyper))
    with pytest.warns(RuntimeWarning, match="'named' is current.*nothing leaves.*group_context"):
        forward = backend.forward(program, [backend.leaf(2)])
    schedule(hyper)
    forward.gradients()
    assert hyper.stats().d2h_bytes == 0
    forward = None
    hyper.assert_at_rest()


@both_ways
def test_a_set_group_is_enough_under_a_wrapper(hyper, backend, name):
    inner = program_of(hyper, backend, name, currently(hyper))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        forward = backend.forward(lambda x: hp.swap(inner, x, **hyper.options), [backend.leaf(2)])
    schedule(hyper)
    forward.gradients()
    assert hyper.stats().d2h_bytes >= NBYTES
    forward = None
    hyper.assert_at_rest()


def test_storages_added_to_a_group_that_is_not_current(hyper, backend):
    def program(x):
        with pytest.warns(RuntimeWarning, match=r"add_storage\] group 'named': it is not current"):
            add_storage(hyper, x)
        return backend.op("exp", x)

    backend.forward(program, [backend.leaf(2)])
    assert hyper.stats().d2h_bytes == 0
    hyper.assert_at_rest()
