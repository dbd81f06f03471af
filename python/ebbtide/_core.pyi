"""C++ core of Ebbtide. Private: use the Python package."""

from collections.abc import Sequence
import enum


class Stats:
    @property
    def saved_tensors(self) -> int: ...

    @property
    def saved_bytes(self) -> int: ...

    @property
    def exact_duplicates(self) -> int: ...

    @property
    def storages(self) -> int: ...

    @property
    def unique_bytes(self) -> int: ...

    @property
    def kept(self) -> dict[str, int]: ...

    @property
    def d2h_copies(self) -> int: ...

    @property
    def d2h_bytes(self) -> int: ...

    @property
    def h2d_copies(self) -> int: ...

    @property
    def h2d_bytes(self) -> int: ...

    @property
    def spilled_bytes(self) -> int: ...

    @property
    def freed_bytes(self) -> int: ...

    @property
    def unfreed_bytes(self) -> int: ...

    @property
    def parked(self) -> int: ...

    @property
    def live_hits(self) -> int: ...

    @property
    def prefetch_hits(self) -> int: ...

    @property
    def prefetch_misses(self) -> int: ...

    @property
    def entries(self) -> int: ...

    @property
    def device_bytes(self) -> int: ...

    @property
    def tier_bytes(self) -> int: ...

    @property
    def peak_tier_bytes(self) -> int: ...

    @property
    def backing_bytes(self) -> int: ...

    @property
    def peak_backing_bytes(self) -> int: ...

class GroupStats:
    @property
    def runs(self) -> int: ...

    @property
    def storages(self) -> int: ...

    @property
    def unique_bytes(self) -> int: ...

    @property
    def d2h_bytes(self) -> int: ...

    @property
    def h2d_bytes(self) -> int: ...

    @property
    def prefetch_misses(self) -> int: ...

class CommandKind(enum.IntEnum):
    PROBE = 0

    GATHER = 1

    RECORD = 2

    COPY = 3

    WAIT = 4

    ALLOC = 5

    RECORD_STREAM = 6

    RELEASE_LEASE = 7

    RELEASE_RESTORED = 8

    GROW = 9

    LOAD_FAILED = 10

    FORGET = 11

    TIER_FULL = 12

class Hop(enum.IntEnum):
    OFFLOAD = 0

    LOAD = 1

    SPILL = 2

    FETCH = 3

class Tier(enum.IntEnum):
    DEVICE = 0

    HOST = 1

    FILE = 2

    STAGING = 3

class Command:
    @property
    def kind(self) -> int: ...

    @property
    def storage(self) -> int: ...

    @property
    def copy(self) -> int: ...

    @property
    def event(self) -> int: ...

    @property
    def after(self) -> list[int]: ...

    @property
    def after_copies(self) -> list[int]: ...

    @property
    def stream(self) -> int: ...

    @property
    def hop(self) -> int: ...

    @property
    def storages(self) -> list[int]: ...

    @property
    def cause(self) -> int: ...

    @property
    def staging_bytes(self) -> int: ...

    def spans(self, staged: bool) -> list[tuple[tuple[int, int, int], tuple[int, int, int], int]]: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def residue(self) -> int: ...

    def __repr__(self) -> str: ...

class BlockSpace:
    @property
    def used_bytes(self) -> int: ...

    @property
    def reserved_bytes(self) -> int: ...

class HostPool(BlockSpace):
    def __init__(self, slab_bytes: int = 67108864) -> None: ...

    @staticmethod
    def of_added_slabs(slab_bytes: int = 67108864) -> HostPool: ...

    def add_slab(self, address: int, nbytes: int) -> None: ...

    def take_empty_slabs(self, limit: int) -> list[int]: ...

    def trim(self) -> int: ...

    @property
    def slab_allocations(self) -> int: ...

class SpillFile(BlockSpace):
    def __init__(self, directory: str, allow_tmpfs: bool = False) -> None: ...

    def trim(self) -> bool: ...

    @property
    def directory(self) -> str: ...

    @property
    def descriptor(self) -> int: ...

class RestoreOutcome(enum.IntEnum):
    LIVE = 0

    SHARED = 1

    LOAD = 2

    PENDING = 3

class KeepReason(enum.Enum):
    PARAMETER = 0

    PARAMETER_CAST = 1

    SMALL = 2

    POLICY = 3

    LAST = 4

    UNSUPPORTED = 5

    DEVICE = 6

    BUDGET = 7

    HOST_FULL = 8

    CAPTURE = 9

class RestoreVerdict:
    @property
    def outcome(self) -> int: ...

    @property
    def load(self) -> int: ...

    @property
    def allocating(self) -> bool: ...

    @property
    def stream(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def residue(self) -> int: ...

    @property
    def commands(self) -> list[Command]: ...

class Engine:
    def __init__(self, space: BlockSpace, backing: BlockSpace | None, *, min_bytes: int, keep_last_bytes: int, keep_last_groups: int | None, prefetch_bytes: int, prefetch_groups: int | None, in_flight_bytes: int, max_tier_bytes: int, max_backing_bytes: int, pack_below_bytes: int, keep_last_storages: int = 0) -> None: ...

    def begin_epoch(self) -> int: ...

    def end_epoch(self, epoch: int) -> list[Command]: ...

    def begin_group(self, epoch: int, label: int) -> list[Command]: ...

    def end_group(self) -> list[Command]: ...

    def gather(self) -> list[Command]: ...

    def grown(self, ok: bool) -> list[Command]: ...

    def recover(self, running: Sequence[int]) -> list[Command]: ...

    def knows(self, storage: int) -> bool: ...

    def running(self, copy: int) -> bool: ...

    def kept(self, reason: KeepReason, nbytes: int) -> None: ...

    def probed(self, storage: int, holders: int, counted: bool, same: bool, intact: bool, spoiled: bool) -> list[Command]: ...

    def completed(self, copy: int, ok: bool, answers: Sequence[tuple[int, bool, bool, bool, bool]]) -> list[Command]: ...

    def allocated(self, storage: int, load: int, device: int, identity: int, address: int, nbytes: int, stream: int) -> list[Command]: ...

    def allocation_failed(self, storage: int, load: int) -> list[Command]: ...

    def restore(self, ticket: int, pass_id: int, live: bool, shared: bool, stream: int) -> RestoreVerdict: ...

    def blocker(self, load: int) -> int: ...

    def wait_allocated(self, storage: int, limit_ms: int) -> bool: ...

    def end_pass(self, pass_id: int) -> list[Command]: ...

    def stats(self) -> Stats: ...

    def group_stats(self) -> list[GroupStats]: ...

    def reset_stats(self) -> None: ...

class TicketHold:
    pass

class Tickets:
    def __init__(self, engine: Engine, on_drop: object) -> None: ...

    def save(self, device: int, identity: int, address: int, nbytes: int, storage_offset: int, itemsize: int, kind: int, sizes: tuple[int, ...], strides: tuple[int, ...], version: int, epoch: int, label: int, stream: int, forced: bool, spoiled: bool) -> tuple[TicketHold | None, KeepReason, int, int, bool, bool, list[Command]]: ...

    def pop_dropped(self) -> Command | None: ...

class Copies:
    def __init__(self) -> None: ...

    @property
    def ready(self) -> bool: ...

    def all_running(self) -> list[int]: ...

    def running(self, copy: int) -> bool: ...

    def pop(self) -> tuple[int, int, list[int], BaseException | None] | None: ...

    def submit(self, executor: HostExecutor, command: Command, file: SpillFile | None, kept: object | None) -> None: ...

class HostExecutor:
    def __init__(self, threads: int, queue_depth: int, inline_bytes: int) -> None: ...

    def wait(self, copy: int, copies: Copies) -> None: ...

    def drain(self, copies: Copies) -> None: ...

    def shutdown(self) -> None: ...

    @property
    def pending(self) -> int: ...

    @property
    def running_threads(self) -> int: ...

def fix_malloc_threshold(nbytes: int) -> bool: ...

class AtEnd:
    def __init__(self, callback: object) -> None: ...

    def __call__(self) -> None: ...

def stop_destructors() -> None: ...

def keep_forever(object: object | None) -> None: ...
