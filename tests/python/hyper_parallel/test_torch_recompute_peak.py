"""Where the device's peak sits in a region's recomputation or its backward, the report says so; on the CPU it never does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support import DEVICE, EXACT
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_support import end_backward

import ebbtide.hyper_parallel as hp
import ebbtide.torch as ebb
from ebbtide.torch import memory

ROWS, WIDTH, SINES, COPIES = 64, 64, 8, 8
NBYTES = 4 * ROWS * WIDTH
LINE = "device peak: in the recomputation of a checkpointed region ("
END = "above what was allocated when that began: more offload does not lower these"

tells = pytest.mark.skipif(DEVICE == "cpu", reason="the CPU's allocator does not count")


class Deep(nn.Module):
    """Saves a tensor per sine, then needs room for a while that its backward does not need."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(SINES):
            x = x.sin()
        scale = x.detach().repeat(COPIES, 1).amax()
        return (x * scale).sin()


class Small(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin().cos()


class _Roomy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x.repeat(COPIES, 1).amax()


class Roomy(nn.Module):
    """Its backward needs room for a while."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Roomy.apply(x.sin()).sin()


class Way:
    """A way to have regions recomputed, and a report to ask."""

    def context(self) -> Any:
        return nullcontext()

    def region(self, module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        raise NotImplementedError

    report: Callable[[], str] = staticmethod(hp.report)


class Wrapped(Way):
    def __init__(self, **options: Any) -> None:
        self._options = options

    def region(self, module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        return hp.checkpoint_wrapper(module, **self._options)


class Offloaded(Way):
    """torch's own checkpoint inside the context."""

    def __init__(self, use_reentrant: bool, **options: Any) -> None:
        self._use_reentrant = use_reentrant
        self._tide = ebb.offload(device=DEVICE, to="host", **{**EXACT, **options})
        self.report = self._tide.report

    def context(self) -> Any:
        return self._tide

    def region(self, module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: checkpoint(module, x, use_reentrant=self._use_reentrant)


WAYS: dict[str, Callable[[], Way]] = {
    "checkpoint": Wrapped,
    "swap_inputs": lambda: Wrapped(swap_inputs=True),
    "no early stop": lambda: Wrapped(early_stop=False),
    "layer_inputs": lambda: Offloaded(False, only="layer_inputs"),
    "layer_inputs, reentrant": lambda: Offloaded(True, only="layer_inputs"),
    "saved": lambda: Offloaded(False),
    "saved, reentrant": lambda: Offloaded(True),
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, backend: Any) -> Way:
    return WAYS[request.param]()


@pytest.fixture(autouse=True)
def own_peak(backend: Any) -> Iterator[None]:
    if DEVICE != "cpu":
        end_backward()
        torch.accelerator.reset_peak_memory_stats()
    assert not line()  # looks at it: an equal peak is to be found anew
    yield


def make() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, requires_grad=True)


def train(way: Way, *layers: Callable[..., Any], copies: int = 1, **options: Any) -> None:
    """The layers, and behind them as many copies, each saved by an exp."""
    x = make()
    with way.context():
        y = x
        for layer in layers:
            y = layer(y)
        loss = y.repeat(copies, 1).exp().sum()
    del y
    loss.backward(**options)
    end_backward()


def line(way: Way | None = None) -> str:
    """The report's, as one."""
    text = hp.report() if way is None else way.report()
    assert max(map(len, text.splitlines())) <= 100
    text = " ".join(text.split())
    begin = text.find(LINE)
    return "" if begin < 0 else text[begin:]


def nbytes_in(found: str) -> float:
    number, unit = found.split("backward, ")[1].split(" ")[:2]
    return float(number) * {"KiB": 2**10, "MiB": 2**20}[unit]


def raise_the_peak() -> None:
    """Somewhere outside of regions."""
    above = torch.accelerator.max_memory_allocated() - torch.accelerator.memory_allocated()
    torch.empty(above + 64 * NBYTES, dtype=torch.uint8)


# --- appears


@tells
def test_the_recomputation_needs_it(way: Way) -> None:
    train(way, way.region(Deep()), way.region(Deep()))
    found = line(way)
    assert found.startswith(LINE) and found.endswith(END)
    # Held for backward but the region's input, which was there; the product is not saved before it is computed.
    expected = (SINES + COPIES) * NBYTES
    assert expected <= nbytes_in(found) <= expected + 2 * NBYTES, found


@tells
def test_the_backward_of_the_region_needs_it(way: Way) -> None:
    train(way, way.region(Roomy()), way.region(Roomy()))
    found = line(way)
    # Beside what is recomputed there are the room and the gradient that came in.
    assert COPIES * NBYTES < nbytes_in(found) <= (COPIES + 5) * NBYTES, found


@tells
def test_the_input_of_the_last_region_need_not_have_left(way: Way) -> None:
    with way.context():
        hidden = Small()(make())
        loss = way.region(Roomy())(hidden).sum()
    loss.backward()
    end_backward()
    assert line(way)


@tells
def test_it_stays_while_no_peak_is_reached_elsewhere(way: Way) -> None:
    train(way, way.region(Deep()))
    first = line(way)
    assert first
    train(way, way.region(Small()))
    assert line(way) == line(way) == first


@tells
def test_a_function_goes_by_its_name_and_a_group_by_its_own() -> None:
    inner = Deep()

    def expanded(x: torch.Tensor) -> torch.Tensor:
        return inner(x)

    train(Way(), lambda x: hp.checkpoint(expanded, x))
    assert "expanded on device 0)" in line()
    torch.accelerator.reset_peak_memory_stats()
    train(Way(), hp.checkpoint_wrapper(Deep()))
    assert line().startswith(f"{LINE}Deep on device 0)")
    torch.accelerator.reset_peak_memory_stats()
    with hp.SwapManager().group_context("stage 0"):
        train(Way(), lambda x: hp.checkpoint(expanded, x))
    assert line().startswith(f"{LINE}stage 0 on device 0)")


@tells
def test_of_nested_regions_the_inner_one_is_told() -> None:
    inner = hp.checkpoint_wrapper(Roomy())
    train(Way(), lambda x: hp.checkpoint(lambda y: inner(y.sin()).sin(), x))
    assert "Roomy on device 0)" in line()


@tells
def test_a_recomputation_that_fails_counts() -> None:
    calls = []

    def failing(x: torch.Tensor) -> torch.Tensor:
        y = Deep()(x)
        calls.append(1)
        if len(calls) > 1:
            torch.empty(COPIES * SINES * NBYTES, dtype=torch.uint8)
            raise ArithmeticError("the second time")
        return y.sin()

    loss = hp.checkpoint(failing, make(), early_stop=False).sum()
    with pytest.raises(ArithmeticError, match="the second time"):
        loss.backward()
    assert "failing on device 0)" in line()


# --- does not appear


def test_small_regions_and_large_outputs(way: Way) -> None:
    train(way, way.region(Small()), way.region(Small()), copies=32)
    assert not line(way)


@pytest.mark.parametrize("place", ["before", "between", "behind"])
def test_the_backward_of_what_is_in_no_region(way: Way, place: str) -> None:
    layers = [way.region(Small()), way.region(Small())]
    layers.insert(["before", "between", "behind"].index(place), Roomy())
    train(way, *layers)
    assert not line(way)


@pytest.mark.parametrize("place", ["before", "between"])
def test_a_region_whose_end_is_not_seen(way: Way, place: str) -> None:
    """Of whose results one gets no gradient, so that what it has saved outlives the backward."""

    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x.sin(), x.cos()

    region, unused = way.region(Two()), []

    def first(x: torch.Tensor) -> torch.Tensor:
        used, other = region(x)
        unused.append(other)
        return used

    layers = [first, first]
    layers.insert(["before", "between"].index(place), Roomy())
    train(way, *layers)
    assert not line(way)
    unused.clear()
    assert not line(way)


@tells
def test_a_graph_that_is_kept(way: Way) -> None:
    """Nobody sees where its regions end: told is what was needed until the recomputation was over, by those that know."""
    train(way, Roomy(), way.region(Small()), retain_graph=True)
    assert not line(way)
    train(way, way.region(Roomy()), retain_graph=True)
    assert not line(way)
    train(way, way.region(Deep()), retain_graph=True)
    assert bool(line(way)) == isinstance(way, Wrapped)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_regions_whose_inputs_are_not_taken(backend: Any, use_reentrant: bool) -> None:
    way = Offloaded(use_reentrant, min_bytes=NBYTES + 1)
    train(way, way.region(Deep()), way.region(Roomy()))
    assert not line(way)
    wrapped = hp.swap_wrapper(lambda x: checkpoint(Deep(), x, use_reentrant=use_reentrant))
    train(Way(), wrapped, wrapped)
    assert not line()


def test_never_on_the_cpu() -> None:
    way = Wrapped()
    region = way.region(Deep())
    with torch.device("cpu"):
        for _ in range(2):
            assert make().is_cpu
            train(way, region)
            assert not line()


@pytest.mark.parametrize("missing", ["_statistics", "_is_in_use"])
def test_a_torch_that_does_not_tell(
    way: Way, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setattr(memory, missing, None)
    train(way, way.region(Deep()))
    assert not line(way)


# --- disappears


@tells
def test_a_later_forward_raises_the_peak(way: Way) -> None:
    train(way, way.region(Deep()))
    assert line(way)
    raise_the_peak()
    assert not line(way)


@tells
def test_a_peak_elsewhere_is_seen_when_a_recomputation_begins(way: Way) -> None:
    train(way, way.region(Deep()))
    raise_the_peak()
    train(way, way.region(Deep()))
    assert not line(way)


@tells
def test_the_users_reset(way: Way) -> None:
    train(way, way.region(Deep()))
    assert line(way)
    torch.accelerator.reset_peak_memory_stats()
    assert not line(way)
    train(way, way.region(Deep()))
    assert line(way)


@tells
def test_an_equal_peak_elsewhere_after_a_reset(way: Way) -> None:
    train(way, way.region(Deep()))
    assert line(way)
    peak = torch.accelerator.max_memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    train(way, way.region(Small()))
    above = peak - torch.accelerator.memory_allocated()
    torch.empty(above, dtype=torch.uint8)
    assert torch.accelerator.max_memory_allocated() == peak
    assert not line(way)


# --- what it costs


@tells
def test_the_users_peak_is_left_alone(way: Way) -> None:
    raise_the_peak()
    before = torch.accelerator.max_memory_allocated()
    train(way, way.region(Small()))
    assert not line(way)
    assert torch.accelerator.max_memory_allocated() == before


@tells
def test_a_few_looks_a_recomputation_and_none_else(
    way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, statistics = [], memory._statistics

    def counted(device: int) -> Any:
        looks.append(device)
        return statistics(device)

    monkeypatch.setattr(memory, "_statistics", counted)
    train(way, Deep(), Roomy())
    assert looks == []
    train(way, way.region(Deep()), way.region(Deep()))
    each = 3 if isinstance(way, Wrapped) else 2
    assert looks == [0] * 2 * each


# --- several devices


@tells
def test_each_device_has_its_own_peak(way: Way) -> None:
    torch.accelerator.reset_peak_memory_stats(1)
    region = way.region(Deep())
    with torch.device(f"{DEVICE}:1"):
        train(way, region)
    assert "device 1) or" in line(way) and "device 0) or" not in line(way)
    train(way, region)
    assert "device 0) or" in line(way) and "device 1) or" in line(way)
    torch.accelerator.reset_peak_memory_stats(1)
    assert "device 0) or" in line(way) and "device 1) or" not in line(way)
