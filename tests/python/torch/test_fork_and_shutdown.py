"""Forked children neither hang nor write; interpreters end cleanly with tickets alive and copies in flight."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest
from programs import PRELUDE, run

BIG = """
import gc, hashlib, os, sys, threading
from ebbtide import process

def big_model():
    torch.manual_seed(7)
    return torch.nn.Sequential(*(Block(256) for _ in range(4)))

model, x = big_model(), make_input(rows=1024, width=256)
directory = sys.argv[1]
tide = offload(model, to=directory, in_flight_bytes=1 << 40)

def forward():
    with tide:
        return model(x).square().mean()
"""

CHILD = """
def refused(place, call):
    try:
        call()
    except UsageError as error:
        text = str(error)
        assert f"[{place}]" in text and str(os.getpid()) in text and "'spawn'" in text, text
    else:
        raise AssertionError(f"{place} went through in the child")

def check_everything_is_refused():
    refused("unpack", loss.backward)
    refused("offload", tide.__enter__)
    refused("stats", tide.stats)
    refused("stats", tide.metrics)
    refused("stats", tide.report)
    refused("reset_stats", tide.reset_stats)
    refused("synchronize", tide.synchronize)
    refused("trim", ebb.trim)
    refused("spill_file", lambda: ebb.offload(to=directory))
    refused("host_pool", lambda: ebb.offload(to="host"))

def in_child(function):
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        function()
        sys.exit(0)  # with the whole shutdown of an interpreter
    _, status = os.waitpid(child, 0)
    assert status == 0, status
"""


def test_everything_is_refused_in_a_child(tmp_path: Path) -> None:
    program = """
    expected = step(model, x)
    model.zero_grad()
    loss = forward()
    in_child(check_everything_is_refused)
    loss.backward()
    assert_same_bits([loss.detach(), *gradients(model)], expected)
    assert_loaded(tide)
    del loss
    assert_at_rest(tide)
    assert_step_equal(tide, model, x)
    print("equal")
    """
    assert run(BIG + CHILD + dedent(program), str(tmp_path)) == "equal\n"


def test_child_forked_inside_the_context_with_copies_in_flight(tmp_path: Path) -> None:
    program = """
    expected = step(model, x)

    def child():
        refused("pack", lambda: model(x))
        global loss, hidden, side
        loss = hidden = side = None
        gc.collect()
        # and the exit leaves the context

    in_flight = 0
    large = torch.zeros(16 << 20, requires_grad=True)
    for _ in range(3):
        model.zero_grad()
        with tide:
            side = large.exp().sum()  # takes the worker longer than a fork
            hidden = model[:-1](x)
            in_flight += process.executor().pending
            in_child(child)
            loss = model[-1](hidden).square().mean()
        (loss + 0 * side).backward()
        assert_same_bits([loss.detach(), *gradients(model)], expected)
    assert in_flight > 0
    assert_loaded(tide)
    del loss, hidden, side
    assert_at_rest(tide)
    print("equal")
    """
    assert run(BIG + CHILD + dedent(program), str(tmp_path)) == "equal\n"


def test_child_does_not_write_the_spill_file(tmp_path: Path) -> None:
    program = """
    descriptor = process.spill_file(directory, False).descriptor

    def state():
        info = os.fstat(descriptor)
        content = os.pread(descriptor, info.st_size, 0)
        return info.st_size, info.st_mtime_ns, hashlib.sha256(content).hexdigest()

    loss = forward()
    tide.synchronize()
    before = state()
    assert before[0] > 1 << 20

    def child():
        refused("offload", forward)
        global loss
        refused("unpack", loss.backward)
        loss = None
        gc.collect()

    in_child(child)
    assert state() == before

    # Where each copy is waited for: what stays parked until the context is left must be left to the parent.
    tide = offload(model, to=directory)
    tide.__enter__()
    held = [x.requires_grad_().exp().sin()]
    parked = held[0].grad_fn.next_functions[0][0]._saved_result
    before = state()

    def leave():
        global parked
        parked = None
        tide.__exit__(None, None, None)

    in_child(leave)
    assert state() == before
    parked = None
    tide.__exit__(None, None, None)
    assert tide.stats().d2h_copies == 1 and state() != before
    print("unchanged")
    """
    assert run(BIG + CHILD + dedent(program), str(tmp_path)) == "unchanged\n"


DATA = """
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __init__(self, differentiate=False):
        self.differentiate = differentiate

    def __len__(self):
        return 8

    def __getitem__(self, index):
        gc.collect()  # destructors of the parent's tickets run in the worker
        if self.differentiate:
            torch.ones(1 << 16, requires_grad=True).exp()
        return make_input(rows=1, seed=index)[0]
"""


@pytest.mark.parametrize("persistent", [False, True])
def test_data_loader_workers(persistent: bool, tmp_path: Path) -> None:
    program = f"""
    model = make_model()
    tide = offload(model, to=directory)
    batches = [batch.clone() for batch in DataLoader(Rows(), batch_size=4)]
    expected = [step(model, batch) for batch in batches]
    loader = DataLoader(Rows(), 4, num_workers=2, persistent_workers={persistent})
    for _ in range(2):
        found = []
        with tide:  # workers are forked inside the context
            for batch in loader:
                model.zero_grad()
                loss = model(batch).square().mean()
                loss.backward()
                found.append([loss.detach(), *gradients(model)])
        for one, other in zip(found, expected, strict=True):
            assert_same_bits(one, other)
    with tide:
        held = model(make_input())  # tickets alive while workers come and go
    for batch, other in zip(loader, expected, strict=True):
        assert_same_bits(step(model, batch, tide), other)
    del loss, held
    assert_loaded(tide)
    assert_at_rest(tide)
    print("equal")
    """
    assert run(BIG + DATA + dedent(program), str(tmp_path)) == "equal\n"


def test_data_loader_worker_that_saves_is_told(tmp_path: Path) -> None:
    program = """
    with tide:
        loader = DataLoader(Rows(differentiate=True), 4, num_workers=1)
        try:
            next(iter(loader))
        except UsageError as error:
            print("forked" if "was forked from one that had used Ebbtide" in str(error) else error)
    """
    assert run(BIG + DATA + dedent(program), str(tmp_path)) == "forked\n"


def test_child_of_a_process_that_used_nothing_may_use_all(tmp_path: Path) -> None:
    program = """
    import os, sys
    model, x = make_model(), make_input()
    child = os.fork()
    tide = offload(model, to=sys.argv[1])
    for _ in range(3):
        assert_step_equal(tide, model, x)
    if child == 0:
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    print("both")
    """
    assert run(program, str(tmp_path)) == "both\n"


ENDINGS = {
    "tickets alive": "loss = forward(); tide.synchronize()",
    "copies in flight": "loss = forward()",
    "inside the context": "tide.__enter__(); loss = model(x)",
    "restored storages alive": """
loss = forward(); kept = []
loss.register_hook(lambda grad: kept.append(grad)); loss.backward(retain_graph=True)""",
    "in a reference cycle": "loss = forward(); tide.me = tide; cycle = [loss, tide]; cycle.append(cycle)",
    "dropped at exit by a module": "import types; sys.modules['odd'] = m = types.ModuleType('odd'); "
    "m.loss = forward(); m.tide = tide",
    "host tier": "host = offload(model, to='host', in_flight_bytes=1 << 40)\n"
    "with host: loss = model(x)",
    "a thread that ends later": """
def train():
    for _ in range(3): forward().backward()
threading.Thread(target=train).start()""",
    "a daemon thread that holds a graph": """
ready = threading.Event()
def hold():
    loss = forward()
    ready.set()
    threading.Event().wait()
threading.Thread(target=hold, daemon=True).start()
ready.wait()""",
    "trimmed": "loss = forward(); ebb.trim()",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_interpreter_ends(ending: str, tmp_path: Path) -> None:
    assert run(BIG + ENDINGS[ending] + "\nprint('end')", str(tmp_path)) == "end\n"


def test_interpreter_ends_by_an_exception_with_everything_alive(tmp_path: Path) -> None:
    program = """
    import subprocess
    code = sys.argv[2]
    done = subprocess.run([sys.executable, "-c", code, directory], capture_output=True, text=True)
    assert done.returncode == 1, (done.returncode, done.stderr)
    assert done.stderr.splitlines()[-1] == "ValueError: mine", done.stderr
    assert done.stderr.count("Error") == 1 and "Exception ignored" not in done.stderr, done.stderr
    print("one error")
    """
    failing = PRELUDE + BIG + "tide.__enter__(); loss = model(x)\nraise ValueError('mine')"
    assert run(BIG + dedent(program), str(tmp_path), failing) == "one error\n"


def test_calls_after_the_end_are_refused(tmp_path: Path) -> None:
    """An exit handler registered before ours runs after it."""
    program = """
    import atexit, sys

    def late():
        for call in (loss.backward, tide.stats, tide.__enter__):
            try:
                call()
            except UsageError as error:
                print(error)

    atexit.register(late)
    import torch
    torch.set_num_threads(1)
    from support import *
    from torch_support import *
    from training import *
    from ebbtide import UsageError
    tide = offload(to=sys.argv[1])
    with tide:
        loss = make_input().requires_grad_().exp().sin().sum()
    """
    lines = run(program, str(tmp_path), prelude="").splitlines()
    places = ("unpack", "stats", "offload")
    assert lines == [f"[{place}] the interpreter is shutting down" for place in places]
