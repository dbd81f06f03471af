"""What ``offload`` accepts, what it refuses and how, and that options take effect."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from descriptors import spill_descriptor
from support import assert_at_rest, assert_loaded
from torch import nn
from torch_support import assert_same_bits
from training import assert_step_equal, make_input, make_model, offload, raised_text, step

import ebbtide.torch as ebb
from ebbtide import OffloadConfig, UsageError, process


def refusal(model: Any = None, **options: Any) -> str:
    with raised_text(UsageError) as text:
        ebb.offload(model, **options)
    return text[0]


def test_unknown_option() -> None:
    text = refusal(min_byte=1)
    assert "unknown option 'min_byte'" in text and "did you mean min_bytes" in text


@pytest.mark.parametrize("to", ["gpu", "", 3, "no_such_directory"])
def test_unknown_tier(to: object) -> None:
    text = refusal(to=to)
    assert "[OffloadConfig.to]" in text and repr(to) in text and '"disk"' in text


def test_conflict() -> None:
    assert "exclude each other" in refusal(keep_last_bytes=1, keep_last_groups=1)


def test_config_with_options() -> None:
    text = refusal(config=OffloadConfig(to="host"), to="disk", min_bytes=3)
    assert text == "[offload] config= and min_bytes, to= given: put all of them into the config"


def test_config() -> None:
    model, x = make_model(), make_input()
    config = OffloadConfig(to="host", min_bytes=0, keep_last_bytes=0, in_flight_bytes=0)
    tide = ebb.offload(model, config=config)
    assert tide.config is config
    assert_step_equal(tide, model, x)
    assert tide.stats().spilled_bytes == 0 < tide.stats().peak_host_bytes


def test_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = make_model(), make_input()
    monkeypatch.setenv("EBBTIDE_TO", str(tmp_path))
    for name in ("MIN_BYTES", "KEEP_LAST_BYTES", "IN_FLIGHT_BYTES"):
        monkeypatch.setenv(f"EBBTIDE_{name}", "0")
    assert_step_equal(ebb.offload(model), model, x)
    assert os.fstat(spill_descriptor(tmp_path)).st_size > 0
    # An argument counts more, and a config more than both.
    assert ebb.offload(model, to="host").config.to == "host"
    assert ebb.offload(model, config=OffloadConfig(to="disk")).config.min_bytes is None
    monkeypatch.setenv("EBBTIDE_MIN_BYTES", "lots")
    assert "[EBBTIDE_MIN_BYTES] 'lots' is no size" in refusal()


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "meta", torch.device("cuda")])
def test_devices_that_are_not_here(device: object) -> None:
    text = refusal(device=device)
    name = str(device)
    assert text.startswith("[offload] device=") and name in text
    assert "on this machine is none: pass that, or 'cpu'" in text


def test_no_device() -> None:
    text = refusal(device="gpu")
    assert "device='gpu' is not a torch device" in text and "'cpu'" in text


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), None])
def test_the_device(device: object) -> None:
    model, x = make_model(), make_input()
    assert_step_equal(offload(model, device=device), model, x)


@pytest.mark.parametrize("model", ["disk", 3, torch.ones(2), nn.Linear, [nn.Linear(1, 1)]])
def test_no_model(model: object) -> None:
    text = refusal(model)
    assert f"model is a {type(model).__name__}" in text and "torch.nn.Module" in text


def test_decorator() -> None:
    tide = offload()

    def forward(x: torch.Tensor) -> torch.Tensor:
        return x

    with raised_text(UsageError) as text:
        tide(forward)
    assert "is a context, not a decorator" in text[0] and "with offload(model):" in text[0]
    assert_at_rest(tide)


@pytest.mark.parametrize(
    "options",
    [{"min_bytes": -1}, {"keep_last_bytes": "much"}, {"policy": 3}, {"only": "all"},
     {"on_inplace": "ignore"}, {"group_swap": 2}, {"max_host_bytes": 1.5}],
)  # fmt: skip
def test_wrong_values(options: dict[str, object]) -> None:
    (name,) = options
    assert refusal(**options).startswith(f"[OffloadConfig.{name}] {options[name]!r}")


def test_a_refused_option_leaves_nothing_behind(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd")), dict(process._spill_files)
    refusal(to=tmp_path / "absent")
    refusal("no model", to=tmp_path)
    refusal(to=tmp_path, device="cuda")
    assert (len(os.listdir("/proc/self/fd")), dict(process._spill_files)) == before


# --- that they take effect


def chain(tide: ebb.Offload, numels: list[int]) -> list[torch.Tensor]:
    """Saves one storage of each size (elements of 4 bytes), and gives it no other holder."""
    leaves = [torch.linspace(0, 1, numel, requires_grad=True) for numel in numels]
    with tide:
        loss = sum(leaf.exp().sin().sum() for leaf in leaves)
    loss.backward()
    for leaf in leaves:
        (expected,) = torch.autograd.grad(leaf.exp().sin().sum(), leaf)
        assert_same_bits([leaf.grad], [expected])
    del loss
    assert_at_rest(tide)
    return leaves


def test_min_bytes_is_of_storages() -> None:
    tide = offload(min_bytes=4096)
    chain(tide, [1023, 1024, 1025])
    stats = tide.stats()
    assert stats.kept["small"] == 2  # exp and sin saved it
    assert (stats.storages, stats.d2h_bytes) == (2, 4096 + 4100)
    assert_loaded(tide)
    # A small view of a large storage is not small.
    x = torch.linspace(0, 1, 1024, requires_grad=True)
    tide = offload(min_bytes=4096)
    with tide:
        loss = x.exp()[:4].sin().sum()
    assert tide.stats().kept["small"] == 0
    loss.backward()
    del loss
    assert_at_rest(tide)


def test_keep_last_bytes() -> None:
    tide = offload(keep_last_bytes=8192)
    chain(tide, [1024] * 5)
    stats = tide.stats()
    assert stats.storages == 5
    assert stats.d2h_bytes == stats.h2d_bytes == 3 * 4096
    assert stats.live_hits == 4 and stats.kept["last"] == 2


@pytest.mark.parametrize(("prefetch_bytes", "hits"), [(0, 0), (1 << 20, 3)])
def test_prefetch_bytes(prefetch_bytes: int, hits: int) -> None:
    tide = offload(prefetch_bytes=prefetch_bytes)
    chain(tide, [1024] * 5)
    stats = tide.stats()
    assert stats.h2d_bytes == 5 * 4096 == stats.d2h_bytes
    assert (stats.prefetch_hits >= hits) and (stats.prefetch_hits == 0) == (hits == 0)


def test_policy_counts_more_than_min_bytes() -> None:
    def policy(tensor: torch.Tensor) -> ebb.CheckpointPolicy:
        small = tensor.numel() < 100
        return ebb.CheckpointPolicy.MUST_SWAP if small else ebb.CheckpointPolicy.MUST_SAVE

    tide = offload(min_bytes=1 << 20, policy=policy)
    chain(tide, [64, 1024])
    stats = tide.stats()
    assert (stats.storages, stats.d2h_bytes) == (1, 256)
    assert (stats.kept["policy"], stats.kept["small"]) == (2, 0)
    assert_loaded(tide)


@pytest.mark.parametrize("tune_malloc", [True, False])
def test_tune_malloc(tune_malloc: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = []
    monkeypatch.setattr(process, "fix_malloc_threshold", lambda: fixed.append(True))
    offload(tune_malloc=tune_malloc)
    assert fixed == [True] * tune_malloc


# --- what an object tells


def test_report_and_metrics() -> None:
    model, x = make_model(), make_input()
    tide = offload(model)
    step(model, x, tide)
    stats = tide.stats()
    report = tide.report()
    assert "ebbtide: cpu to disk" in report and f"{stats.saved_tensors}" in report
    metrics = tide.metrics()
    assert metrics["ebbtide/d2h_bytes"] == stats.d2h_bytes
    assert metrics["ebbtide/kept/parameter"] == stats.kept["parameter"] > 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.d2h_bytes = 0  # type: ignore[misc]


def test_statistics_add_up() -> None:
    model, x = make_model(), make_input()
    tide = offload(model)
    step(model, x, tide)
    stats = tide.stats()
    assert stats.unique_bytes >= stats.d2h_bytes == stats.h2d_bytes == stats.spilled_bytes
    assert stats.freed_bytes >= stats.d2h_bytes and stats.unfreed_bytes == 0
    assert stats.saved_tensors > stats.storages + stats.exact_duplicates
    assert stats.peak_disk_bytes == stats.d2h_bytes
    tide.reset_stats()
    zero = tide.stats()
    assert zero.saved_tensors == zero.d2h_bytes == zero.peak_disk_bytes == 0
    assert zero.exposed_wait_s == 0 and sum(zero.kept.values()) == 0


def test_an_accelerator_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EBBTIDE_DEVICE", raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    assert ebb.offload().report().startswith("ebbtide: cuda to host")
    assert ebb.offload(device="cpu", to="host").report().startswith("ebbtide: cpu to host")
    assert "on this machine is 'cuda'" in refusal(device="xpu")
