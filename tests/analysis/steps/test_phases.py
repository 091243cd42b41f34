"""Whether a function trains or evaluates, told by the ops of its own process."""

from __future__ import annotations

from gputop.analysis.steps.steps import find_steps
from tests.records import replace
from tests.trace.build import Builder


def test_what_another_rank_runs_meanwhile_says_nothing_of_a_function():
    """Of two ranks that do not run in step: one evaluates while the other trains."""
    b = Builder(gpus=0)
    for i in range(40):
        for rank, trains in ((0, i < 20), (1, i >= 20)):
            function = "__inference_multi_step_on_iterator_42" if trains else "__inference_multi_step_on_iterator_77"
            b.host("EagerExecute", i * 100 + rank, 90, line=f"python {rank}", is_func=1, eager_op=function)
            b.host("gradient_tape/model/MatMul:MatMul" if trains else "model/dense/MatMul:MatMul", i * 100 + 10 + rank,
                   50, line=f"tf_Compute {rank}")
    trace = b.build()
    trace.lines = [replace(line, rank=int(line.name.rpartition(" ")[2])) for line in trace.lines]
    steps = find_steps(trace)
    assert steps is not None and steps.times.phase == "training" and steps.other_loops.keys() == {"evaluation"}
