"""Recomputed regions on torch: inputs that leave, policies, what is not recomputed; equal to the model without."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from harness import Hyper
from support import DEVICE
from torch import nn
from torch_support import assert_same_bits
from training import WIDTH, make_input, make_model, step

import ebbtide.hyper_parallel as hp
import ebbtide.torch as ebb
from ebbtide.errors import InplaceModificationError, UsageError

aten = torch.ops.aten
ROWS = 16
HIDDEN_BYTES = ROWS * WIDTH * 4
SAVE, SWAP, RECOMPUTE = (
    hp.CheckpointPolicy.MUST_SAVE,
    hp.CheckpointPolicy.MUST_SWAP,
    hp.CheckpointPolicy.MUST_RECOMPUTE,
)


@pytest.fixture(autouse=True, scope="module")
def after_a_first_checkpoint() -> None:
    """torch's first checkpoint imports its compiler, which leaves the frames that led there in a reference cycle."""
    x = torch.zeros(1, device="cpu", requires_grad=True)
    torch_checkpoint.checkpoint(torch.exp, x, use_reentrant=False)
    gc.collect()


class Regions(nn.Module):
    """Each block a region, called with a function of this module."""

    def __init__(self, model: nn.Sequential, call: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.model:
            x = self.call(block, x)
        return x


def make(hyper: Hyper, depth: int = 3) -> nn.Sequential:
    return make_model(depth).to(hyper.backend.device)


def data(hyper: Hyper, rows: int = ROWS, width: int = WIDTH, seed: int = 1) -> torch.Tensor:
    return make_input(rows, width, seed).to(hyper.backend.device)


def leaf(hyper: Hyper) -> torch.Tensor:
    return data(hyper).requires_grad_()


def products(answer: Any) -> Callable[..., Any]:
    ops = (aten.addmm.default, aten.mm.default)
    return lambda ctx, op, *args, **kwargs: answer if op in ops else RECOMPUTE


def check(hyper: Hyper, model: nn.Module, plain: nn.Module, x: torch.Tensor) -> None:
    for _ in range(3):
        expected = step(plain, x)
        hp.reset_stats()
        assert_same_bits(step(model, x), expected)
        hyper.assert_at_rest()


def behind(hyper: Hyper, loss: torch.Tensor) -> torch.Tensor:
    """Another region, after which what was held in those before is looked at again. Its own input is four bytes."""
    return hp.checkpoint(torch.exp, loss, swap_inputs=True, **hyper.options)


# --- inputs


def test_inputs_leave_and_nothing_else(hyper: Hyper) -> None:
    plain = make(hyper, 4)
    model = Regions(plain, partial(hp.checkpoint, swap_inputs=True, **hyper.options))
    check(hyper, model, plain, leaf(hyper))
    stats = hp.stats()
    # The first block's input is the caller's; the last one's is held until nothing follows that would look at it again.
    assert stats.d2h_bytes == stats.h2d_bytes == 2 * HIDDEN_BYTES
    assert (stats.storages, stats.live_hits, stats.unfreed_bytes) == (4, 2, 0)


def test_without_swap_nothing_moves(hyper: Hyper) -> None:
    plain = make(hyper)
    check(hyper, Regions(plain, hp.checkpoint), plain, leaf(hyper))
    assert hp.stats().saved_tensors == 0


Pair = namedtuple("Pair", "one other")


class _Inputs:
    """Ways to hand a region its tensors: what is passed, and how the region finds them."""

    @staticmethod
    def direct(x: Any, y: Any) -> tuple[Any, Any]:
        return (x, y), {}

    @staticmethod
    def listed(x: Any, y: Any) -> tuple[Any, Any]:
        return ([x, [y]],), {}

    @staticmethod
    def tupled(x: Any, y: Any) -> tuple[Any, Any]:
        return ((x, (3, y)),), {}

    @staticmethod
    def named(x: Any, y: Any) -> tuple[Any, Any]:
        return (Pair(x, y),), {}

    @staticmethod
    def mapped(x: Any, y: Any) -> tuple[Any, Any]:
        return ({"x": x, "others": OrderedDict(y=y)},), {}

    @staticmethod
    def keywords(x: Any, y: Any) -> tuple[Any, Any]:
        return (), {"x": x, "y": {"y": [y, None]}}


def leaves_of(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = list(tree.values())
    return (
        [found for item in tree for found in leaves_of(item)]
        if isinstance(tree, (tuple, list))
        else []
    )


def product(*args: Any, **kwargs: Any) -> torch.Tensor:
    x, y = leaves_of([args, kwargs])
    return (x.sin() * y.cos()).exp()


@pytest.mark.parametrize("way", ["direct", "listed", "tupled", "named", "mapped", "keywords"])
def test_inputs_in_containers(hyper: Hyper, way: str) -> None:
    x = leaf(hyper)
    arrange = getattr(_Inputs, way)
    seen: list[Any] = []

    def forward(call: Callable[..., Any]) -> torch.Tensor:
        args, kwargs = arrange(x * 2, x + 1)

        def function(*args: Any, **kwargs: Any) -> torch.Tensor:
            seen.append([args, kwargs])
            return product(*args, **kwargs)

        return call(function, *args, **kwargs).square().mean()

    expected = torch.autograd.grad(
        forward(lambda function, *a, **k: function(*a, **k)).exp().log(), x
    )
    seen.clear()
    loss = forward(partial(hp.checkpoint, swap_inputs=True, early_stop=False, **hyper.options))
    kinds = _kinds(seen.pop())
    loss = behind(hyper, loss).log()
    assert hp.stats().storages == 3
    loss.backward()
    assert_same_bits([x.grad], expected)
    assert _kinds(seen.pop()) == kinds
    stats = hp.stats()
    assert stats.d2h_bytes == stats.h2d_bytes == 2 * HIDDEN_BYTES
    del loss
    hyper.assert_at_rest()


def _kinds(tree: Any) -> Any:
    if isinstance(tree, dict):
        return type(tree), [(key, _kinds(item)) for key, item in tree.items()]
    if isinstance(tree, (list, tuple)):
        return type(tree), [_kinds(item) for item in tree]
    return type(tree)


def test_aliases_among_the_inputs_cross_once(hyper: Hyper) -> None:
    x = leaf(hyper)

    def function(parts: list[torch.Tensor], whole: torch.Tensor) -> torch.Tensor:
        return (parts[0] * parts[1]).sin().mean() + whole.cos().mean()

    def forward(call: Callable[..., Any]) -> torch.Tensor:
        y = x * 2
        return call(function, list(y.chunk(2, -1)), y.t())

    expected = torch.autograd.grad(forward(lambda function, *args: function(*args)).exp(), x)
    behind(hyper, forward(partial(hp.checkpoint, swap_inputs=True, **hyper.options))).backward()
    assert_same_bits([x.grad], expected)
    stats = hp.stats()
    assert (stats.storages, stats.d2h_copies, stats.d2h_bytes) == (2, 1, HIDDEN_BYTES)
    assert stats.h2d_bytes == HIDDEN_BYTES
    hyper.assert_at_rest()


def test_tensors_in_other_objects_stay_and_are_right(hyper: Hyper) -> None:
    class Box:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

    x = leaf(hyper)

    def forward(call: Callable[..., Any]) -> torch.Tensor:
        return call(lambda a, box: (a * box.tensor).exp(), x * 2, Box(x.sin())).mean()

    expected = torch.autograd.grad(forward(lambda function, *args: function(*args)).exp(), x)
    behind(hyper, forward(partial(hp.checkpoint, swap_inputs=True, **hyper.options))).backward()
    assert_same_bits([x.grad], expected)
    assert hp.stats().d2h_bytes == HIDDEN_BYTES
    hyper.assert_at_rest()


def test_the_options_of_torch_pass(hyper: Hyper) -> None:
    plain = nn.Sequential(*(nn.Sequential(block, nn.Dropout(0.5)) for block in make(hyper)))
    options = {"preserve_rng_state": True, "determinism_check": "none", "debug": False}
    model = Regions(plain, partial(hp.checkpoint, swap_inputs=True, **options, **hyper.options))
    x = leaf(hyper)
    torch.manual_seed(3)
    expected = step(plain, x)
    torch.manual_seed(3)
    assert_same_bits(step(model, x), expected)
    hyper.assert_at_rest()


def test_no_early_stop_runs_all(hyper: Hyper) -> None:
    calls: list[int] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.exp().clone()
        calls.append(1)
        return y

    for early_stop, times in ((True, 1), (False, 2)):
        calls.clear()
        hp.checkpoint(function, leaf(hyper), early_stop=early_stop).sum().backward()
        assert len(calls) == times


def test_no_grad_and_no_backward(hyper: Hyper) -> None:
    plain = make(hyper)
    options = {"swap_inputs": True, "policy_fn": products(SWAP), **hyper.options}
    model = Regions(plain, partial(hp.checkpoint, **options))
    x = leaf(hyper)
    with torch.no_grad():
        assert_same_bits([model(x)], [plain(x)])
    assert hp.stats().saved_tensors == 0
    out = model(x)
    assert hp.stats().d2h_bytes > 0
    del out
    hyper.assert_at_rest()


@pytest.mark.parametrize("place", ["forward", "recomputation"])
def test_user_errors_keep_their_type(hyper: Hyper, place: str) -> None:
    calls: list[int] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        y = x.sin().exp()
        if len(calls) == (1 if place == "forward" else 2):
            raise KeyError(place)
        return y.tanh()

    options = {"swap_inputs": True, "policy_fn": products(SWAP), **hyper.options}
    try:
        hp.checkpoint(function, leaf(hyper) * 2, **options).sum().backward()
    except KeyError as error:
        assert error.args == (place,)
    else:
        raise AssertionError
    hyper.assert_at_rest()


# --- policies


@pytest.mark.parametrize("answer", [SAVE, SWAP, RECOMPUTE, True])
@pytest.mark.parametrize("swap_inputs", [False, True])
def test_policies(hyper: Hyper, answer: Any, swap_inputs: bool) -> None:
    plain = make(hyper)
    options = {"policy_fn": products(answer), "swap_inputs": swap_inputs, **hyper.options}
    check(hyper, Regions(plain, partial(hp.checkpoint, **options)), plain, leaf(hyper))
    stats = hp.stats()
    swapped = 3 * 3 * HIDDEN_BYTES if answer is SWAP else 0
    inputs = HIDDEN_BYTES if swap_inputs else 0  # the second block's
    assert stats.d2h_bytes == swapped + inputs
    assert stats.unfreed_bytes == 0


def test_a_list_of_operations(hyper: Hyper) -> None:
    plain = make(hyper)
    model = Regions(plain, partial(hp.checkpoint, policy_fn=[aten.addmm.default]))
    check(hyper, model, plain, leaf(hyper))


def test_contexts_for_torchs_own_checkpoint(hyper: Hyper) -> None:
    plain = make(hyper)
    contexts = partial(hp.create_selective_checkpoint_contexts, products(SWAP), **hyper.options)
    call = partial(torch_checkpoint.checkpoint, use_reentrant=False, context_fn=contexts)
    check(hyper, Regions(plain, call), plain, leaf(hyper))
    assert hp.stats().d2h_bytes == 9 * HIDDEN_BYTES


def test_contexts_stack(hyper: Hyper) -> None:
    entered: list[str] = []

    class Note:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            entered.append(self.name)

        def __exit__(self, *error: object) -> None:
            entered.append(f"-{self.name}")

    plain = make(hyper, 1)
    options = {"policy_fn": products(SWAP), **hyper.options}
    call = partial(hp.checkpoint, context_fn=lambda: (Note("forward"), Note("again")), **options)
    check(hyper, Regions(plain, call), plain, leaf(hyper))
    assert entered == ["forward", "-forward", "again", "-again"] * 3
    assert hp.stats().d2h_bytes > 0


def test_two_policies_stack_and_torchs_does_not(hyper: Hyper) -> None:
    plain = make(hyper)
    options = {"policy_fn": [aten.addmm.default], **hyper.options}
    other = partial(hp.create_selective_checkpoint_contexts, [aten.tanh.default])
    call = partial(hp.checkpoint, context_fn=other, **options)
    check(hyper, Regions(plain, call), plain, leaf(hyper))
    foreign = partial(torch_checkpoint.create_selective_checkpoint_contexts, [aten.tanh.default])
    with pytest.raises(UsageError, match="create_selective_checkpoint_contexts"):
        hp.checkpoint(plain[0], leaf(hyper), context_fn=foreign, **options)


def test_a_result_that_an_outer_swap_saves_too_moves_once(hyper: Hyper) -> None:
    """The region's output is swapped by its policy, and saved by the operation behind it under the outer hooks."""

    def body(x: torch.Tensor) -> torch.Tensor:
        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
            return SWAP if op is aten.exp.default else RECOMPUTE

        y = hp.checkpoint(lambda x: x.sin().exp(), x, policy_fn=policy, **hyper.options)
        return (y.sin() * y).tanh()

    def plain(x: torch.Tensor) -> torch.Tensor:
        y = x.sin().exp()
        return (y.sin() * y).tanh()

    x = leaf(hyper)
    expected = torch.autograd.grad(plain(x).clone().sum(), x)
    out = hp.swap(body, x, **hyper.options).clone().sum()
    out.backward()
    assert_same_bits([x.grad], expected)
    stats = hp.stats()
    # Of exp, sin and tanh; the last is held to the end, as is x.
    assert stats.d2h_bytes == stats.h2d_bytes == 2 * HIDDEN_BYTES
    assert (stats.storages, stats.exact_duplicates, stats.unfreed_bytes) == (4, 2, 0)
    del out
    hyper.assert_at_rest()


@pytest.mark.parametrize("inner", ["swap", "offload", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("outer", ["none", "swap", "offload"])
def test_inside_and_around(hyper: Hyper, inner: str, outer: str) -> None:
    plain = make(hyper)
    tide = ebb.offload(
        plain,
        device=hyper.backend.device,
        to="host",
        min_bytes=0,
        keep_last_bytes=0,
        in_flight_bytes=0,
    )

    def body(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if inner == "swap":
            return hp.swap(block, x, **hyper.options)
        if inner == "offload":
            with tide:
                return block(x)
        return torch_checkpoint.checkpoint(block, x, use_reentrant=inner == "reentrant")

    def call(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        options = {"policy_fn": products(SWAP), "swap_inputs": True, **hyper.options}
        return hp.checkpoint(body, block, x, **options)

    regions = Regions(plain, call)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = plain

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if outer == "swap":
                return hp.swap(regions, x, **hyper.options)
            if outer == "offload":
                with tide:
                    return regions(x)
            return regions(x)

    check(hyper, Model(), plain, leaf(hyper))
    stats = tide.stats()
    assert (stats.entries, stats.device_bytes, stats.host_bytes) == (0, 0, 0)
    # What two objects save is held by each for the other: it stays.
    assert (hp.stats().d2h_bytes > 0) == (inner != "offload")


# --- wrappers


def test_the_wrapper_is_not_to_be_seen(hyper: Hyper) -> None:
    plain = make(hyper)
    wrapped = copy.deepcopy(plain)
    for index, block in enumerate(wrapped):
        wrapped[index] = hp.checkpoint_wrapper(block, swap_inputs=True, **hyper.options)
    assert all(isinstance(block, hp.CheckpointWrapper) for block in wrapped)
    assert [name for name, _ in wrapped.named_parameters()] == [
        name for name, _ in plain.named_parameters()
    ]
    assert list(wrapped.state_dict()) == list(plain.state_dict())
    wrapped.load_state_dict(plain.state_dict())
    check(hyper, wrapped, plain, leaf(hyper))
    assert hp.stats().d2h_bytes == HIDDEN_BYTES
    assert wrapped[0].up is wrapped[0].wrapped.up


def test_wrappers_are_copied_and_pickled(hyper: Hyper) -> None:
    plain = make(hyper, 1)
    wrapped = hp.checkpoint_wrapper(plain[0], policy_fn=[aten.addmm.default], early_stop=False)
    excluded = hp.checkpoint_exclude_wrapper(plain[0], save_output=False)
    for module in (wrapped, excluded):
        buffer = io.BytesIO()
        if module is excluded:  # operators cannot be pickled
            pickle.dump(module, buffer)
            copies = [copy.deepcopy(module), pickle.loads(buffer.getvalue())]
        else:
            copies = [copy.deepcopy(module)]
        for copied in copies:
            assert type(copied) is type(module)
            assert_same_bits(step(copied, data(hyper)), step(plain[0], data(hyper)))


def test_what_cannot_be_wrapped(hyper: Hyper) -> None:
    for wrapper in (hp.checkpoint_wrapper, hp.checkpoint_exclude_wrapper):
        with pytest.raises(UsageError, match=wrapper.__name__):
            wrapper(3)
    block = make(hyper, 1)[0]
    with pytest.warns(RuntimeWarning, match="wrapped module"):
        hp.checkpoint_wrapper(nn.Sequential(hp.checkpoint_wrapper(block)))
    hp.checkpoint_wrapper(nn.Sequential(hp.checkpoint_exclude_wrapper(block)))
    with pytest.raises(UsageError, match="non-reentrant"):
        hp.checkpoint(block, data(hyper), use_reentrant=True)


# --- chains


def test_a_chain_of_recomputed_layers(hyper: Hyper) -> None:
    """Its groups say when inputs and results leave, and bring them back; of the last layer nothing leaves."""
    plain = make(hyper, 4)
    options = {"swap_inputs": True, "policy_fn": products(SWAP), **hyper.options}
    layers = [hp.checkpoint_wrapper(block, **options) for block in plain]
    hyper.chain(*layers)
    check(hyper, nn.Sequential(*layers), plain, leaf(hyper))
    stats = hp.stats()
    # Three layers' results, and the inputs of the second and third: the first's is the caller's.
    assert stats.d2h_bytes == stats.h2d_bytes == (3 * 3 + 2) * HIDDEN_BYTES
    assert (stats.unfreed_bytes, stats.prefetch_misses) == (0, 0)
    if hyper.group_swap:
        assert stats.d2h_copies < 3 * 2 + 2


def test_micro_batches_through_a_chain(hyper: Hyper) -> None:
    plain = make(hyper)
    options = {"swap_inputs": True, "policy_fn": products(SWAP), **hyper.options}
    layers = [hp.checkpoint_wrapper(block, **options) for block in plain]
    hyper.chain(*layers)
    model = nn.Sequential(*layers)
    inputs = [data(hyper, seed=seed) for seed in range(3)]

    def run(network: nn.Module, order: list[int]) -> list[Any]:
        network.zero_grad()
        losses = [network(x).square().mean() for x in inputs]
        for index in order:
            losses[index].backward()
        found = [parameter.grad.clone() for parameter in plain.parameters()]
        return [*(loss.detach() for loss in losses), *found]

    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        expected = run(plain, order)
        hp.reset_stats()
        assert_same_bits(run(model, order), expected)
        assert hp.stats().d2h_bytes > 0
        hyper.assert_at_rest()


# --- not recomputed


class Counted(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inner(x)


def region_of(*blocks: nn.Module, **options: Any) -> nn.Module:
    return hp.checkpoint_wrapper(nn.Sequential(*blocks), early_stop=False, **options)


@pytest.mark.parametrize("save_output", [True, False])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("policy", [None, SAVE, SWAP])
def test_an_excluded_module(hyper: Hyper, save_output: bool, place: int, policy: Any) -> None:
    """What it saved in forward is what its backward takes."""
    plain = make(hyper)
    counted = [Counted(block) for block in plain]
    blocks: list[nn.Module] = list(counted)
    blocks[place] = hp.checkpoint_exclude_wrapper(blocks[place], save_output=save_output)
    policy_fn = None if policy is None else products(policy)
    model = region_of(*blocks, swap_inputs=True, policy_fn=policy_fn, **hyper.options)
    check(hyper, model, plain, leaf(hyper))
    again = [3, 3, 3]
    again[place] = 0 if save_output else 3
    assert [block.calls for block in counted] == [3 + n for n in again]


def test_excluded_modules_go_through_outer_hooks(hyper: Hyper) -> None:
    plain = make(hyper)
    region = region_of(plain[0], hp.checkpoint_exclude_wrapper(plain[1]), plain[2])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.region = region

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return hp.swap(region, x, **hyper.options)

    check(hyper, Model(), plain, leaf(hyper))
    assert hp.stats().d2h_bytes > 3 * HIDDEN_BYTES


@pytest.mark.parametrize("save_output", [True, False])
def test_random_numbers_behind_an_excluded_module(hyper: Hyper, save_output: bool) -> None:
    parts = [nn.Sequential(block, nn.Dropout(0.5)) for block in make(hyper)]
    plain = nn.Sequential(*parts)
    excluded = hp.checkpoint_exclude_wrapper(parts[1], save_output=save_output)
    model = region_of(parts[0], excluded, parts[2])
    x = leaf(hyper)
    torch.manual_seed(3)
    expected = step(plain, x)
    torch.manual_seed(3)
    assert_same_bits(step(model, x), expected)


def test_an_excluded_module_in_nested_regions(hyper: Hyper) -> None:
    plain = make(hyper)
    counted = Counted(plain[1])
    inner = region_of(plain[0], hp.checkpoint_exclude_wrapper(counted))
    with pytest.warns(RuntimeWarning, match="wrapped module"):
        model = region_of(inner, plain[2])
    check(hyper, model, plain, leaf(hyper))
    assert counted.calls == 3


def test_a_region_in_an_excluded_module(hyper: Hyper) -> None:
    plain = make(hyper)
    counted = Counted(plain[1])
    region = hp.checkpoint_wrapper(
        counted, swap_inputs=True, policy_fn=products(SWAP), **hyper.options
    )
    with pytest.warns(RuntimeWarning, match="wrapped module"):
        model = region_of(plain[0], hp.checkpoint_exclude_wrapper(region), plain[2])
    check(hyper, model, plain, leaf(hyper))
    assert counted.calls == 6


def test_an_excluded_output_that_is_written_to(hyper: Hyper) -> None:
    plain = make(hyper)
    block = hp.checkpoint_exclude_wrapper(plain[0])

    def function(x: torch.Tensor) -> torch.Tensor:
        return plain[1](block(x).mul_(2))

    with pytest.raises(InplaceModificationError) as caught:
        hp.checkpoint(function, leaf(hyper)).sum().backward()
    text = str(caught.value)
    assert text.startswith("[checkpoint_exclude_wrapper] the output of Block in region "), text
    assert "test_an_excluded_output_that_is_written_to.<locals>.function" in text, text
    assert "save_output=False" in text and "write to a copy" in text, text
    assert f"[{ROWS}, {WIDTH}]" in text and "modified by an inplace operation" in text, text


def test_excluded_outputs_in_containers(hyper: Hyper) -> None:
    x = leaf(hyper)
    calls: list[int] = []

    def parts(x: torch.Tensor) -> dict[str, Any]:
        calls.append(1)
        y = x.exp()
        return {"views": [y.t(), (y[:4], 3)], "plain": torch.arange(4, device=x.device)}

    excluded = hp.checkpoint_exclude_wrapper(parts)

    def function(call: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        found = call(x.sin())
        return (found["views"][0] * 2).cos().sum() + found["views"][1][0].sin().sum() * found[
            "plain"
        ].sum()

    expected = torch.autograd.grad(function(parts, x), x)
    calls.clear()
    hp.checkpoint(partial(function, excluded), x).backward()
    assert_same_bits([x.grad], expected)
    assert len(calls) == 1


def test_excluded_in_a_region_of_torchs_own_policies(hyper: Hyper) -> None:
    block = hp.checkpoint_exclude_wrapper(make(hyper, 1)[0])
    foreign = partial(torch_checkpoint.create_selective_checkpoint_contexts, [aten.tanh.default])
    with pytest.raises(UsageError, match="count the operations"):
        hp.checkpoint(block, leaf(hyper), context_fn=foreign)


# --- compilers


@pytest.mark.parametrize(
    "options",
    [
        {"swap_inputs": True},
        {"group_swap": True},
        {"cpu_pool": object()},
        {"context_fn": torch_checkpoint.noop_context_fn},
        {"use_reentrant": False},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_a_compiler_cannot_take(
    hyper: Hyper, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = leaf(hyper)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(ValueError, match=next(iter(options))):
        hp.checkpoint(torch.exp, x, **options)


on_the_cpu = pytest.mark.skipif(DEVICE != "cpu", reason="nothing is compiled for the test device")


@on_the_cpu
@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize(
    "policy",
    [None, [aten.addmm.default], products(SAVE), products(SWAP)],
    ids=["none", "list", "save", "swap"],
)
@pytest.mark.filterwarnings("ignore")
def test_compiled(hyper: Hyper, policy: Any, fullgraph: bool) -> None:
    block, x = make(hyper, 1)[0], leaf(hyper)

    def function(x: torch.Tensor) -> torch.Tensor:
        return hp.checkpoint(block, x, policy_fn=policy).sin().sum()

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=fullgraph)
    found = torch.autograd.grad(compiled(x), x)
    assert_same_bits(found, torch.autograd.grad(function(x), x))


@on_the_cpu
def test_compiled_with_what_cannot_be(hyper: Hyper) -> None:
    block, x = make(hyper, 1)[0], leaf(hyper)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: hp.checkpoint(block, x, swap_inputs=True).sum(), backend="eager"
    )
    with pytest.raises(ValueError, match="swap_inputs= cannot be compiled"):
        compiled(x)
