"""What only memory with streams can show: order between streams, threads of backward, graph capture, several devices."""

from __future__ import annotations

import threading

import pytest
import torch
from checks import assert_same, note
from inplace import Node
from support import DEVICE, assert_at_rest, assert_loaded
from torch_support import assert_no_races, end_backward

import ebbtide.torch as ebb

if DEVICE == "cpu":
    pytest.skip("memory of the CPU has no streams", allow_module_level=True)

from tide_device import control  # noqa: E402

FLOAT = 4
SIZE = 1 << 10


@pytest.fixture
def device_backend(torch_backend):
    """A test has streams of its own; nothing of other tests is queued or cached on them."""
    torch_backend.settle()
    return torch_backend


def use(saved, weight):
    """A node that saves `saved` and nothing else."""
    return Node.apply(weight, saved, None)


def plain(program):
    """The gradients without offload, of a program that orders its own streams as it has to."""
    result = program(None)
    end_backward()
    assert_no_races()
    return result


# --- several streams


def test_one_activation_used_on_two_streams(device_backend):
    """Its load is for one of them, and the other one comes after it too; its memory is kept for both."""
    side = torch.Stream()

    def program(tide):
        leaves = [torch.ones(3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
        main = torch.accelerator.current_stream()
        with tide or torch.enable_grad():
            x = torch.arange(float(SIZE)).sin()
            first = use(x, leaves[0]).sum()
            side.wait_stream(main)
            with side:
                second = use(x, leaves[1]).sum()
            x.record_stream(side)
            x = None
        gradients = torch.autograd.grad([first, second], leaves)
        device_backend.settle()
        return list(gradients)

    expected = plain(program)
    tide = device_backend.offload()
    for _ in range(3):
        assert_same(device_backend, program(tide), expected)
        assert_at_rest(tide)
    assert_loaded(tide)
    assert tide.stats().d2h_bytes == 3 * SIZE * FLOAT


def test_saved_on_one_stream_and_read_on_another(device_backend):
    """`saved_tensors` on a stream that has nothing to do with the one it was saved on."""
    side = torch.Stream()

    def program(tide):
        leaf = torch.ones(3, dtype=torch.float64, requires_grad=True)
        with tide or torch.enable_grad():
            output = use(torch.arange(float(SIZE)).sin(), leaf)
        ready = torch.Event()
        ready.record()
        side.wait_event(ready)
        with side:
            (x,) = output.grad_fn.saved_tensors
            total = x.exp() * 2
            if tide is None:
                x.record_stream(
                    side
                )  # which is the reader's business, and offload's where it allocates
            x = None
        device_backend.settle()
        return [total]

    expected = plain(program)
    tide = device_backend.offload()
    for _ in range(3):
        assert_same(device_backend, program(tide), expected)
        assert_at_rest(tide)
    assert_loaded(tide)


def test_views_of_one_storage_saved_on_two_streams(device_backend):
    """Each stream writes a half and saves it: the copy waits for both."""
    streams = [torch.Stream(), torch.Stream()]

    def program(tide):
        leaves = [torch.ones(3, dtype=torch.float64, requires_grad=True) for _ in streams]
        main = torch.accelerator.current_stream()
        outputs = []
        with tide or torch.enable_grad():
            x = torch.empty(2, SIZE)
            for half, stream in enumerate(streams):
                stream.wait_stream(main)
                with stream:
                    # On a counter of its own: the other half's save does not see a write.
                    x.data[half].copy_(torch.arange(float(SIZE)).sin() + half)
                    outputs.append(use(x.data[half], leaves[half]).sum())
                x.record_stream(stream)
            x = None
        gradients = torch.autograd.grad(outputs, leaves)
        device_backend.settle()
        return list(gradients)

    expected = plain(program)
    tide = device_backend.offload()
    assert_same(device_backend, program(tide), expected)
    stats = tide.stats()
    assert (stats.storages, stats.d2h_bytes) == (1, 2 * SIZE * FLOAT)
    assert_loaded(tide)
    assert_at_rest(tide)


def test_a_third_stream_that_still_reads_the_activation(device_backend):
    """Told of by record_stream, as the framework asks for: its memory goes to nobody else before."""
    reader = torch.Stream()

    def program(tide):
        leaf = torch.ones(3, dtype=torch.float64, requires_grad=True)
        sums = []
        with tide or torch.enable_grad():
            output = leaf
            for i in range(6):
                x = torch.arange(float(SIZE)) + i
                reader.wait_stream(torch.accelerator.current_stream())
                with reader:
                    for _ in range(4):
                        sums.append((x * x).sum())
                x.record_stream(reader)
                output = use(x, output)
                x = None
        gradients = torch.autograd.grad(output.sum(), leaf)
        with reader:
            total = torch.stack(sums)
            sums.clear()
        device_backend.settle()
        return [*gradients, total]

    expected = plain(program)
    tide = device_backend.offload()
    assert_same(device_backend, program(tide), expected)
    assert tide.stats().d2h_bytes == 6 * SIZE * FLOAT
    assert_loaded(tide)
    assert_at_rest(tide)


def test_a_third_stream_that_wrote_the_activation(device_backend):
    """The saving stream waits for the writer; that is all that offload has to go by."""
    writer = torch.Stream()

    def program(tide):
        leaf = torch.ones(3, dtype=torch.float64, requires_grad=True)
        with tide or torch.enable_grad():
            output = leaf
            for i in range(6):
                with writer:
                    x = torch.arange(float(SIZE)).cos() + i
                torch.accelerator.current_stream().wait_stream(writer)
                x.record_stream(torch.accelerator.current_stream())
                output = use(x, output)
                x = None
        return list(torch.autograd.grad(output.sum(), leaf))

    expected = plain(program)
    tide = device_backend.offload()
    assert_same(device_backend, program(tide), expected)
    assert tide.stats().d2h_bytes == 6 * SIZE * FLOAT
    assert_loaded(tide)
    assert_at_rest(tide)


# --- backward's own thread, and several


def test_backward_runs_on_the_devices_own_thread(device_backend):
    """What a thread is asked for it loads on its stream, whoever has called backward."""
    threads = []

    def program(tide):
        leaf = torch.ones(3, dtype=torch.float64, requires_grad=True)
        act = threads.append
        with tide or torch.enable_grad():
            output = leaf
            for i in range(4):
                output = Node.apply(output, torch.full((SIZE,), float(i)), None)
            output = Node.apply(output, torch.ones(SIZE), lambda saved: act(threading.get_ident()))
        return list(torch.autograd.grad(output.sum(), leaf))

    expected = plain(program)
    tide = device_backend.offload()
    assert_same(device_backend, program(tide), expected)
    assert threading.get_ident() not in threads
    assert_loaded(tide)
    assert_at_rest(tide)


# --- pipelines: forwards and backwards of micro-batches in turn


def micro_batches(order, stages=4, rows=32):
    """`order` names a micro-batch: forward where it comes first, backward where it comes again."""

    def program(tide):
        weights = [
            torch.randn(
                rows, rows, generator=torch.Generator(DEVICE).manual_seed(i)
            ).requires_grad_()
            for i in range(stages)
        ]
        losses, found = {}, []
        for batch in order:
            if batch in losses:
                losses.pop(batch).backward()
                found += [w.grad.clone() for w in weights]
                continue
            with tide or torch.enable_grad():
                x = torch.full((rows, rows), 0.1 * (batch + 1))
                for weight in weights:
                    x = (x @ weight).tanh() * 0.5
                losses[batch] = x.square().sum()
                x = None
        return found

    return program


ORDERS = {
    "1F1B": [0, 1, 0, 2, 1, 3, 2, 3],
    "interleaved": [0, 1, 2, 3, 0, 1, 4, 2, 5, 3, 4, 5],
    "all forwards, last in first out": [0, 1, 2, 3, 3, 2, 1, 0],
    "all forwards, first in first out": [0, 1, 2, 3, 0, 1, 2, 3],
}


@pytest.mark.parametrize("order", ORDERS)
def test_micro_batches(device_backend, order):
    program = micro_batches(ORDERS[order])
    expected = plain(program)
    tide = device_backend.offload()
    for _ in range(2):
        assert_same(device_backend, program(tide), expected)
        assert_at_rest(tide)
    assert_loaded(tide)


@pytest.mark.parametrize("order", ORDERS)
def test_micro_batches_with_a_window_and_copies_in_flight(device_backend, order):
    """The options that users run with: nothing is waited for, the last bytes stay."""
    program = micro_batches(ORDERS[order])
    expected = plain(program)
    tide = device_backend.offload(keep_last_bytes=3 << 12, in_flight_bytes=5 << 12)
    for _ in range(2):
        assert_same(device_backend, program(tide), expected)
        assert_at_rest(tide)
    assert_loaded(tide)


# --- devices


def test_each_of_two_devices_gets_its_own_back(device_backend):
    devices = [torch.device(DEVICE, 0), torch.device(DEVICE, 1)]
    noted, restored = [], []

    def program(tide):
        noted.clear(), restored.clear()
        outputs = []
        leaves = []
        with tide or torch.enable_grad():
            for i in range(6):
                device = devices[i % 2]
                leaf = torch.ones(3, dtype=torch.float64, device=device, requires_grad=True)
                x = torch.arange(float(SIZE), device=device) + i
                noted.append(note(device_backend, x))
                outputs.append(device_backend.save(leaf, [x, x.view(2, -1)[1]], restored=restored))
                leaves.append(leaf)
                x = None
        return list(torch.autograd.grad([output.sum() for output in outputs], leaves))

    expected = plain(program)
    tide = device_backend.offload()
    assert_same(device_backend, program(tide), expected)
    found = [
        note(device_backend, tensor)
        for tensor in restored
        if tensor.dim() and tensor.shape[0] == SIZE
    ]
    assert sorted(map(repr, found)) == sorted(map(repr, noted))
    assert {tensor.device for tensor in restored} == set(devices)
    stats = tide.stats()
    assert stats.d2h_bytes == stats.h2d_bytes == 6 * SIZE * FLOAT
    # On streams of their own: the default stream's are the test's, which looks at what it saves.
    moved = {(copy.kind.name, copy.device) for copy in control.copies() if copy.stream_id != 0}
    assert {("d2h", 0), ("d2h", 1), ("h2d", 0), ("h2d", 1)} <= moved
    restored.clear()
    assert_at_rest(tide)


def test_a_graph_that_crosses_from_one_device_to_the_other(device_backend):
    def program(tide):
        a = torch.linspace(0, 1, SIZE, device=f"{DEVICE}:0").requires_grad_()
        with tide or torch.enable_grad():
            x = a.exp().sin().to(f"{DEVICE}:1").exp().sin()
            loss = x.to(f"{DEVICE}:0").exp().sum()
            x = None
        return list(torch.autograd.grad(loss, a))

    expected = plain(program)
    tide = device_backend.offload()
    assert_same(device_backend, program(tide), expected)
    assert_loaded(tide)
    assert_at_rest(tide)


def test_a_host_tensor_among_device_tensors_stays(device_backend):
    restored = []

    def program(tide):
        restored.clear()
        leaf = torch.ones(3, dtype=torch.float64, requires_grad=True)
        with tide or torch.enable_grad():
            on_host = torch.arange(float(SIZE), device="cpu")
            output = device_backend.save(
                leaf, [torch.arange(float(SIZE)), on_host, on_host[1:]], restored=restored
            )
            on_host = None
        return list(torch.autograd.grad(output.sum(), leaf))

    expected = plain(program)
    tide = device_backend.offload()
    assert_same(device_backend, program(tide), expected)
    assert [tensor.device.type for tensor in restored] == [DEVICE, "cpu", "cpu"]
    assert torch.equal(restored[1], torch.arange(float(SIZE), device="cpu"))
    stats = tide.stats()
    assert stats.kept["device"] == 2
    assert stats.d2h_bytes == stats.h2d_bytes == SIZE * FLOAT
    restored.clear()
    assert_at_rest(tide)


# --- what passes through


def test_nothing_is_managed_while_a_graph_is_captured(device_backend):
    """What a captured graph saves has to stay at its address."""
    leaf = torch.linspace(0, 1, SIZE).requires_grad_()
    expected = torch.autograd.grad(leaf.exp().sin().sum(), leaf)
    tide = device_backend.offload()
    try:
        control.set_capturing(True)
        with tide:
            output = leaf.exp().sin().sum()
        stats = tide.stats()
        assert stats.kept["capture"] == stats.saved_tensors > 0
        found = torch.autograd.grad(output, leaf)
    finally:
        control.set_capturing(False)
    assert_same(device_backend, found, expected)
    stats = tide.stats()
    assert (stats.storages, stats.d2h_bytes) == (0, 0)
    output = None
    assert_at_rest(tide)
    with tide:
        output = leaf.exp().sin().sum()
    assert_same(device_backend, torch.autograd.grad(output, leaf), expected)
    output = None
    assert_loaded(tide)
    assert_at_rest(tide)


def test_a_part_of_a_storage_stays(device_backend):
    """The allocator does not know it: its memory could not be kept from reuse under a running copy."""
    restored = []

    def program(tide):
        restored.clear()
        leaf = torch.ones(3, dtype=torch.float64, requires_grad=True)
        whole = torch.arange(float(SIZE)).untyped_storage()
        with tide or torch.enable_grad():
            parts = [torch.empty(0).set_(whole[n : n + 512], 0, (128,)) for n in (0, 512)]
            output = device_backend.save(leaf, parts, restored=restored)
            parts = whole = None
        return list(torch.autograd.grad(output.sum(), leaf))

    expected = plain(program)
    tide = device_backend.offload()
    assert_same(device_backend, program(tide), expected)
    stats = tide.stats()
    assert (stats.kept["unsupported"], stats.d2h_bytes) == (2, 0)
    assert restored[1].tolist() == list(range(128, 256))
    restored.clear()
    assert_at_rest(tide)


# --- memory


def test_memory_that_was_let_go_is_somebody_elses_at_once(device_backend):
    """Backward is right although others have had the memory of what was saved, and written to it."""
    addresses = []

    def program(tide):
        addresses.clear()
        leaf = torch.ones(3, dtype=torch.float64, requires_grad=True)
        output = leaf
        for i in range(8):
            with tide or torch.enable_grad():
                x = torch.arange(float(SIZE)) * (i + 1)
                addresses.append(x.data_ptr())
                output = use(x, output)
                x = None
            device_backend.settle()
            torch.full((SIZE,), float("nan"))
        return list(torch.autograd.grad(output.sum(), leaf))

    expected = plain(program)
    assert len(set(addresses)) == 8
    tide = device_backend.offload()
    assert control.options().poison
    assert_same(device_backend, program(tide), expected)
    assert len(set(addresses)) < 8
    assert_loaded(tide)
    assert_at_rest(tide)


def test_page_locked_memory_is_the_hosts_whatever_the_default_device(device_backend):
    """The tensor that holds it is made without a user's default device."""
    ebb.trim()  # so that there is some to be made
    a = torch.linspace(0, 1, SIZE).requires_grad_()
    expected = torch.autograd.grad(a.exp().sin().sum(), a)
    tide = device_backend.offload()
    assert torch.empty(0).device.type == DEVICE
    assert tide.stats().host_reserved_bytes == 0
    with tide:
        loss = a.exp().sin().sum()
    assert_same(device_backend, torch.autograd.grad(loss, a), expected)
    loss = None
    assert_loaded(tide)
    assert tide.stats().host_reserved_bytes > 0
    assert_at_rest(tide)
