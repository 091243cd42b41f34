"""The role of a host thread, by the name that its pool gives it."""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from gputop.trace.model import Trace

MAIN, EXECUTOR, INPUT, POOL = "main", "executor", "input", "pool"
NOT_NUMBERED = "other Python threads"  # one line of kineto's for threads that it does not tell apart
GRAPH_EXECUTOR = "executor of"  # and the device, in a timeline of TensorFlow 1: a line of it is no thread

# TensorFlow names its pools "tf_<pool>/<id>" (tensorflow/core/platform/threadpool.cc); those of a GPU's own
# launches are gpu_private_<n> (tensorflow/core/common_runtime/gpu/gpu_device.cc). XLA's clients call theirs
# py_xla_execute, tf_pjrt_thread_pool or tf_XLA….
GPU_PRIVATE = re.compile(r"(?:tf_)?gpu_private_\d+")
GPU_SHARED = re.compile(r"(?:tf_)?gpu_shared")
GLOBAL_POOL = re.compile(r"tf_Compute")
_ROLES = (
    (INPUT, re.compile(r"tf_data_|pt_data_worker|data_loader", re.IGNORECASE)),
    (EXECUTOR, re.compile(rf"{GPU_PRIVATE.pattern}|{GPU_SHARED.pattern}|{GLOBAL_POOL.pattern}|"
                          rf"tf_XLA|tf_pjrt|py_xla_execute|(?:tf_)?inter_op|{GRAPH_EXECUTOR} ")),
    (POOL, re.compile(rf"tf_|Host Threads/|{NOT_NUMBERED}$")),  # ROCm's calls lie on lines beside their threads
)


def role(name: str) -> str:
    """``main`` (Python and all threads outside of pools), ``executor`` (runs the graph's ops), ``input`` (tf.data)
    or ``pool`` (other workers)."""
    return next((role for role, pattern in _ROLES if pattern.match(name)), MAIN)


_ID = re.compile(r"/-?\d+$")
_KINETO = re.compile(r"thread -?\d+ \((.+)\)$")


def labels(trace: Trace, lines: Iterable[int]) -> dict[int, str]:
    """Short names for people of these lines, which are threads: those of one name and host are numbered in their order,
    in place of the system's numbers: "python 1", "tf_data 3". Of a job of several ranks with the rank: "rank 2 python".
    """
    members: dict[tuple[str, str], list[int]] = {}
    ranks = {line.rank for line in trace.lines}
    for i in lines:
        line = trace.lines[i]
        kineto = _KINETO.match(line.name)
        name = kineto[1] if kineto is not None else _ID.sub("", line.name)
        name = "tf_data" if name == "tf_data_private_threadpool" else name or "thread"
        name = f"rank {line.rank} {name}" if len(ranks) > 1 else name
        members.setdefault((line.host, name), []).append(i)
    return {i: f"{name} {number}" if len(same_name) > 1 else name
            for (_, name), same_name in members.items() for number, i in enumerate(same_name, 1)}


def lines_of(trace: Trace, *roles: str) -> npt.NDArray[np.bool_]:
    """Mask of the trace's lines that are host threads with one of these roles."""
    return np.array([line.gpu < 0 and role(line.name) in roles for line in trace.lines], bool)


def busiest_line(trace: Trace, line: npt.NDArray) -> int:
    """The line that most of these events are on; of several the first by host and name."""
    kinds, counts = np.unique(line, return_counts=True)
    return min(kinds[counts == counts.max()].tolist(), key=lambda i: (trace.lines[i].host, trace.lines[i].name))
