"""The disk tier: really a file, without a name, gone whatever happens, shared by nobody, checked when read."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from descriptors import spill_descriptor
from programs import TIMEOUT_S, run, start
from support import assert_at_rest, assert_loaded
from torch_support import assert_same_bits
from training import (
    assert_step_equal,
    gradients,
    make_input,
    make_model,
    offload,
    raised_text,
    step,
)

import ebbtide.torch as ebb
from ebbtide import CorruptionError, SpillError, UsageError, process

SHARED_MEMORY = Path("/dev/shm")


def in_memory(directory: Path) -> bool:
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return any(line.split()[1:3] == [str(directory), "tmpfs"] for line in lines)


needs_tmpfs = pytest.mark.skipif(
    not in_memory(SHARED_MEMORY), reason=f"no tmpfs at {SHARED_MEMORY}"
)


def test_bytes_are_in_the_file(tmp_path: Path) -> None:
    x = torch.randn(1 << 14, requires_grad=True)
    tide = offload(to=tmp_path)
    with tide:
        y = x.exp()
        content = y.detach().numpy().tobytes()
        loss = y.sin().sum()
        del y
    tide.synchronize()
    descriptor = spill_descriptor(tmp_path)
    info = os.fstat(descriptor)
    assert content in os.pread(descriptor, info.st_size, 0)
    assert info.st_blocks * 512 >= len(content)
    stats = tide.stats()
    assert stats.spilled_bytes == stats.d2h_bytes == stats.disk_bytes == len(content)
    assert stats.host_bytes == 0
    assert (info.st_mode & 0o777, info.st_nlink) == (0o600, 0)
    loss.backward()
    assert_loaded(tide)
    del loss
    assert_at_rest(tide)


def test_file_grows_once_and_is_cut_by_trim(tmp_path: Path) -> None:
    model, x = make_model(), make_input()
    tide = offload(model, to=tmp_path)
    descriptor = spill_descriptor(tmp_path)
    assert os.fstat(descriptor).st_size == 0
    assert_step_equal(tide, model, x)
    size = os.fstat(descriptor).st_size
    assert size >= tide.stats().peak_disk_bytes > 0
    for _ in range(5):
        assert_step_equal(tide, model, x)
    assert os.fstat(descriptor).st_size == size
    ebb.trim()
    assert os.fstat(descriptor).st_size == 0
    assert_step_equal(tide, model, x)


def test_directory_stays_empty(tmp_path: Path) -> None:
    model, x = make_model(), make_input()
    tide = offload(model, to=tmp_path)
    with tide:
        loss = model(x).square().mean()
        assert list(tmp_path.iterdir()) == []
    loss.backward()
    assert_loaded(tide)
    del loss
    assert_at_rest(tide)
    assert list(tmp_path.iterdir()) == []


def test_one_file_per_directory(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    (tmp_path / "again").symlink_to(tmp_path / "one")
    files = [
        offload(to=directory)._session.transfers.tiers.space
        for directory in (tmp_path / "one", tmp_path / "two", tmp_path / "again")
    ]
    assert files[0] is files[2] is not files[1]


def test_directory_by_name(tmp_path: Path) -> None:
    model, x = make_model(), make_input()
    assert_step_equal(offload(model, to=str(tmp_path)), model, x)
    assert_step_equal(offload(model, to="disk"), model, x)
    assert_step_equal(offload(model, to="nvme"), model, x)
    assert_step_equal(offload(model, to=None), model, x)  # the default for CPU tensors
    assert os.fstat(spill_descriptor(tmp_path)).st_size > 0


@needs_tmpfs
def test_memory_is_no_disk() -> None:
    with raised_text(UsageError) as text:
        offload(to=SHARED_MEMORY)
    assert "/dev/shm is in memory (tmpfs)" in text[0] and "allow_tmpfs" in text[0]
    model, x = make_model(), make_input()
    assert_step_equal(offload(model, to=SHARED_MEMORY, allow_tmpfs=True), model, x)


def test_absent_directory(tmp_path: Path) -> None:
    with raised_text(UsageError) as text:
        offload(to=tmp_path / "absent")
    assert f"{tmp_path}/absent does not exist" in text[0] and "create it" in text[0]


def test_file_for_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with raised_text(UsageError) as text:
        offload(to=tmp_path / "file")
    assert f"{tmp_path}/file is not a directory" in text[0]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_directory_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with raised_text(UsageError) as text:
        offload(to=tmp_path)
    assert f"{tmp_path} is not writable" in text[0]


@pytest.mark.parametrize("directory", ["/proc", "/sys"])
def test_file_system_without_files(directory: str) -> None:
    with pytest.raises((SpillError, UsageError)) as caught:
        offload(to=directory)
    assert directory in str(caught.value)
    assert "can be made in" in str(caught.value) or "is not writable" in str(caught.value)


def test_cap(tmp_path: Path) -> None:
    model, x = make_model(), make_input()
    expected = step(model, x)
    tide = offload(model, to=tmp_path, max_disk_bytes="24KiB")
    with pytest.warns(RuntimeWarning) as warned:
        for _ in range(2):
            assert_same_bits(step(model, x, tide), expected)
            assert_at_rest(tide)
    assert len(warned) == 1
    text = str(warned[0].message)
    assert "[disk tier]" in text and "24.0 KiB allowed" in text and "raise max_disk_bytes" in text
    assert tide.stats().kept["disk_full"] > 0
    assert tide.stats().kept["host_full"] == 0
    assert "disk_full" in tide.report()
    assert 0 < os.fstat(spill_descriptor(tmp_path)).st_size <= 24 << 10
    assert_loaded(tide)


@pytest.mark.parametrize("position", [0, 4000, 65535])
def test_one_flipped_bit(position: int, tmp_path: Path) -> None:
    x = torch.randn(1 << 14, requires_grad=True)
    tide = offload(to=tmp_path, prefetch_bytes=0)
    with tide:
        loss = x.exp().sin().sum()
    descriptor = spill_descriptor(tmp_path)
    byte = os.pread(descriptor, 1, position)
    os.pwrite(descriptor, bytes([byte[0] ^ 1]), position)
    with raised_text(CorruptionError) as text:
        loss.backward(retain_graph=True)
    assert "64.0 KiB at byte 0" in text[0] and "check the disk" in text[0]
    os.pwrite(descriptor, byte, position)
    loss.backward()
    (expected,) = torch.autograd.grad(x.exp().sin().sum(), x)
    assert_same_bits([x.grad], [expected])
    del loss
    assert_at_rest(tide)


LIVE = """
import sys
model, x = make_model(), make_input()
tide = offload(model, to=sys.argv[1])
with tide:
    loss = model(x)
tide.synchronize()
assert tide.stats().disk_bytes > 0
print("written", flush=True)
sys.stdin.readline()
"""


def open_files(pid: int, directory: Path) -> list[str]:
    links = (os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir())
    return [link for link in links if link.startswith(str(directory))]


@pytest.mark.parametrize("end", ["normal", "exception", "SIGKILL", "SIGTERM"])
def test_file_is_gone_after(end: str, tmp_path: Path) -> None:
    ending = "raise ValueError('odd end')" if end == "exception" else ""
    with start(LIVE + ending, str(tmp_path)) as child:
        assert child.stdout is not None and child.stdin is not None
        assert child.stdout.readline() == "written\n"
        assert len(open_files(child.pid, tmp_path)) == 1
        assert list(tmp_path.iterdir()) == []
        if end.startswith("SIG"):
            child.send_signal(signal.Signals[end])
        _, errors = child.communicate("go on\n", timeout=TIMEOUT_S)
    assert child.returncode == {"SIGKILL": -9, "SIGTERM": -15, "exception": 1}.get(end, 0), errors
    assert ("odd end" in errors) == (end == "exception")
    assert list(tmp_path.iterdir()) == []


def test_two_processes_one_directory(tmp_path: Path) -> None:
    program = """
    import sys
    print("ready", flush=True)
    sys.stdin.readline()
    model, x = make_model(), make_input(rows=64, seed=int(sys.argv[2]))
    tide = offload(model, to=sys.argv[1])
    for _ in range(30):
        assert_step_equal(tide, model, x)
    print("equal")
    """
    children = [start(program, str(tmp_path), str(seed)) for seed in range(2)]
    for child in children:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    for child in children:
        out, errors = child.communicate(timeout=TIMEOUT_S)
        assert (out, errors, child.returncode) == ("equal\n", "", 0)
    assert list(tmp_path.iterdir()) == []


def test_limit_of_the_system_on_files(tmp_path: Path) -> None:
    """A write stops in its middle: what was not written stays on the device."""
    program = """
    import resource, sys, warnings
    model, x = make_model(), make_input(rows=64)
    expected = step(model, x)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
    tide = offload(model, to=sys.argv[1])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = step(model, x, tide)
    assert_same_bits(found, expected)
    assert_loaded(tide)
    assert_at_rest(tide)
    stats = tide.stats()
    assert 0 < stats.spilled_bytes < 200_000 and stats.kept["disk_full"] > 0, stats
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert_step_equal(tide, model, x)
    (warning,) = warned
    print(warning.message)
    """
    text = run(program, str(tmp_path))
    assert "[disk tier] no room" in text and "[SpillFile.write]" in text
    assert "File too large" in text and str(tmp_path) in text


def test_many_graphs_in_one_file(tmp_path: Path) -> None:
    """Extents are taken and given back in odd orders; every graph reads its own."""
    model = make_model()
    tide = offload(model, to=tmp_path)
    inputs = [make_input(rows=1 + seed % 7, seed=seed) for seed in range(40)]
    expected = [step(model, x) for x in inputs]
    graphs: list[torch.Tensor] = []
    order = torch.randperm(40, generator=torch.Generator().manual_seed(3)).tolist()
    with tide:
        graphs += [model(x).square().mean() for x in inputs]
    for place, index in enumerate(order):
        model.zero_grad()
        graphs[index].backward()
        assert_same_bits([graphs[index].detach(), *gradients(model)], expected[index])
        with tide:  # takes the place of the one that is gone
            graphs[index] = model(inputs[index]).square().mean()
        if place % 3 == 0:
            graphs[index] = torch.zeros(())
    graphs.clear()
    assert_loaded(tide)
    assert_at_rest(tide)
    assert process.spill_file(tmp_path, False).used_bytes == 0
