"""Streams, events, devices and threads through PyTorch's interfaces."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest
import torch


def ones(*sizes: int, device: str = "tide") -> torch.Tensor:
    return torch.ones(*sizes, device=device)


def test_streams_and_events() -> None:
    side = torch.Stream(device="tide:0")
    default = torch.accelerator.current_stream(0)
    assert (default.stream_id, side.device) == (0, torch.device("tide:0"))
    with side:
        assert torch.accelerator.current_stream(0) == side
        event = side.record_event()
        x = ones(3) + 1
    assert torch.accelerator.current_stream(0) == default
    default.wait_event(event)
    event.synchronize()
    assert event.query()
    default.wait_stream(side)
    assert (x + 1).sum().item() == 9
    side.synchronize()
    assert side.query()
    torch.accelerator.set_stream(side)
    assert torch.accelerator.current_stream(0) == side
    torch.accelerator.set_stream(default)
    assert torch.tide.default_stream(0) == default
    if hasattr(side, "native_handle"):
        assert side.native_handle != default.native_handle


def test_an_event_times_the_virtual_clock(control: ModuleType) -> None:
    control.options(link_bytes_per_s=1e6, copy_latency_s=0.0)
    begin, end = (torch.Event(device="tide", enable_timing=True) for _ in range(2))
    host, x = (
        torch.zeros(1000, dtype=torch.uint8).pin_memory(),
        torch.empty(1000, dtype=torch.uint8, device="tide"),
    )
    begin.record()
    x.copy_(host, non_blocking=True)
    end.record()
    end.synchronize()
    assert begin.elapsed_time(end) == pytest.approx(1.0)


def test_backward_runs_in_the_stream_of_forward() -> None:
    side = torch.Stream(device="tide")
    seen: list[tuple[str, torch.Stream]] = []
    x = ones(4).requires_grad_()
    side.wait_stream(torch.accelerator.current_stream(0))

    def unpack(packed: torch.Tensor) -> torch.Tensor:
        seen.append((threading.current_thread().name, torch.accelerator.current_stream(0)))
        return packed

    with side, torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), unpack):
        y = x.exp()
    torch.accelerator.current_stream(0).wait_stream(side)
    y.sum().backward()
    assert [stream for _, stream in seen] == [side]
    assert seen[0][0] != threading.current_thread().name
    assert torch.equal(x.grad.cpu(), torch.ones(4).exp())


def test_capturing_can_be_pretended(control: ModuleType) -> None:
    assert not torch.tide.is_current_stream_capturing()
    control.set_capturing(True)
    assert torch.tide.is_current_stream_capturing()


def test_two_devices() -> None:
    x, y = ones(3), ones(3, device="tide:1") * 2
    with torch.accelerator.device_index(1):
        assert torch.empty(1, device="tide").device.index == 1
    assert torch.accelerator.current_device_index() == 0
    z = (x.to("tide:1") + y).requires_grad_()
    (z.to("tide:0") * x).sum().backward()
    assert (z.grad.device.index, z.grad.sum().item()) == (1, 3)
    assert torch.accelerator.device_count() == 2
    with pytest.raises(RuntimeError, match="tide:5"):
        torch.empty(1, device="tide:5")


def test_threads_have_streams_of_their_own(control: ModuleType) -> None:
    failures: list[object] = []

    def work(number: int) -> None:
        try:
            with torch.Stream(device="tide"):
                weight = torch.full((20, 20), 0.01, device="tide").requires_grad_()
                for _ in range(20):
                    x = torch.full((4, 20), float(number), device="tide")
                    ((x @ weight) @ weight).sum().backward()
                expected = torch.full((20, 20), 20 * 2 * 4 * number * 0.2)
                torch.testing.assert_close(weight.grad.cpu(), expected)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert control.races() == []


@pytest.mark.parametrize("wait", ["stream", "event", "device"])
def test_a_wait_lets_other_threads_run(wait: str, control: ModuleType) -> None:
    control.options(mode="worker", delay_us=300_000)
    side = torch.Stream(device="tide")
    host, x = torch.zeros(4).pin_memory(), ones(4)
    torch.accelerator.synchronize()
    with side:
        host.copy_(x, non_blocking=True)
        event = side.record_event()
    turns = 0
    done = threading.Event()

    def count() -> None:
        nonlocal turns
        while not done.wait(0.01):
            turns += 1

    thread = threading.Thread(target=count)
    thread.start()
    waits = {
        "stream": side.synchronize,
        "event": event.synchronize,
        "device": torch.accelerator.synchronize,
    }
    waits[wait]()
    done.set()
    thread.join()
    assert turns >= 5


ENDS_WITH_WORK_QUEUED = """
import torch
from tide_device import control
control.options(mode={mode!r}, delay_us=20_000)
side, host = torch.Stream(device="tide"), torch.zeros(10).pin_memory()
x = torch.ones(10, device="tide", requires_grad=True)
x.exp().sum().backward()
with side:
    for _ in range(5):
        host.copy_(x.detach(), non_blocking=True)
    event = side.record_event()
"""


@pytest.mark.parametrize("mode", ["lazy", "worker"])
def test_a_process_may_end_with_work_queued(mode: str) -> None:
    device = Path(__file__).resolve().parents[2] / "device"
    script = ENDS_WITH_WORK_QUEUED.format(mode=mode)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=device, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
