"""The role of a host thread, by the name that its pool gives it."""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

from gputop.trace.model import Trace

MAIN, EXECUTOR, INPUT, POOL = "main", "executor", "input", "pool"

# TensorFlow names its pools "tf_<pool>/<id>" (tensorflow/core/platform/threadpool.cc); those of a GPU's own
# launches are gpu_private_<n> (tensorflow/core/common_runtime/gpu/gpu_device.cc). XLA's clients call theirs
# py_xla_execute, tf_pjrt_thread_pool or tf_XLA….
GPU_PRIVATE = re.compile(r"(?:tf_)?gpu_private_\d+")
GPU_SHARED = re.compile(r"(?:tf_)?gpu_shared")
GLOBAL_POOL = re.compile(r"tf_Compute")
_ROLES = (
    (INPUT, re.compile(r"tf_data_|pt_data_worker|data_loader", re.IGNORECASE)),
    (EXECUTOR, re.compile(rf"{GPU_PRIVATE.pattern}|{GPU_SHARED.pattern}|{GLOBAL_POOL.pattern}|"
                          r"tf_XLA|tf_pjrt|py_xla_execute|(?:tf_)?inter_op")),
    (POOL, re.compile(r"tf_")),
)


def role(name: str) -> str:
    """``main`` (Python and all threads outside of pools), ``executor`` (runs the graph's ops), ``input`` (tf.data)
    or ``pool`` (other workers)."""
    return next((role for role, pattern in _ROLES if pattern.match(name)), MAIN)


def lines_of(trace: Trace, *roles: str) -> npt.NDArray[np.bool_]:
    """Which of the trace's lines are host threads with one of these roles."""
    return np.array([line.gpu < 0 and role(line.name) in roles for line in trace.lines], bool)
