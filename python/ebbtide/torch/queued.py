"""What a backward that raised leaves behind in torch.

On the CPU a thread that calls backward has a queue of nodes. An exception leaves there what was not run yet, and with it
the graph and all that it saved, until the thread's next backward.
"""

from __future__ import annotations

import functools
import sys

import torch
from torch.autograd import Variable

from ebbtide import _core
from ebbtide.torch.blocks import graph_task_id
from ebbtide.torch.unobserved import unobserved


def drop_queued(task: int) -> None:
    """For the end of this graph task, also its destructor: where it raised, nothing stays in the thread's queue."""
    running = graph_task_id()
    if running == task:
        return  # it ended by itself
    if running != -1:
        # The backward around it goes on, and comes to what is queued; or raises too.
        at_end = _core.AtEnd(functools.partial(drop_queued, running))
        Variable._execution_engine.queue_callback(at_end)
    elif sys._getframe().f_back is not None:
        # Not on a device's thread: that waits for nodes, and drops these by itself.
        _run_nothing()


@unobserved
def _run_nothing() -> None:
    with torch._C.DisableTorchFunction(), torch.inference_mode(False):
        nothing = torch.empty(0, device="cpu", requires_grad=True)
        torch.autograd.grad(nothing, nothing, nothing.detach())
