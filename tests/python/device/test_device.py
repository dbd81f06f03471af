"""PyTorch's interfaces on the device: storages, views, copies, memory, failures."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint


def ones(*sizes: int, device: str = "tide") -> torch.Tensor:
    return torch.ones(*sizes, device=device)


# --- storages and views


def test_storages_lie_at_multiples_of_512_bytes() -> None:
    addresses = [torch.empty(n, device="tide").data_ptr() for n in (1, 3, 500, 5000)]
    assert [address % 512 for address in addresses] == [0] * 4


def test_a_bare_storage_can_be_sliced_and_looked_at() -> None:
    storage = torch.UntypedStorage(4096, device="tide:1")
    assert (storage.device, storage.nbytes()) == (torch.device("tide:1"), 4096)
    whole = torch.empty(0, device="tide:1").set_(storage, 0, (1024,), (1,))
    whole.copy_(torch.arange(1024.0))
    part = storage[512:1024]
    assert part.data_ptr() == storage.data_ptr() + 512
    view = torch.empty(0, device="tide:1").set_(part, 3, (2, 2), (10, 5))
    assert torch.equal(view.cpu(), torch.tensor([[131.0, 136.0], [141.0, 146.0]]))
    view.zero_()
    assert whole[131].item() == 0
    other = torch.empty(0, dtype=torch.uint8, device="tide:1").set_(storage)
    assert other.shape == (4096,)


def test_a_set_beyond_the_storage_is_refused() -> None:
    storage = torch.UntypedStorage(64, device="tide")
    part = storage[:32]
    with pytest.raises(RuntimeError):
        torch.empty(0, device="tide").set_(part, 0, (16,), (1,))


def test_resizing_keeps_the_bytes(control: ModuleType) -> None:
    before = control.memory().used_bytes
    x = torch.arange(6.0, device="tide")
    x.resize_(3, 4)
    assert torch.equal(x.cpu().flatten()[:6], torch.arange(6.0))
    x.untyped_storage().resize_(0)
    assert (x.untyped_storage().nbytes(), control.memory().used_bytes) == (0, before)
    x.untyped_storage().resize_(48)
    x.fill_(1)
    assert x.sum().item() == 12


def test_an_exchanged_tensor_keeps_the_version_counter() -> None:
    x = ones(4)
    witness = x.detach()
    witness.data = torch.empty(0, device=x.device)
    before = witness._version
    x.view(2, 2).add_(1)
    assert witness._version == before + 1
    assert witness.untyped_storage().nbytes() == 0


def test_storages_are_counted_and_weakly_held(control: ModuleType) -> None:
    before = control.memory().used_bytes
    x = ones(100)
    storage = x.untyped_storage()
    weak = StorageWeakRef(storage)
    assert torch._C._storage_Use_Count(storage._cdata) == 2
    del x
    assert torch._C._storage_Use_Count(storage._cdata) == 1
    assert not weak.expired()
    del storage
    assert weak.expired()
    assert control.memory().used_bytes == before


def test_views_share_memory_and_the_counter() -> None:
    x = torch.arange(12.0, device="tide").view(3, 4)
    view = x.t()[1:3]
    assert view.data_ptr() == x.data_ptr() + 4
    assert view._base is x._base
    view.mul_(10)
    assert torch.equal(x[:, 1].cpu(), torch.tensor([10.0, 50.0, 90.0]))
    assert x._version == view._version


def test_device_memory_cannot_be_read_by_the_host() -> None:
    with pytest.raises(TypeError, match="tide"):
        ones(3).numpy()


def test_new_memory_is_poisoned() -> None:
    assert torch.empty(10, device="tide").isnan().all()
    assert (torch.empty(10, dtype=torch.int32, device="tide") == -1).all()


def test_freed_addresses_are_handed_out_at_once(control: ModuleType) -> None:
    first = ones(1000).data_ptr()
    assert ones(1000).data_ptr() == first
    control.options(reuse="delayed")
    assert ones(1000).data_ptr() != first


# --- copies


@pytest.mark.parametrize("non_blocking", [False, True])
def test_copies_of_all_shapes(non_blocking: bool, control: ModuleType) -> None:
    source = torch.arange(24.0).view(4, 6)
    shapes = [lambda t: t, lambda t: t.t(), lambda t: t[1:, ::2], lambda t: t[:1].expand(3, 6)]
    for shape in shapes:
        x = shape(source.to("tide", non_blocking=non_blocking))
        y = x.to("cpu", non_blocking=non_blocking)
        z = x.to("tide:1", torch.float64, non_blocking=non_blocking)
        strided = torch.zeros(*x.shape, 2)[..., 0]
        strided.copy_(x, non_blocking=non_blocking)
        torch.accelerator.synchronize()
        assert torch.equal(y, shape(source))
        assert torch.equal(strided, shape(source))
        assert torch.equal(z.cpu(), shape(source).double())
    assert control.races() == []


def test_copies_keep_conjugates() -> None:
    x = torch.tensor([1 + 2j, 3 - 1j], device="tide")
    assert torch.equal(x.conj().cpu(), torch.tensor([1 - 2j, 3 + 1j]))
    assert torch.equal(x.conj().imag.cpu(), torch.tensor([-2.0, 1.0]))
    y = torch.empty_like(x).copy_(x.conj())
    assert torch.equal(y.cpu(), torch.tensor([1 - 2j, 3 + 1j]))


def test_copies_are_recorded(control: ModuleType) -> None:
    side = torch.Stream(device="tide")
    host = torch.ones(256).pin_memory()
    x = host.to("tide", non_blocking=True)
    with side:
        side.wait_stream(torch.accelerator.current_stream(1))
        host.copy_(x, non_blocking=True)
    down, up = control.copies()[::-1]
    assert (up.kind.name, up.nbytes, up.src, up.dst) == ("h2d", 1024, host.data_ptr(), x.data_ptr())
    assert (down.kind.name, down.stream_id) == ("d2h", side.stream_id)
    assert control.clear_copies() is None and control.copies() == []


def test_queued_copies_are_stepped_by_hand(control: ModuleType) -> None:
    side = torch.Stream(device="tide")
    host = torch.zeros(8).pin_memory()
    x = ones(8)
    torch.accelerator.synchronize()
    with side:
        host.copy_(x, non_blocking=True)
        event = side.record_event()
    assert control.queued(side) == 2
    assert (event.query(), side.query(), host.sum().item()) == (False, False, 0)
    assert control.step(side)
    assert (event.query(), host.sum().item()) == (False, 8)
    assert control.step(side)
    assert event.query() and side.query() and not control.step(side)


# --- pinned memory


def test_pinned_memory() -> None:
    made = [torch.empty(5, pin_memory=True), torch.ones(5).pin_memory()]
    made.append(ones(5).to("cpu", non_blocking=True))
    assert [tensor.is_pinned() for tensor in made] == [True] * 3
    assert made[0].untyped_storage().is_pinned()
    assert made[0][2:].is_pinned()
    assert not torch.ones(5).is_pinned()


def test_pinning_may_fail(control: ModuleType) -> None:
    control.fail("pin", 2)
    torch.empty(5, pin_memory=True)
    with pytest.raises(RuntimeError, match="page-locked"):
        torch.empty(5, pin_memory=True)
    torch.empty(5, pin_memory=True)


# --- memory


def test_memory_is_counted() -> None:
    torch.accelerator.reset_peak_memory_stats(0)
    before = torch.accelerator.memory_allocated(0)
    x = torch.empty(1000, device="tide")
    y = torch.empty(3000, device="tide")
    assert torch.accelerator.memory_allocated(0) - before == 16000
    del y
    assert torch.accelerator.memory_allocated(0) - before == 4000
    assert torch.accelerator.max_memory_allocated(0) - before == 16000
    torch.accelerator.reset_peak_memory_stats(0)
    assert torch.accelerator.max_memory_allocated(0) - before == 4000
    del x


def test_out_of_memory_at_the_limit(control: ModuleType) -> None:
    control.set_limit(0, control.memory().used_bytes + (1 << 16))
    with pytest.raises(torch.OutOfMemoryError, match="limit"):
        torch.empty(1 << 16, device="tide")
    torch.empty(1 << 12, device="tide")
    torch.empty(1 << 16, device="tide:1")


# --- failures


@pytest.mark.parametrize("operation", ["copy", "record", "wait", "synchronize"])
def test_a_failure_is_named(operation: str, control: ModuleType) -> None:
    side, event = torch.Stream(device="tide"), torch.Event(device="tide")
    event.record()
    x, host = ones(4), torch.ones(4)
    control.fail(operation)
    calls = {
        "copy": lambda: x.copy_(host),
        "record": lambda: side.record_event(),
        "wait": lambda: side.wait_event(event),
        "synchronize": lambda: side.synchronize(),
    }
    with pytest.raises(RuntimeError, match=operation):
        calls[operation]()
    calls[operation]()


def test_a_lost_device_frees_and_recovers(control: ModuleType) -> None:
    before = control.memory().used_bytes
    x = ones(4)
    control.lose()
    with pytest.raises(RuntimeError, match="lost"):
        x + 1
    del x
    assert control.memory().used_bytes == before
    control.recover()
    assert ones(4).sum().item() == 4


def test_an_error_in_an_operator_leaves_the_device_usable(control: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        ones(2, 3) @ ones(2, 3)
    assert ones(2).sum().item() == 2
    assert control.races() == []


# --- what models lean on


def test_checkpoints_draw_the_same_numbers_again(control: ModuleType) -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x, 0.5) * x

    gradients = []
    for wrapped in (lambda x: layer(x), lambda x: checkpoint(layer, x, use_reentrant=False)):
        torch.manual_seed(0)
        x = ones(50).requires_grad_()
        wrapped(x).sum().backward()
        gradients.append(x.grad.cpu())
    assert torch.equal(*gradients)
    assert control.races() == []


def test_generators_give_the_numbers_of_the_cpu() -> None:
    tide = torch.Generator(device="tide").manual_seed(3)
    cpu = torch.Generator().manual_seed(3)
    assert torch.equal(
        torch.randn(5, device="tide", generator=tide).cpu(), torch.randn(5, generator=cpu)
    )
    state = torch.tide.get_rng_state()
    first = torch.rand(3, device="tide")
    torch.tide.set_rng_state(state)
    assert torch.equal(first.cpu(), torch.rand(3, device="tide").cpu())


def test_autocast() -> None:
    weight = ones(4, 4).requires_grad_()
    with torch.autocast("tide", dtype=torch.bfloat16):
        y = ones(2, 4) @ weight
        assert y.dtype == torch.bfloat16
        assert y.softmax(-1).dtype == torch.float32
    y.float().sum().backward()
    assert weight.grad.dtype == torch.float32
