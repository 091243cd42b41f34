"""The parts of a training step: what each is called, what it means and how it is drawn.

An analysis divides each step into these parts (:mod:`gputop.analysis.gpu.breakdown`). Every view takes their
order, names and colors from here. This module imports nothing, so that readers of a trace can use it too.
"""

from __future__ import annotations

from msgspec import Struct


class StepPart(Struct, frozen=True):
    """One part. ``dark``, ``light`` and ``contrast`` are its color in the schemes of these names (#rrggbb)."""

    id: str  # as in the JSON of an analysis
    label: str  # in a legend
    name: str  # in a table or a sentence
    meaning: str
    letter: str  # takes the place of a full block on a terminal without colors
    dark: str
    light: str
    contrast: str  # after Okabe and Ito, "Color Universal Design" (2008), lightened for a black ground
    ansi: tuple[int, int]  # of the 16 colors of any terminal: on a dark ground, on a light one


# In the order of a step's life: the wait for input, the work, and what stands in its way.
PARTS: tuple[StepPart, ...] = (
    StepPart("input", "input wait", "input wait",
             "The training loop waits for a batch and none of its GPUs runs anything.",
             "i", "#e5955f", "#c65f1c", "#e69f00", (3, 3)),
    StepPart("h2d", "H2D", "copies to GPU",
             "The GPU copies data from the host and runs no kernel.",
             ">", "#5f8fe5", "#2f66c4", "#3f9fe0", (12, 12)),
    StepPart("compute", "compute", "compute",
             "A kernel other than a collective runs, or the GPU copies or clears its own memory.",
             "C", "#43b98c", "#1c8a61", "#14b886", (2, 2)),
    StepPart("collectives", "collectives", "exposed communication",
             "A collective or a copy between GPUs runs, and no other kernel overlaps with it.",
             "A", "#9a7fe0", "#6f4fc4", "#e08fc0", (5, 5)),
    StepPart("d2h", "D2H", "copies to host",
             "The GPU copies data to the host and runs no kernel.",
             "<", "#7fb3e8", "#5a93cf", "#8fd0ff", (6, 6)),
    StepPart("launch", "launch wait", "launch wait",
             "The GPU is idle because the host launches its next work late while busy with launches.",
             "l", "#e56b7f", "#c53a54", "#ff8a3d", (9, 9)),
    StepPart("host", "host", "host work",
             "The GPU is idle because the host launches its next work late while doing other work.",
             "h", "#d8c05a", "#a58712", "#f0e442", (11, 1)),
    StepPart("idle", "other idle", "other idle",
             "The GPU is idle for another reason: it waits for another GPU, its work is queued, or the launch is not "
             "in the trace.",
             ".", "#596275", "#9aa1ae", "#8a8a8a", (8, 8)),
)
PART_BY_ID: dict[str, StepPart] = {part.id: part for part in PARTS}
PART_IDS: tuple[str, ...] = tuple(PART_BY_ID)
# The order of a table: what the GPU does, then what it waits for.
WORK_FIRST: tuple[StepPart, ...] = tuple(
    PART_BY_ID[id_] for id_ in ("compute", "collectives", "h2d", "d2h", "input", "launch", "host", "idle"))

# The steps of the limit ladder below the parts above: what compute is made of. By id: name and meaning.
COMPUTE_STEPS: dict[str, tuple[str, str]] = {
    "unknown": ("work not known", "Compute whose FLOPs and bytes are unknown, or on a GPU without a known peak."),
    "kernels": ("above the roofline",
                "Kernel time beyond the minimum for their FLOPs at peak rate or their bytes at memory bandwidth, "
                "whichever is longer."),
    "types": ("number types", "Time that 16-bit matmuls on this GPU's matrix units would save."),
    "limit": ("the work at the limit", "The same work at this GPU's peak rate or memory bandwidth."),
}


def limit_step(id_: str) -> tuple[str, str]:
    """Name and meaning of a step of the limit ladder."""
    part = PART_BY_ID.get(id_)
    return (part.name, part.meaning) if part is not None else COMPUTE_STEPS.get(id_, (id_, ""))


# What the critical path of a step is made of. By id: name and meaning.
PATH_KINDS: dict[str, tuple[str, str]] = {
    "input": ("input wait", "The input pipeline makes the batch that the training loop waits for, counted from the "
                            "previous batch."),
    "host": ("host work", "Python and ops on the host threads that launch GPU work."),
    "launch": ("launches", "Launch calls, and the time from a launch to the start of its work."),
    "kernel": ("kernels", "A kernel other than a collective runs."),
    "copy": ("copies", "A copy runs, or memory is cleared."),
    "collective": ("collectives", "A collective moves data after the last GPU has arrived."),
    "sync": ("sync", "A call that waited for a GPU returns after the GPU's work has ended."),
    "idle": ("idle", "Pauses within a stream, and starts that nothing in the trace explains."),
}


def path_kind(id_: str) -> tuple[str, str]:
    """Name and meaning of a kind of time on the critical path."""
    return PATH_KINDS.get(id_, (id_, ""))

# The parts of a recording. By id: name and meaning.
WALL_PARTS: dict[str, tuple[str, str]] = {
    "steps": ("whole steps", "Whole steps, each lasting until the next step, another loop, or the end of the loop."),
    "periods": ("repeated sequence", "A repeated sequence of kernels or ops, either the step or a layer of the model. "
                                     "The trace does not show which."),
    "evaluation": ("evaluation", "The evaluation (validation) loop, from its first call to the end of its last call."),
    "prediction": ("prediction", "The prediction loop, from its first call to the end of its last call."),
    "prefill": ("prefill", "Steps of a model server that read prompts, or read some prompts and decode others."),
    "decode": ("decode", "Steps of a model server that add one token to each request."),
    "iterations": ("other iterations", "A loop of calls other than the step loop."),
    "between": ("between steps", "Host activity between two steps or loops while no GPU works."),
    "gpu_work": ("GPU work", "GPU work that belongs to no known step."),
    "start": ("start", "Tracing, compilation, loading of libraries, autotuning, and the steps that include this work."),
    "end": ("end", "The time after the last GPU work, in which the program unloads modules and frees resources."),
    "open": ("unfinished step", "A step or wait at the start or end of the recording that is longer than a typical "
                                "step and was recorded only in part."),
    "profiler": ("profiler", "The profiler starts or stops recording, or TensorBoard writes a graph. Both are rare."),
    "edges": ("incomplete steps", "Steps before the first and after the last whole step, recorded only in part."),
    "no_steps": ("time without steps", "Host activity while no GPU works, in a trace that shows no step starts."),
    "unrecorded": ("not recorded", "Time in which nothing was recorded, between two recordings or after the profiler's "
                                   "buffers were full."),
}
# Causes for which the host keeps GPUs waiting (gputop.analysis.host.host_causes).
IDLE_CAUSES: dict[str, str] = {
    "input": "input wait",
    "tracing": "a function is traced or compiled",
    "eager": "Python runs ops one by one",
    "placement": "an op runs on the host",
    "gap": "Python runs outside the model's calls",
    "dispatch": "the next launch is late",
}
# What the host did in one of them. By kind: its name.
HOST_KINDS: dict[str, str] = {
    "checkpoint": "saving checkpoints",
    "summary": "writing summaries",
    "iterator": "creating a new dataset iterator",
    "freeing": "freeing tensors and iterators",
    "datasets": "creating and freeing datasets and their iterators",
    "compilation": "tracing or compiling a function",
    "session": "other calls of session.run",
    "garbage": "garbage collection",
    "files": "reading or writing files",
    "profiler": "the profiler itself",
    "input": "waiting for a batch",
    "workers": "the DataLoader starting its workers",
    "line": "Python",
    "op": "host ops",
    "python": "Python without events",
    "sampled": "number estimated from Python stacks",
    "silent": "host without events",
    "managed": "reading managed memory from the GPU",
    "unknown": "host not recorded",
}
