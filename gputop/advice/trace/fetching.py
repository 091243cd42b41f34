"""Copies of results to the host: the ops that ask for them, and the fix."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gputop.advice.fix_code import code
from gputop.advice.trace.facts import TraceFacts
from gputop.advice.trace.job import Job

_D2H = "Read results back less often: keep losses and metrics on the GPU and fetch them every hundred steps."
_D2H_OF_A_PROGRAM = "Read results back once, after the last kernel that changes them."
_SUMMARIES = "Write summaries and histograms every few hundred steps, because each one fetches tensors from the GPU."
_PLACED = ("Keep these ops on the GPU, or fetch their results once every many steps: an op on the host fetches its "
           "inputs from the GPU.")
# What the op is that most of the copies to the host are for, the fix, and its code in Keras and in a loop of one's own.
_FETCHING = (
    (re.compile(r"summary|histogram", re.IGNORECASE), _SUMMARIES,
     "step_gap_host", ("summary-keras3", "summary-custom")),
    (re.compile(r"py_?func|numpy_func|print|string|regex|unique|lookup|assert", re.IGNORECASE), _PLACED,
     "host_placement", ("placed", "placed")),
)


def fetching_ops(facts: TraceFacts) -> tuple[str, ...]:
    """The ops whose results are copied to the host, as far as the trace names them: those of most time first."""
    table = facts.analysis.copies
    return tuple(row.op for row in (table.by_op if table is not None else None) or () if row.direction == "d2h")[:3]


def fetch_fix(ops: Sequence[str], job: Job) -> tuple[str, str | None]:
    """Fix for copies to the host that these ops ask for, and its code."""
    for pattern, action, page, keys in _FETCHING:
        if ops and pattern.search(ops[0]):
            return action, None if job.framework != "tensorflow" else code(page, keys[0 if job.keras else 1])
    if job.framework == "unknown":
        return _D2H_OF_A_PROGRAM, None
    return _D2H, code("copies_excessive", "d2h-keras") if job.keras else code("sync_copies", f"d2h-{job.framework}")
