"""Words for programs on GPUs that learn nothing: simulations, signal processing, and the like in CUDA, OpenACC, OpenMP,
or Julia, as Nsight records them. Their findings are the same; what to do has no batch, model, or epoch."""

from __future__ import annotations

import re
from collections.abc import Callable

from msgspec.structs import replace

from gputop.core.findings import Abstained, Finding

_PINNED = ("Copy from pinned memory (cudaHostAlloc, cudaHostRegister), and copy the next part of the data on a "
           "separate stream while the current one is being processed.")
_16_BIT = ("If the accuracy allows, let the matrix products run on tensor cores, in TF32 or 16 bits (cublasGemmEx with "
           "the compute type).")
# By finding, for an action that is one for a program that learns.
_ACTIONS = {
    "small_kernels": "Do the same work in fewer, larger kernels: fuse them, or let one kernel do the work of many. Or "
                     "record them once as a CUDA graph, and launch the graph.",
    "replica_imbalance": "Divide the work evenly among the GPUs.",
    "gpu0_oversubscribed": "Divide the work evenly among the GPUs, and give GPU 0 no work that only one GPU does.",
    "serial_gpus": "Let the GPUs work at the same time: divide the data among them, and launch on all of them before "
                   "the host waits for one.",
    "communication_exposed": "Overlap communication with computation: compute what the other GPUs need first, and "
                             "exchange it on a separate stream while the rest is being computed.",
    "collective_waiting": "Make the GPUs arrive together: divide the work evenly, and avoid work that only one process "
                          "does.",
    "copies_excessive": "Copy less: keep data on the GPU between kernels, copy only what changes, and copy it on a "
                        "separate stream while kernels run.",
    "copies_pageable": _PINNED, "default_stream": _PINNED,
    "tensor_cores_unused": _16_BIT, "sixteen_bit_unused": _16_BIT,
    "fp16_fallback": "Make the dimensions of these matrix products multiples of 8, with operands in the compute type.",
    "dims_unaligned": "Pad the dimensions of these matrix products to multiples of 16 bytes, or better of 128.",
    "double_precision": "Use 32-bit numbers, unless the computation needs 64-bit precision.",
}
_WORDS: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile(r"keep losses, metrics, and conditions on the GPU"), "keep conditions and results on the GPU"),
    (re.compile(r"Do not synchronize within the step:"),
     "Do not wait after each kernel (in OpenMP, nowait and depend on the target regions; in OpenACC, async):"),
    (re.compile(r"copy the next batch from"), "copy the next part of the data from"),
    (re.compile(r"the values of all samples together"), "all values together"),
    (re.compile(r"\b([Tt])raining (loop|steps?)\b"), r"\2"),
    (re.compile(r"; capture while the job trains"), ""),
    (re.compile(r"overlaps with training"), "overlaps with the steps"),
    (re.compile(r"use a smaller batch"), "process the data in parts"),
    (re.compile(r"Python without events(?: for ([^()]*) \(typically[^)]*\))?"),
     lambda match: f"no events for {match[1]}" if match[1] else "no events"),
    (re.compile(r"\(callbacks, logging, saving, garbage collection\)"), "(output, logging, saving)"),
    (re.compile(r"\bPython\b"), "the program"),
)
_DIMENSIONS = re.compile(r" In [a-z ]+, the dimension is [^.]*\.")
_LEARNS = re.compile(r"(?i)batch|model|layer|epoch|sample|train|optimizer|gradient|parameter|autocast|micro|vocabulary")
_OF_A_FRAMEWORK = re.compile(r"(?i)torch|tf\.|tensorflow|jax|keras|python|the model's ops")


def for_general(outcome: Finding | Abstained) -> Finding | Abstained | None:
    """The outcome in words for a program that does not learn; None where a rule only needs what frameworks record."""
    if isinstance(outcome, Abstained):
        return None if _OF_A_FRAMEWORK.search(outcome.missing) else replace(outcome, missing=_plain(outcome.missing))
    action = _ACTIONS.get(outcome.id) if _LEARNS.search(outcome.action) else None
    snippet = outcome.snippet or ""
    keeps_code = action is None and not (_LEARNS.search(snippet) or _OF_A_FRAMEWORK.search(snippet))
    return replace(
        outcome, title=_plain(outcome.title), why=_plain(_DIMENSIONS.sub("", outcome.why)),
        action=action or _plain(outcome.action), snippet=outcome.snippet if keeps_code else None,
        gain=replace(outcome.gain, how=_plain(outcome.gain.how), assumption=_plain(outcome.gain.assumption)))


def _plain(text: str) -> str:
    for pattern, words in _WORDS:
        text = pattern.sub(words, text)
    return text
