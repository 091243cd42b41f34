"""Command lines with which Nsight Compute (``ncu``) finds the one launch of a kernel that is worth a look.

``ncu`` runs the job anew, counts the launches whose function name fits, skips some and profiles the next. The function
name is what is left of a C++ name without return type, namespaces, template arguments and parameters; a pattern fits
where it is found anywhere in it. Launches of all GPUs of a process count. (Nsight Compute CLI: --kernel-name,
--kernel-name-base, --launch-skip.)
"""

from __future__ import annotations

import re
import shlex
from functools import cache

import numpy as np
from msgspec.structs import replace

from gputop.analysis.results import KernelRow, Kernels
from gputop.analysis.steps.model import Steps
from gputop.trace.lookups import alphabetical, detect_framework, name_mask, numbered
from gputop.trace.model import I64, Kind, Trace

# Of the job's first steps, in which it compiles, tries algorithms and fills its caches. gputop's own figure.
_WARM_UP_STEPS = 10
_WARM_UP_LAUNCHES = 10  # where no steps are known
_MAX_KERNELS = 16  # those of less time are not worth a look
_ENOUGH_STEPS = 32  # tell which launch of a step is the longest: all of a trace of two million events take 0.6 s
_REPORT = "gputop-kernel"  # the file of ncu's report, to which it adds .ncu-rep
_PLAIN = re.compile(r"[\w@%+=:,./-]+(?: [\w@%+=:,./-]+)*", re.ASCII)  # a shell takes it as it stands, nothing is hidden
_SPECIAL = re.compile(r"([.^$*+?()\[\]{}|\\])")
_CUT = re.compile(r"[<(\[]")
_MANGLED = "_Z"
_FUNCTION = re.compile(r"[\w$.]+$")


def function_name(kernel: str) -> str:
    """Name by which ``ncu`` knows a kernel: that of its function, or its mangled name; empty where it cannot be
    told."""
    match = _FUNCTION.search(_CUT.split(kernel.replace("(anonymous namespace)::", ""), maxsplit=1)[0])
    return match[0] if match else ""


def with_ncu(kernels: Kernels | None, trace: Trace, steps: Steps | None) -> Kernels | None:
    """The table with a command line of ``ncu`` for the compute kernels that take most time."""
    # Nsight Compute knows no GPUs of AMD. XSpaces tell no number of SMs of them; other files may tell nothing of their
    # GPUs, but have calls of HIP and kernels of Tensile and MIOpen.
    if kernels is None or any(gpu.compute_capability is not None and gpu.sms is None for gpu in trace.gpus) or (
            name_mask(trace, r"hip[A-Z]\w*(?:Launch|Mem)|Cijk_A|[Mm][Ii][Oo]pen|__amd_rocclr_").any()):
        return kernels
    device = trace.device
    launched, counts = np.where(device.launch_ns >= 0, device.launch_ns, device.start_ns), device.kind == Kind.COMPUTE
    edges = steps.edges_ns[:_ENOUGH_STEPS] if steps is not None and steps.count else None
    if edges is not None:
        counts &= (launched >= edges[0, 0]) & (launched < edges[-1, 1])
    rows = np.flatnonzero(counts)
    launched = launched[rows]
    used, name_of = numbered(device.name[rows])
    names = [trace.names[i] if i >= 0 else "" for i in used.tolist()]
    functions = [function_name(name) for name in names]
    codes = {function: i for i, function in enumerate(dict.fromkeys(functions))}
    code_of = np.array([codes[function] for function in functions], np.int64)
    index_of = {name: i for i, name in enumerate(names)}
    # The launches of a function one after the other; those of one instant not in the order of the file.
    order = np.lexsort((alphabetical(names, name_of), device.end_ns[rows], device.start_ns[rows], launched,
                        code_of[name_of]))
    ends = np.cumsum(np.bincount(code_of, weights=np.bincount(name_of, minlength=len(names))).astype(np.int64))
    processes = [(gpu.host, gpu.rank) for gpu in trace.gpus]
    process = np.array([processes.index(key) for key in processes], np.int64)  # of each GPU
    job = _command(trace)

    @cache
    def fits(code: int) -> tuple[I64, I64, I64, I64]:
        """Launches of a function: start, name, length and process of each."""
        fitting = order[ends[code - 1] if code else 0:ends[code]]
        event = rows[fitting]
        return (launched[fitting], name_of[fitting], device.end_ns[event] - device.start_ns[event],
                process[device.gpu[event]])

    def line(row: KernelRow) -> str:
        index = index_of.get(row.name, -1)
        if index < 0 or row.collective or not functions[index]:
            return ""
        when, name, length, of = fits(int(code_of[index]))
        length = np.where(name == index, length, 0)
        if process.any():  # there are several
            here = np.flatnonzero(of == np.bincount(of, weights=length).argmax())
            when, length = when[here], length[here]
        return _line(functions[index], _skipped(when, length, edges), job)

    worth = [row.name for row in kernels.by_name if not row.collective][:_MAX_KERNELS]
    return replace(kernels, by_name=tuple(
        replace(row, ncu=line(row)) if row.name in worth else row for row in kernels.by_name))


def _command(trace: Trace) -> str:
    if _PLAIN.fullmatch(trace.job):
        return trace.job
    return "./program" if detect_framework(trace) == "unknown" else "python train.py"


def _skipped(launched_ns: I64, length_ns: I64, edges_ns: I64 | None) -> int:
    """Number of launches to skip from the job's start, so that the longest one of a step after the warm-up comes next.
    ``edges_ns``: when the steps begin and end, where they are known. A start that launches the kernel more often, to
    try algorithms, makes it another launch of the same kernel."""
    if edges_ns is None:
        return min(_WARM_UP_LAUNCHES, len(launched_ns) - 1)
    edges = np.searchsorted(launched_ns, edges_ns)
    counts = edges[:, 1] - edges[:, 0]
    usual = int(np.bincount(counts).argmax())
    whole = edges[counts == usual, 0]
    longest = 0
    if usual:
        of_step = length_ns[whole[:, None] + np.arange(usual)]
        some = np.flatnonzero(of_step.any(axis=0))  # the others are launches of the function's other kernels
        median = np.zeros(usual)
        median[some] = np.median(of_step[:, some], axis=0)
        longest = int(median.argmax())
    return _WARM_UP_STEPS * usual + longest


def _line(function: str, skip: int, job: str) -> str:
    if function.startswith(_MANGLED):
        name = f"--kernel-name-base mangled --kernel-name {shlex.quote(function)}"
    else:
        name = "--kernel-name " + shlex.quote(r"regex:\b" + _SPECIAL.sub(r"\\\1", function) + "$")
    return f"ncu --set full {name} --launch-skip {skip} --launch-count 1 -o {_REPORT} {job}"
