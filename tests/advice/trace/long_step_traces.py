"""Traces of a job some of whose steps are longer than the others."""

from __future__ import annotations

from tests.advice.trace.traces import KERNEL
from tests.trace.build import Builder

STEP, COUNT = 10_000.0, 30


def job(long: dict[int, float], name: str = "", *, count: int = COUNT, input_wait: bool = False,
        kernel: bool = False) -> Builder:
    """Steps of 10 ms; those in ``long`` take so many µs more: between two calls of the step (``name`` runs there),
    waiting for a batch, or in a longer kernel."""
    b, begin = Builder(), 0.0
    for i in range(count + 1):
        more = long.get(i, 0.0)
        wait = more if input_wait else 0.0
        work = 9_000 + (more if kernel else 0.0)
        b.host("EagerExecute", begin, wait + work + 100, is_func=1, eager_op="__inference_multi_step_on_iterator_42")
        b.host("IteratorGetNextOp::DoCompute", begin + 5, 10 + wait, line="tf_data_iterator_get_next/1")
        b.run(0, begin + wait + 60, work, "long_matmul" if kernel and more else KERNEL, launch=begin + wait + 50)
        if more and name:
            b.host(name, begin + 9_200, more, eager_op=name, is_func=0)
        begin += STEP + more
    return b
