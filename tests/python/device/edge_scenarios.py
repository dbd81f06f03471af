"""One small run of the real session per ordering edge: says whether the values came out right.

What nobody orders shows at once: copies are held back to the last moment, or run by hand as early as order allows. A
function that saves and a copy within the device are lazy too, kernels are not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from copy_streams import copy_stream, each_copy_at_once, run_all
from saving import (
    NBYTES,
    NEXT_BLOCK,
    N,
    gradient,
    leaf,
    main_stream,
    overwrite,
    overwritten,
    save,
    settled,
    side_stream,
)
from support import EXACT

import ebbtide.torch as ebb


class Scenarios:
    """Each method is one; ``self.options`` go to ``offload``."""

    def __init__(self, control: Any, directory: Path) -> None:
        self.control = control
        self.directory = directory
        self.runs = 0

    def run(self, name: str) -> bool:
        """Whether the values came out right."""
        self.runs += 1
        return getattr(self, name)()

    def values(self, seed: int) -> torch.Tensor:
        """Others in each run: what an earlier one left behind is wrong in this one."""
        return torch.arange(N, dtype=torch.float32) % 251 + (seed + 7 * self.runs)

    def on_device(self, seed: int, device: int = 0) -> torch.Tensor:
        return self.values(seed).to(f"tide:{device}")

    def right(self, found: torch.Tensor, *seeds: int) -> bool:
        """Whether the gradient is that of a product with these values."""
        expected = torch.ones(N)
        for seed in seeds:
            expected = expected * self.values(seed)
        return torch.equal(found.cpu(), expected)

    def offload(self, **options: Any) -> ebb.Offload:
        given = {"to": "host", "device": "tide", "prefetch_bytes": 0} | EXACT | options
        return ebb.offload(**given)

    def finish(self, tide: ebb.Offload) -> None:
        torch.accelerator.synchronize()
        assert tide.stats().live_hits == 0
        assert tide.stats().h2d_bytes > 0

    # --- 1
    def producer_to_d2h(self) -> bool:
        a, source, tide = leaf(), self.on_device(1), self.offload()
        with each_copy_at_once(self.control), tide:
            y = save(a, source.clone())
        grad = gradient(y, a)
        self.finish(tide)
        return self.right(grad, 1)

    # --- 2
    def d2h_seen_done_to_letting_go(self) -> bool:
        a, x, tide = leaf(), self.on_device(1), self.offload(in_flight_bytes=1 << 30)
        with tide:
            y = save(a, x)
            del x
        settled(tide)
        other = overwrite()
        torch.accelerator.synchronize()
        settled(tide)
        grad = gradient(y, a)
        self.finish(tide)
        return self.right(grad, 1) and overwritten(other)

    def d2h_to_letting_go_in_order(self) -> bool:
        a, x, tide = leaf(), self.on_device(1), self.offload()
        with tide:
            y = save(a, x)
            del x
        overwrite()
        grad = gradient(y, a)
        self.finish(tide)
        return self.right(grad, 1)

    def d2h_to_letting_go_of_another_pool(self) -> bool:
        a, source, tide = leaf(), self.on_device(1), self.offload()
        side = side_stream()
        with side:
            x = source * 1
        main_stream().wait_stream(side)
        with tide:
            y = save(a, x)
            del x
        main_stream().synchronize()
        with side:
            overwrite()
        grad = gradient(y, a)
        self.finish(tide)
        return self.right(grad, 1)

    # --- 3
    def d2h_to_h2d(self) -> bool:
        a, x, tide = leaf(), self.on_device(1), self.offload()
        with tide:
            y = save(a, x)
            del x
        grad = gradient(y, a)
        self.finish(tide)
        return self.right(grad, 1)

    def d2h_to_prefetched_h2d(self) -> bool:
        a, x, z, tide = (
            leaf(),
            self.on_device(1),
            self.on_device(2),
            self.offload(prefetch_bytes=1 << 20),
        )
        with tide:
            y = save(a, x)
            del x
            y = save(y, z)
            del z
        # What is asked for first is there already; what was saved before it is loaded on a guess.
        run_all(self.control, copy_stream(to_device=False))
        with tide:
            pass
        first = tide.stats()
        b, w, v = leaf(), self.on_device(3), self.on_device(4)
        with tide:
            u = save(b, w)
            del w
            u = save(u, v)
            del v
        grads = gradient(u, b), gradient(y, a)
        self.finish(tide)
        assert tide.stats().prefetch_hits == first.prefetch_hits + 2
        return self.right(grads[0], 3, 4) and self.right(grads[1], 1, 2)

    # --- 4
    def allocation_to_h2d(self) -> bool:
        a, x, tide = leaf(), self.on_device(1), self.offload()
        with tide:
            y = save(a, x)
            del x
        torch.accelerator.synchronize()
        with each_copy_at_once(self.control):
            grad = gradient(y, a)
        self.finish(tide)
        return self.right(grad, 1)

    # --- 5
    def h2d_to_consumer(self) -> bool:
        return self.d2h_to_h2d()

    def h2d_to_consumer_on_another_stream(self) -> bool:
        return self.consumed_on_another_stream(reused=False)

    def consumer_on_another_stream_to_letting_go(self) -> bool:
        return self.consumed_on_another_stream(reused=True)

    def consumed_on_another_stream(self, reused: bool) -> bool:
        a, x, tide = leaf(), self.on_device(1), self.offload()
        host = torch.empty(N).pin_memory()
        side = side_stream()
        with tide:
            y = save(a, x)
            del x
        with side:
            restored = y.grad_fn.saved_tensors[0]
            host.copy_(restored, non_blocking=True)
            del restored
        other = overwrite() if reused else []
        side.synchronize()
        self.finish(tide)
        return torch.equal(host, self.values(1)) and overwritten(other)

    def h2d_to_second_consumer(self) -> bool:
        """Loaded for one stream, and found loaded by another."""
        a, x, tide = leaf(), self.on_device(1), self.offload()
        host = torch.empty(N).pin_memory()
        side = side_stream()
        with tide:
            y, z = save(a, x), save(a, x)
            del x
        first = y.grad_fn.saved_tensors[0]
        with side:
            second = z.grad_fn.saved_tensors[0]
            host.copy_(second, non_blocking=True)
        side.synchronize()
        self.finish(tide)
        assert tide.stats().h2d_copies == 1
        return torch.equal(host, self.values(1)) and self.right(first, 1)

    def restored_and_saved_again_on_another_stream(self) -> bool:
        a, x, tide = leaf(), self.on_device(1), self.offload()
        host = torch.empty(N).pin_memory()
        with tide:
            y = save(a, x)
            del x
            save(a, self.on_device(2))  # which looks at what was saved before
            restored = y.grad_fn.saved_tensors[0]
            side = side_stream()
            with side:
                host.copy_(restored, non_blocking=True)
                z = save(a, restored)
            del restored
        other = overwrite()
        side.synchronize()
        grads = gradient(y, a), gradient(z, a)
        self.finish(tide)
        is_right = self.right(grads[0], 1) and self.right(grads[1], 1)
        return is_right and torch.equal(host, self.values(1)) and overwritten(other)

    # --- 6
    def h2d_to_letting_go_at_a_drop(self) -> bool:
        a, x, z, tide = (
            leaf(),
            self.on_device(1),
            self.on_device(2),
            self.offload(prefetch_bytes=1 << 20),
        )
        others = []

        def drop() -> None:
            graphs.clear()
            others.extend(overwrite())

        with tide:
            graphs = [save(a, x)]
            del x
            y = save(a, z, then=drop)
            del z
        grad = gradient(y, a)
        assert tide.stats().h2d_copies == 2
        self.finish(tide)
        return self.right(grad, 2) and overwritten(others)

    def h2d_to_letting_go_after_a_pass(self) -> bool:
        a, x, z, tide = (
            leaf(),
            self.on_device(1),
            self.on_device(2),
            self.offload(prefetch_bytes=1 << 20),
        )
        with tide:
            first = save(a, x)
            del x
            y = save(a, z)
            del z
        grad = gradient(y, a)
        assert tide.stats().h2d_copies == 2
        del first
        other = overwrite()
        self.finish(tide)
        return self.right(grad, 2) and overwritten(other)

    def h2d_to_reuse_of_its_host_block(self) -> bool:
        a, x, z, tide = leaf(), self.on_device(1), self.on_device(2), self.offload()
        side = side_stream()
        with tide:
            y = save(a, x)
            del x
        torch.accelerator.synchronize()
        settled(tide)
        restored = y.grad_fn.saved_tensors[0]
        del y
        with side, tide:
            y = save(a, z)
            del z
        run_all(self.control, copy_stream(to_device=False))
        is_right = self.right(restored, 1)
        is_right &= self.right(gradient(y, a), 2)
        self.finish(tide)
        return is_right

    def d2h_to_reuse_of_its_host_block(self) -> bool:
        a, x, z, tide = leaf(), self.on_device(1), self.on_device(2, device=1), self.offload()
        b = leaf(device=1)
        with tide:
            y = save(a, x)
            del x
        del y
        with tide:
            y = save(b, z)
            del z
        torch.accelerator.synchronize(1)
        torch.accelerator.synchronize(0)
        grad = gradient(y, b)
        self.finish(tide)
        return self.right(grad, 2)

    # --- 7
    def staged(self) -> bool:
        """Two storages gathered into one copy, and scattered; staging is dropped while they are queued."""
        a, x, z, tide = leaf(), self.on_device(1), self.on_device(2), self.offload(group_swap=True)
        with tide:
            y = save(a, x, z)
            del x, z
        other = overwrite(2 * NEXT_BLOCK)
        grad = gradient(y, a)
        after = overwrite(2 * NEXT_BLOCK)
        self.finish(tide)
        assert (tide.stats().d2h_copies, tide.stats().h2d_copies) == (1, 1)
        return self.right(grad, 1, 2) and overwritten(other) and overwritten(after)

    # --- 8
    def another_writer_to_d2h(self) -> bool:
        a, tide = leaf(NBYTES // 2), self.offload()
        source, x = self.on_device(1), overwrite().pop()
        side = side_stream()
        with each_copy_at_once(self.control), tide:
            with side:
                x[N // 2 :].copy_(source[N // 2 :])
            first = save(a, x[: N // 2])
            with side:
                second = save(a, x[N // 2 :])
            del x
        found = gradient(second, a).cpu()
        assert bool((gradient(first, a) == -1).all())
        self.finish(tide)
        return torch.equal(found, self.values(1)[N // 2 :])

    def another_reader_to_letting_go(self) -> bool:
        a, x, tide = leaf(), self.on_device(1), self.offload()
        host = torch.empty(N).pin_memory()
        side = side_stream()
        with each_copy_at_once(self.control), tide:
            y = save(a, x)
            with side:
                host.copy_(x, non_blocking=True)
                z = save(a, x)
            del x
        overwrite()
        side.synchronize()
        grads = gradient(y, a), gradient(z, a)
        self.finish(tide)
        return (
            torch.equal(host, self.values(1))
            and self.right(grads[0], 1)
            and self.right(grads[1], 1)
        )

    def another_reader_goes_on(self) -> bool:
        """It reads after the save, as the operation that autograd saves for does."""
        a, x, tide = leaf(), self.on_device(1), self.offload()
        host = torch.empty(N).pin_memory()
        side = side_stream()
        with each_copy_at_once(self.control), tide:
            with side:
                y = save(a, x)
                host.copy_(x, non_blocking=True)
            del x
        other = overwrite()
        side.synchronize()
        grad = gradient(y, a)
        self.finish(tide)
        return torch.equal(host, self.values(1)) and self.right(grad, 1) and overwritten(other)

    def another_reader_after_the_copy(self) -> bool:
        """Saved again on another stream while the copy runs, and let go of before that stream has read it."""
        return self.given_out_while_copied(saved_again=True)

    def another_reader_of_what_is_still_there(self) -> bool:
        """Asked for on another stream while the copy runs, and let go of before that stream has read it."""
        return self.given_out_while_copied(saved_again=False)

    def given_out_while_copied(self, saved_again: bool) -> bool:
        a, x, tide = leaf(), self.on_device(1), self.offload(in_flight_bytes=1 << 30)
        host = torch.empty(N).pin_memory()
        side = side_stream()
        with tide:
            outputs = [save(a, x)]
            del x
            save(a, self.on_device(2))  # which looks at what was saved before
            with side:
                live = outputs[0].grad_fn.saved_tensors[0]
                host.copy_(live, non_blocking=True)
                if saved_again:
                    outputs.append(save(a, live))
                del live
            for _ in range(2):  # the copy under which it was given out is not used
                run_all(self.control, copy_stream(to_device=False))
                tide.stats()
                with tide:
                    pass
        run_all(self.control, copy_stream(to_device=False))
        tide.stats()
        other = overwrite()
        side.synchronize()
        torch.accelerator.synchronize()
        grads = [gradient(output, a) for output in outputs]
        assert tide.stats().h2d_bytes > 0
        is_right = all(self.right(grad, 1) for grad in grads)
        return torch.equal(host, self.values(1)) and is_right and overwritten(other)

    # --- 9
    def behind_the_host_tier(self) -> bool:
        """Room for one of three storages in host memory."""
        tide = self.offload(to=self.directory, max_host_bytes=NEXT_BLOCK)
        leaves = [leaf() for _ in range(3)]
        outputs = []
        with tide:
            for i, a in enumerate(leaves):
                x = self.on_device(i)
                outputs.append(save(a, x))
                del x
        tide.synchronize()
        assert tide.stats().spilled_bytes >= 2 * NBYTES
        with each_copy_at_once(self.control):
            grads = [gradient(outputs[i], leaves[i]) for i in (0, 2, 1)]
        self.finish(tide)
        return all(self.right(grad, i) for grad, i in zip(grads, (0, 2, 1), strict=True))
