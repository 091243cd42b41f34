"""The inputs that records of trace rules name under ``needs``, and what an abstention says where one is missing."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from gputop.advice.trace.facts import HOST_EVENTS, TORCH_HOST, TraceFacts
from gputop.analysis.results import AllocatorUse

_GPU_ACTIVITY = "data on GPU activity"
GPU_ALLOCATOR = re.compile(r"GPU_(\d{1,4})_bfc$", re.IGNORECASE)
_ALLOCATOR_RECORDS = ("data on the GPU allocators (GPU_<n>_bfc: in use, available), which only TensorFlow and JAX "
                      "captures contain")
_TORCH_MEMORY = ("data on the GPU memory in use, which this trace does not show, but "
                 "torch.cuda.max_memory_reserved() does")


def gpu_allocators(facts: TraceFacts, gpus: set[int]) -> dict[int, AllocatorUse]:
    """The allocators of these GPUs that tell their capacity."""
    used = {}
    for use in facts.analysis.memory:
        match = GPU_ALLOCATOR.match(use.allocator)
        if match and int(match[1]) in gpus and use.capacity_bytes > 0:
            used[int(match[1])] = use
    return used


def all_allocators(facts: TraceFacts) -> tuple[AllocatorUse, ...] | None:
    """The allocators of all GPUs that ran kernels; None where the memory in use of one is not known."""
    numbers = set(facts.active_numbers)
    used = {gpu: use for gpu, use in gpu_allocators(facts, numbers).items() if use.peak_bytes > 0}
    return tuple(used.values()) if numbers and set(used) == numbers else None


def _batch_waits(facts: TraceFacts) -> str | None:
    if facts.analysis.input is not None:
        return None
    return "data on the training loop's calls for a batch " + (
        f"(enumerate(DataLoader)){TORCH_HOST}"
        if facts.framework == "pytorch" else f"(tf.data's IteratorGetNext){HOST_EVENTS}")


def launch_calls(facts: TraceFacts) -> str | None:
    if any(gpu.idle_host_fault is not None for gpu in facts.active) or min(gpu.busy for gpu in facts.active) >= 1:
        return None
    return "data on the host calls that launched the kernels (correlation IDs); capture with host tracing enabled"


def _allocators(facts: TraceFacts) -> str | None:
    if gpu_allocators(facts, {gpu.gpu for gpu in facts.analysis.gpus}):
        return None
    return _TORCH_MEMORY if facts.framework == "pytorch" else _ALLOCATOR_RECORDS


def _step_calls(facts: TraceFacts) -> str | None:
    if facts.host is not None and facts.host.gap_s is not None:
        return None
    return "data on the host's calls to the step function and, with a GPU, on the work that these calls launched" + (
        TORCH_HOST if facts.framework == "pytorch" else
        "; TensorFlow and JAX record them at host_tracer_level 2, which gputop uses for captures")


def _eager_ops(facts: TraceFacts) -> str | None:
    ops = facts.analysis.ops
    # JAX's calls of ops are always recorded where calls of functions are, PyTorch's ops where anything of its host is.
    if facts.framework in ("jax", "pytorch"):
        return None
    return None if ops is not None and facts.host is not None and ops.eager_share is not None else (
        "eager ops and tf.function calls (EagerExecute); capture with host_tracer_level 2, as gputop does")


# By the name of an input: what is missing of it, None where nothing is.
MISSING: Mapping[str, Callable[[TraceFacts], str | None]] = {
    "gpu_activity": lambda facts: None if facts.active and facts.shares else _GPU_ACTIVITY,
    "busy_gpus": lambda facts: None if facts.shares and any(gpu.busy for gpu in facts.analysis.gpus) else (
        _GPU_ACTIVITY),
    "batch_waits": _batch_waits,
    "gpu_idle_time": lambda facts: None if facts.shares else (
        "data on GPU activity to see whether GPUs are idle while the loop waits for a batch; `gputop doctor` checks "
        "the permission to profile"),
    "launch_calls": launch_calls,
    "allocators": _allocators,
    "step_calls": _step_calls,
    "launch_threads": lambda facts: None if facts.framework == "pytorch" or (  # whose launches are calls on its threads
        facts.analysis.launch_threads is not None and facts.host is not None) else (
        f"data on the host threads and their launches{HOST_EVENTS}"),
    "eager_ops": _eager_ops,
    "xla_events": lambda facts: None if facts.framework == "tensorflow" and (
        facts.analysis.functions is not None or facts.analysis.ops is not None) else (
        f"TensorFlow functions or ops on the host, which show whether XLA compiled them{HOST_EVENTS}"),
}
