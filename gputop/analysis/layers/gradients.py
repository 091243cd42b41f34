"""Gradients that a collective of PyTorch's DistributedDataParallel reduces.

Its reducer puts each gradient into a bucket as soon as autograd has accumulated it, and the gradient that fills a
bucket launches the bucket's AllReduce, within its own AccumulateGrad (PyTorch, ``torch/csrc/distributed/c10d/
reducer.cpp``). So a bucket holds gradients that were accumulated on that thread since the bucket before. Where the
profiler recorded shapes, their sizes must add up to the collective's: of several models beside each other one may
reduce while another's bucket is not full.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct

from gputop.trace.lookups import Mask, host_stat, name_mask
from gputop.trace.model import I64, Kind, Trace

_ACCUMULATE = r"(?:autograd::engine::evaluate_function: )?torch::autograd::AccumulateGrad$"
# Between the function that computes a parameter's gradient and its AccumulateGrad: they only reshape or convert it.
_PASSES_ON = (
    r"(?:.*: )?(?:T|Transpose\w*|Permute|View|Reshape\w*|UnsafeView|ToCopy|Expand|Squeeze|Unsqueeze)Backward\d*$")
_MAX_PARTS = 3  # of the model, or kinds of functions, that a name lists


class Bucket(Struct, frozen=True):
    """Gradients that ``events``, rows of the device, reduce. ``number`` counts the buckets of a backward pass from 1
    on, 0: not known, as the trace begins within the pass; ``functions`` has for each gradient the host's row of the
    function of autograd that computed it, in order of time."""

    events: I64
    number: int
    functions: list[int]


def gradient_buckets(trace: Trace, functions: Mask) -> Iterator[Bucket]:
    """The buckets of each thread in order of time. ``functions``: which names are functions of autograd, as
    :func:`name_mask`. Collectives whose gradients the trace does not tell are in none."""
    host, device = trace.host, trace.device
    rows = np.flatnonzero(functions.take(host.name))
    accumulate = (name_mask(trace, _ACCUMULATE) & functions)[host.name]
    reduced = np.flatnonzero((device.kind == Kind.COLLECTIVE) & (device.launch_ns >= 0))
    for line in np.unique(device.launch_line[reduced]).tolist():
        functions_of_line = rows[host.line[rows] == line]
        if accumulate[functions_of_line].any():
            yield from _of_thread(trace, functions_of_line, accumulate, reduced[device.launch_line[reduced] == line])


def _of_thread(trace: Trace, functions: I64, accumulate: Mask, reduced: I64) -> Iterator[Bucket]:
    """The buckets of one thread. ``functions``: rows of its functions, ``accumulate``: which of the host's events
    accumulate, ``reduced``: rows of the collectives that it launched."""
    host = trace.host
    numbered, numbers = host_stat(host, "sequence")
    at_number = np.searchsorted(numbered, functions)
    has_number = np.append(numbered, -1)[at_number] == functions
    sequence = np.where(has_number, np.append(numbers, -1)[at_number], -1).tolist()
    sized, elements = host_stat(host, "elements")
    here = host.line[sized] == host.line[functions[0]]
    sized, elements = sized[here], elements[here]
    is_gradient = name_mask(trace, _ACCUMULATE)[host.name[sized]]
    launch = trace.device.launch_ns[reduced]
    by_launch = np.argsort(launch, kind="stable")
    times = host.start_ns[functions], host.end_ns[functions]
    # Of each function its begin and end, and from where to where the sizes and the launches within it stand.
    within = np.array([*times, *np.searchsorted(host.start_ns[sized], times),
                       *np.searchsorted(launch[by_launch], times)]).T.tolist()
    pending: list[tuple[int, int]] = []  # since the bucket before: the gradient's function, and its elements or -1
    source, until, current, number, whole = -1, -1, -1, 0, False
    for row, now, accumulates, passes_on, (begin, end, first, last, first_launch, last_launch) in zip(
            functions.tolist(), sequence, accumulate[functions].tolist(),
            name_mask(trace, _PASSES_ON, ("backward",))[host.name[functions]].tolist(), within, strict=True):
        if begin >= until:
            until = end
            if now > current:  # in a backward pass they fall, from op to op back
                pending, number, source = [], 0, -1
                whole = bool((numbers[:np.searchsorted(numbered, row)] == now).any())  # else the trace begins within it
            current = now if now >= 0 else current
        if not accumulates:
            source = source if passes_on else row
            continue
        of_gradient = elements[first:last][is_gradient[first:last]]
        pending.append((source, int(of_gradient[0]) if len(of_gradient) else -1))
        events = reduced[np.sort(by_launch[first_launch:last_launch])]
        if len(events):
            number += 1
            of_message = elements[first:last][~is_gradient[first:last]]
            message = int(of_message.sum()) if len(of_message) else -1
            held = _held([size for _, size in pending], message, len(pending) if whole else 0)
            bucket, pending = pending[len(pending) - held:], pending[:len(pending) - held]
            if held and all(function >= 0 for function, _ in bucket):
                yield Bucket(events, number if whole else 0, [function for function, _ in bucket])


def _held(sizes: Sequence[int], message: int, otherwise: int) -> int:
    """Number of the last gradients that a message of so many elements holds; ``otherwise`` where a size is not told
    (-1), 0 where they do not add up."""
    if message < 0 or min(sizes) < 0:
        return otherwise
    sums = np.cumsum(sizes[::-1])
    matches = np.flatnonzero(sums == message)
    return int(matches[0]) + 1 if len(matches) else 0


def bucket_name(number: int, paths: Sequence[tuple[str, ...]]) -> str:
    """``paths``: of each gradient's function, in order of time: the modules around its op and its name."""
    layers = list(dict.fromkeys(path[:-1] for path in reversed(paths)))
    if all(layers):
        shared = 0
        while all(len(path) > shared and path[shared] == layers[0][shared] for path in layers):
            shared += 1
        parts = list(dict.fromkeys(path[shared] for path in layers if len(path) > shared))
        about = "in " + (_listed(parts) if parts else "/".join(layers[0][-2:]))
    else:
        functions = Counter(path[-1] for path in paths)
        about = "of " + _listed([f"{count} {name}" for name, count in functions.most_common()])
    return (f"bucket {number}: " if number else "") + f"gradients {about}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= _MAX_PARTS else f"{names[0]} … {names[-1]} ({len(names)} parts)"
