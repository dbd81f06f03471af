"""Real models train with the same bits, and move exactly what an independent count says."""

from __future__ import annotations

from typing import Any

import pytest
from model_training import Moved, Step, Training, plain, train_and_compare
from saved_bytes import SavedBytes
from support import DEVICE, EXACT, assert_at_rest
from zoo import LARGE, ZOO, Size

import ebbtide.torch as ebb

KIB, MIB = 1 << 10, 1 << 20

models = pytest.mark.parametrize("name", ZOO)
# Where to, and how: files are behind host memory on a device, and have tests of their own.
_WAYS = {
    "cpu": {
        "disk": {"to": "disk"},
        "host": {"to": "host"},
        "packed": {"to": "disk", "group_swap": True},
    },
    "tide": {"host": {"to": "host"}, "packed": {"to": "host", "group_swap": True}},
}[DEVICE]
tiers = pytest.mark.parametrize("to", _WAYS.values(), ids=_WAYS)
ONE_WAY = list(_WAYS.values())[0]
precisions = pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])


def kept_counts(saved: SavedBytes, **others: int) -> dict[str, int]:
    counts = {
        "parameter": saved.parameters,
        "parameter_cast": saved.parameter_casts,
        "small": saved.small,
        **others,
    }
    return {reason: count for reason, count in counts.items() if count}


def assert_exact(saved: SavedBytes, moved: Moved) -> None:
    """Each byte that nobody else holds went out once and came back once; the others did not move."""
    free, held = saved.free, saved.held
    nbytes = sum(storage.wanted_bytes for storage in free)

    stats = moved.after_forward
    assert {reason: count for reason, count in stats.kept.items() if count} == kept_counts(saved)
    assert stats.saved_tensors == saved.tensors
    assert stats.storages == len(saved.storages)
    assert stats.exact_duplicates == sum(s.tensors - s.views for s in saved.storages)
    assert stats.unique_bytes == saved.unique_bytes
    assert stats.d2h_bytes == nbytes
    assert stats.freed_bytes == sum(storage.nbytes for storage in free)
    assert stats.disk_bytes + stats.host_bytes == nbytes
    assert stats.spilled_bytes in (0, nbytes)
    # What is left are storages that others hold, and nothing else.
    assert stats.parked == len(held)
    assert stats.device_bytes == sum(storage.nbytes for storage in held)
    assert stats.unfreed_bytes == 0

    stats = moved.after_backward
    assert (stats.d2h_bytes, stats.h2d_bytes) == (nbytes, nbytes)
    assert stats.h2d_copies == stats.d2h_copies
    assert stats.live_hits == sum(storage.tensors for storage in held)
    assert (stats.unfreed_bytes, stats.parked) == (0, 0)


def assert_rest(tide: ebb.Offload, steps: list[Step]) -> None:
    for step in steps:
        stats = step.moved.at_rest
        held = (stats.entries, stats.device_bytes, stats.host_bytes, stats.disk_bytes, stats.parked)
        assert held == (0, 0, 0, 0, 0), stats
    assert_at_rest(tide)


def addresses(tensors: Any) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


@precisions
@tiers
@models
def test_all_that_can_be_freed_moves(name: str, to: dict[str, Any], autocast: bool) -> None:
    training = Training(name, autocast=autocast)
    tide, steps = train_and_compare(training, **to, **EXACT)
    for step, expected in zip(steps, plain(training), strict=True):
        assert_exact(expected.saved, step.moved)
        assert step.moved.after_backward.d2h_bytes > 0
        assert (expected.saved.parameter_casts > 0) == autocast
        # What stays is the batch, which is the caller's.
        batch = addresses(expected.batch.values())
        assert {storage.address for storage in expected.saved.held} <= batch
    assert_rest(tide, steps)


@precisions
@models
def test_what_the_caller_keeps_stays(name: str, autocast: bool) -> None:
    """Hidden states of all layers, logits, router scores: readable after backward, never copied."""
    training = Training(name, autocast=autocast, keeps_outputs=True)
    tide, steps = train_and_compare(training, **ONE_WAY, **EXACT)
    alone = plain(Training(name, autocast=autocast))
    for step, expected, less in zip(steps, plain(training), alone, strict=True):
        assert step.outputs
        assert_exact(expected.saved, step.moved)
        assert expected.saved.unique_bytes == less.saved.unique_bytes
        assert len(expected.saved.held) >= len(less.saved.held)
    assert_rest(tide, steps)


def assert_bounded(saved: SavedBytes, moved: Moved, keep_last_bytes: int) -> None:
    """Of what can be freed, all but the last so many bytes moved."""
    free, nbytes = sum(s.wanted_bytes for s in saved.free), moved.after_backward.d2h_bytes
    # The newest stays, however large.
    kept = max([keep_last_bytes, *(storage.wanted_bytes for storage in saved.free)])
    assert free - kept <= nbytes <= free
    assert moved.after_forward.device_bytes >= sum(storage.nbytes for storage in saved.held)
    stats = moved.after_backward
    assert stats.unique_bytes == saved.unique_bytes
    last = stats.kept["last"]
    kept = {reason: count for reason, count in stats.kept.items() if count}
    assert kept == kept_counts(saved, last=last)
    assert stats.d2h_bytes == stats.h2d_bytes
    assert (stats.unfreed_bytes, stats.parked) == (0, 0)


@precisions
@tiers
@models
def test_defaults(name: str, to: dict[str, Any], autocast: bool) -> None:
    """The default window holds all of a small model; a small one lets most of it go."""
    training = Training(name, autocast=autocast)
    # A device's default window is the last block, which is not all of the model.
    window = {} if DEVICE == "cpu" else {"keep_last_bytes": 32 * MIB}
    for options in (
        {"min_bytes": KIB, **window},
        {"min_bytes": 4 * KIB, "keep_last_bytes": 16 * KIB},
    ):
        tide, steps = train_and_compare(training, **to, **options)
        for step, expected in zip(steps, plain(training), strict=True):
            saved = expected.saved.at_least(options["min_bytes"])
            keep_last_bytes = tide._resolved.keep_last_bytes
            assert_bounded(saved, step.moved, keep_last_bytes)
            nbytes = step.moved.after_backward.d2h_bytes
            if sum(storage.wanted_bytes for storage in saved.free) > keep_last_bytes:
                assert nbytes > 0
            elif saved.unique_bytes <= keep_last_bytes:
                assert nbytes == 0
        assert_rest(tide, steps)


@pytest.mark.parametrize("keep", [0, 1, 2])
@tiers
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "mixtral"])
def test_the_last_blocks_stay(name: str, to: dict[str, Any], keep: int) -> None:
    """Blocks are groups; all but the last ones, and what comes after them, move."""
    training = Training(name, size=Size(layers=4))
    tide, steps = train_and_compare(training, **to, min_bytes=0, keep_last_groups=keep)
    groups = tide.group_stats()
    assert len(groups) == 4
    for number, group in enumerate(groups):
        moved = group.d2h_bytes > 0
        assert moved == (number < 4 - keep), groups
        assert group.h2d_bytes == group.d2h_bytes <= group.unique_bytes
    assert_rest(tide, steps)


def test_small_storages_cross_in_few_copies() -> None:
    """Hundreds of storages of a recurrent net; the bytes are those of copying one by one."""
    training = Training("lstm-cells", size=Size(layers=2, width=32, sequence=64, samples=4))
    host = {"to": "host"}
    tide, one_by_one = train_and_compare(training, **host, **EXACT)
    assert_rest(tide, one_by_one)
    tide, packed = train_and_compare(training, **host, group_swap=True, **EXACT)
    assert_rest(tide, packed)
    for a, b in zip(one_by_one, packed, strict=True):
        single, few = a.moved.after_backward, b.moved.after_backward
        assert few.storages == single.storages > 850
        assert (few.d2h_bytes, few.h2d_bytes) == (single.d2h_bytes, single.h2d_bytes)
        assert single.d2h_copies == single.h2d_copies > 850
        assert few.d2h_copies <= 40 and few.h2d_copies <= 40


@pytest.mark.slow
@precisions
@tiers
@models
def test_larger(name: str, to: dict[str, Any], autocast: bool) -> None:
    training = Training(name, size=LARGE, autocast=autocast)
    tide, steps = train_and_compare(training, **to, **EXACT)
    for step, expected in zip(steps, plain(training), strict=True):
        assert_exact(expected.saved, step.moved)
    assert_rest(tide, steps)
    tide, steps = train_and_compare(training, **to, keep_last_bytes=MIB)
    for step, expected in zip(steps, plain(training), strict=True):
        saved = expected.saved.at_least(tide._resolved.min_bytes)
        assert_bounded(saved, step.moved, MIB)
        # Of recurrent nets nearly all storages may be too small to leave, and the window holds the rest.
        may_all_stay = sum(storage.wanted_bytes for storage in saved.free) <= MIB
        assert not may_all_stay or name.startswith("lstm")
        assert may_all_stay or step.moved.after_backward.d2h_bytes > 0
    assert_rest(tide, steps)
    plain.cache_clear()  # large


# --- gradient checkpointing

checkpointing = pytest.mark.parametrize("name", [n for n, kind in ZOO.items() if kind.checkpoints])
reentrant_or_not = pytest.mark.parametrize("reentrant", [False, True])


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated")
@precisions
@reentrant_or_not
@checkpointing
def test_gradient_checkpointing(name: str, reentrant: bool, autocast: bool) -> None:
    training = Training(name, autocast=autocast, reentrant=reentrant)
    tide, steps = train_and_compare(training, **ONE_WAY, **EXACT)
    whole = plain(Training(name, autocast=autocast))
    for step, expected, more in zip(steps, plain(training), whole, strict=True):
        assert_exact(expected.saved, step.moved)
        assert 0 < expected.saved.unique_bytes < 0.5 * more.saved.unique_bytes
    assert_rest(tide, steps)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated")
@reentrant_or_not
@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral"])
def test_layer_inputs_of_decoders(name: str, reentrant: bool) -> None:
    """One hidden state for each layer moves, and nothing else."""
    training = Training(name, reentrant=reentrant)
    tide, steps = train_and_compare(training, **ONE_WAY, only="layer_inputs", **EXACT)
    size = training.size
    hidden_bytes = 4 * size.samples * size.sequence * size.width
    for step in steps:
        stats = step.moved.after_backward
        assert stats.d2h_bytes == stats.h2d_bytes == size.layers * hidden_bytes
        assert stats.kept["policy"] > 0
    assert_rest(tide, steps)
