"""How long an operation, a copy and a call of the host take: a stated model, not a measurement."""

from __future__ import annotations

from dataclasses import dataclass, field

from virtual_clock.trace import Op, Trace


def _h100_flops() -> dict[str, float]:
    return {"bfloat16": 989e12, "float16": 989e12, "float32": 67e12}


@dataclass(frozen=True)
class Roofline:
    """A kernel takes the longer of arithmetic and memory traffic, and its launch. The defaults are near an H100."""

    flops_per_s: dict[str, float] = field(default_factory=_h100_flops)  # dense, of the data sheet
    flops_share: float = 0.55
    memory_bytes_per_s: float = 3.35e12
    memory_share: float = 0.8
    launch_s: float = 4e-6

    def seconds(self, op: Op) -> float:
        arithmetic = 0.0
        if op.flops:
            arithmetic = op.flops / (self.flops_per_s[op.dtype] * self.flops_share)
        traffic = op.nbytes / (self.memory_bytes_per_s * self.memory_share)
        return self.launch_s + max(arithmetic, traffic)

    def times(self, trace: Trace) -> list[float]:
        return [self.seconds(op) for op in trace.ops]


@dataclass(frozen=True)
class Link:
    """Between device and host memory. Both directions at once, each as fast as alone; copies of one in turn."""

    bytes_per_s: float
    copy_s: float = 6e-6  # that no copy is shorter than

    def seconds(self, nbytes: int) -> float:
        return self.copy_s + nbytes / self.bytes_per_s


@dataclass(frozen=True)
class Host:
    """Its time for one call. It runs ahead of the device until so many operations are queued."""

    op_s: float = 10e-6
    pack_s: float = 10e-6
    unpack_s: float = 10e-6
    copy_s: float = 6e-6
    queued_ops: int = 1024
