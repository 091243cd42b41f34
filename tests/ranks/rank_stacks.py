"""The stacks of ranks, some of which wait in a collective."""

from __future__ import annotations

from gputop.ranks.stacks import Frame, ProcessStacks, ThreadStack

TORCH = "/env/lib/python3.11/site-packages/torch/distributed/"
OUTER = Frame("<module>", "/home/ana/train.py", 200)
WAITS = (Frame("all_reduce", f"{TORCH}distributed_c10d.py", 2810), Frame("wrapper", f"{TORCH}c10d_logger.py", 81),
         Frame("step", "/home/ana/train.py", 112), OUTER)
LOADS = (Frame("load", "/home/ana/data.py", 40), OUTER)


def rank(number: int, frames: tuple[Frame, ...], command: str = "python train.py") -> ProcessStacks:
    main = ThreadStack("MainThread", True, False, frames)
    helper = ThreadStack("pin_memory", False, False, (Frame("run", f"{TORCH}pin.py", 9),))
    return ProcessStacks(100 + number, f"rank {number}", f"{command} --rank {number}", (helper, main))
