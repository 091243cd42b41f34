"""Events and stats of a trace by name, and the framework that made it."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from gputop.trace.intervals import Spans, in_order, joined, subtract, union
from gputop.trace.model import I64, DeviceEvents, HostEvents, Kind, MemoryKind, Trace, once
from gputop.trace.threads import GRAPH_EXECUTOR

Mask = npt.NDArray[np.bool_]
Pattern = str | Callable[[str], object]  # of names: an expression, or a function that says which fit
_SORTED_BELOW, _TABLE_BELOW = 1000, 1 << 20  # rows, and ids: a table for more is larger than what it spares
FEW_LINES = 32  # lines that are quicker picked out of a column one by one than by sorting it

# XLA's compilers on CPUs and GPUs (there the passes over the graph), their annotations in Nsight, PjRt clients (JAX).
COMPILE = (r"(?:Cpu|Gpu|NVPTX|AMDGPU)\w*Compiler::|HLO Transforms:|(?:TSL:)?XlaCompil\w*:|PjRt\w*::Compile|"
           r"backend_compile|(?:Jit|Fusion)Compiler::Compile")
# Functions of Python, as PyTorch's profiler and TensorFlow's and JAX's write them.
PYTHON_FUNCTION = r".*\.pyx?(?:\(\d+\): |:\d+ )|<built-in |nn\.Module: "
# Kernels and ops of optimizers in TensorFlow (ResourceApplyAdam), JAX (optax' scopes) and PyTorch
# (multi_tensor_apply_kernel, which its fused and foreach optimizers run; torch._foreach_copy_ runs it to copy, and on
# whole numbers it counts). Python's functions are no proof: a server of models calls "apply" and the like.
_OPTIMIZER = (rf"(?!{PYTHON_FUNCTION})"
              r"(?i:.*(?:multi_tensor_apply(?!.*(?:copy_?functor|\b(?:copy|identity)<))"
              r"(?!.*functor<(?:unsigned )?(?:long|int|short|char|bool)\b)|adam|adagrad|rm_?sprop|momentum|lamb_|"
              r"\blars|\bsgd|resourceapply|apply_?gradient|optax))")
_OPTIMIZER_WORDS = ("multi_tensor_apply", "adam", "adagrad", "rmsprop", "rm_sprop", "momentum", "lamb_", "lars", "sgd",
                    "resourceapply", "applygradient", "apply_gradient", "optax")
_GPU_MEMORY = r"rank \d+: memory of GPU|GPU_\d+_bfc"  # allocators
TORCH_HOST_MEMORY = "PyTorch host memory"  # in the name of an allocator, behind the rank
# The last two are of Apple's. An LSTM also asks on a CPU whether cuDNN would take its tensors.
_GPU_OPS = r"aten::(?:_?cudnn_(?!is_acceptable)|miopen_|linear_backward|_?mps_)"
LAUNCH_CALLS = r"(?:cuda|cu|hip)(?:Graph)?Launch(?!HostFunc)"


def name_mask(trace: Trace, pattern: Pattern, words: tuple[str, ...] = (), *, on_host: bool = False) -> Mask:
    """Mask of ``trace.names`` that the pattern matches at their beginning; index -1 (no name) gives False. Read-only:
    many analyses ask for the same.

    ``words``: in lower case; one of them is in each such name, whatever its letters' case. They are searched for first:
    a pattern that ignores case, or begins with any text, takes twenty times as long. ``on_host``: of events of the host
    alone, as half of the names are of GPUs' ops.
    """
    key, host = (pattern, *words, on_host), trace.host if on_host else None
    of, cached = trace.found.get(key, (None, ()))
    if of is host and len(cached) == len(trace.names) + 1:
        return cached
    match = re.compile(pattern).match if isinstance(pattern, str) else pattern
    mask = np.zeros(len(trace.names) + 1, bool)  # the extra last entry answers index -1
    names = trace.names
    chosen: Iterable[int] = _on_host(trace) if on_host else range(len(names))
    chosen = _with_words(trace, words).intersection(chosen) if words else chosen
    mask[[number for number in chosen if match(names[number])]] = True
    mask.flags.writeable = False
    trace.found[key] = host, mask
    return mask


def _with_words(trace: Trace, words: Sequence[str]) -> set[int]:
    """Numbers of the names that have one of these words."""
    (text, begins), numbers = _in_lower_case(trace), set[int]()
    for word in words:
        start = text.find(word)
        while start >= 0:
            numbers.add(number := bisect_right(begins, start))
            start = text.find(word, begins[number]) if number < len(begins) else -1
    return numbers


@once
def _in_lower_case(trace: Trace) -> tuple[str, array[int]]:
    """The names in lower case, one below the other, and where each but the first begins."""
    lower = [name.lower() for name in trace.names]
    return "\n".join(lower), array("q", accumulate(len(name) + 1 for name in lower[:-1]))


def alphabetical(names: Sequence[str], name: npt.NDArray) -> I64:
    """Number for each of these indices of ``names`` (-1: none) that rises with the name's text: a key to sort by where
    the order of the names in a file must not count."""
    used, which = numbered(name)
    texts = np.array([names[i] if i >= 0 else "" for i in used.tolist()], object)
    return np.argsort(np.argsort(texts, kind="stable"))[which]


def rows_of(mask: Mask) -> I64 | slice:
    """An index of the rows in ``mask``, three times as quick as the mask itself; with all of them a slice, which gives
    the very column."""
    return slice(None) if mask.all() else np.flatnonzero(mask)


def distinct(ids: npt.NDArray) -> I64:
    """The distinct ids (indices, or -1) in order, as :func:`numpy.unique`; by a table where that is quicker."""
    if not _worth_a_table(ids):
        ordered = in_order(ids).astype(np.int64)  # of ids nearly in order ten times as quick as numpy.unique
        return ordered[np.append(True, ordered[1:] != ordered[:-1])] if len(ordered) else ordered
    present = np.zeros(int(ids.max()) + 2, bool)  # the extra last entry is that of -1
    present[ids] = True
    used = np.flatnonzero(present[:-1])
    return np.concatenate(([-1], used)) if present[-1] else used


def numbered(ids: npt.NDArray) -> tuple[I64, I64]:
    """The same, and for each row the place of its id among them."""
    if not _worth_a_table(ids):
        used, which = np.unique(ids, return_inverse=True)
        return used.astype(np.int64), which
    used = distinct(ids)
    index_of = np.zeros(int(used[-1]) + 2, np.int64)
    index_of[used] = np.arange(len(used))
    return used, index_of[ids]


def _worth_a_table(ids: npt.NDArray) -> bool:
    return len(ids) >= _SORTED_BELOW and int(ids.max()) < max(_TABLE_BELOW, len(ids))


def stable_order(keys: npt.NDArray) -> I64:
    """A stable argsort, by radix where the keys are few: NumPy has that for 16 bits only."""
    small = len(keys) == 0 or (keys.min() >= 0 and keys.max() < 1 << 16)
    return np.argsort(keys.astype(np.uint16) if small else keys, kind="stable")


def optimizer_names(trace: Trace) -> Mask:
    """Mask of ``trace.names`` that are an optimizer's, as :func:`name_mask`."""
    return name_mask(trace, _OPTIMIZER, _OPTIMIZER_WORDS)


def on_gpu(device: DeviceEvents, gpu: int) -> slice:
    """Rows of a GPU's events in a trace, where they lie together."""
    return slice(*np.searchsorted(device.gpu, np.array((gpu, gpu + 1), device.gpu.dtype)).tolist())


def by_line(line: npt.NDArray) -> dict[int, I64]:
    """The places at which each number of a line, none below 0, stands in this column."""
    return dict(line_by_line(line))


def line_by_line(line: npt.NDArray) -> Iterator[tuple[int, I64]]:
    """The same, one line after the other, for columns of all events."""
    used = distinct(line)
    if len(used) <= FEW_LINES:
        yield from ((number, np.flatnonzero(line == number)) for number in used.tolist())
        return
    order = stable_order(line)
    parts = np.split(order, np.flatnonzero(np.diff(line[order])) + 1)
    yield from ((int(line[part[0]]), part) for part in parts if len(part))


def host_rows(trace: Trace, pattern: Pattern, lines: Mask | None = None, words: tuple[str, ...] = ()) -> I64:
    """Rows of the host events whose name matches (:func:`name_mask`), on these lines, in order of time."""
    mask = name_mask(trace, pattern, words, on_host=True)
    rows = np.flatnonzero(mask.take(trace.host.name)) if mask.any() else np.empty(0, np.int64)
    return rows if lines is None else rows[lines[trace.host.line[rows]]]


@once
def _on_host(trace: Trace) -> list[int]:
    """Numbers of the names that events of the host have."""
    names = distinct(trace.host.name)
    numbers: list[int] = names[names >= 0].tolist()
    return numbers


def spans_of(trace: Trace, rows: I64 | slice) -> Spans:
    """Spans in which any of these events of the host was open, on any thread."""
    return union(trace.host.start_ns[rows], trace.host.end_ns[rows])


def outermost_rows(trace: Trace, rows: I64, *, by_name: bool = False) -> I64:
    """Events of the host that lie in no other of them on their thread, or in none of their name there (JAX records a
    call twice, one in the other); in order of time."""
    host = trace.host
    if not len(rows):
        return rows
    group = host.line[rows].astype(np.int64) * len(trace.names) + (host.name[rows] if by_name else 0)
    order = np.lexsort((-host.end_ns[rows], host.start_ns[rows], group))
    rows, group = rows[order], group[order]
    # Each group's times after those of the groups before, so that a running maximum stays within its group.
    later_ns = np.cumsum(np.append(False, group[1:] != group[:-1])) * (int(host.end_ns.max()) + 1)
    reach = np.maximum.accumulate(host.end_ns[rows] + later_ns)
    return np.sort(rows[np.append(True, (host.start_ns[rows] + later_ns)[1:] >= reach[:-1])])


def computes_on_cpu(trace: Trace) -> bool:
    """Return whether the job of a trace without GPUs uses none: it has no memory on one, places no op of TensorFlow 1
    there, and launches no kernels that were not recorded."""
    return not (trace.gpus or len(host_rows(trace, f"{LAUNCH_CALLS}|{_GPU_OPS}"))
                or any(line.name.startswith(f"{GRAPH_EXECUTOR} GPU") for line in trace.lines)
                or name_mask(trace, _GPU_MEMORY)[trace.allocator.allocator].any())


def migrations(device: DeviceEvents) -> Mask:
    """Mask of the moves of managed memory's pages: no call launched them, as it did copies with managed memory."""
    return (((device.kind == Kind.H2D) | (device.kind == Kind.D2H)) & (device.launch_ns < 0) & (
        (device.src == MemoryKind.MANAGED) & (device.dst == MemoryKind.MANAGED)))


# Between the moves of pages that a host's loop asks for one after another. gputop's own figure: 6 ms were seen.
_PAGE_PAUSE_NS = 20_000_000


@once
def page_reads(trace: Trace) -> Spans:
    """Spans in which the host reads managed memory that lies on a GPU: no kernel runs, and its pages come one after
    another. What was asked for ahead comes at once."""
    device = trace.device
    down = np.flatnonzero(migrations(device) & (device.kind == Kind.D2H))
    kernels = device.kind <= Kind.COLLECTIVE
    return subtract(joined(union(device.start_ns[down], device.end_ns[down]), _PAGE_PAUSE_NS),
                    union(device.start_ns[kernels], device.end_ns[kernels]))


def host_stat(host: HostEvents, name: str) -> tuple[I64, I64]:
    """Rows and values of one stat; both empty where the trace has none of it."""
    none = np.empty(0, np.int64)
    return host.stats.get(name, (none, none))


def values_at(keys: I64, values: I64, wanted: I64, default: int = 0) -> tuple[Mask, I64]:
    """Mask of the ``wanted`` numbers that are among the sorted ``keys``, and the value of each, else the default."""
    index = np.searchsorted(keys, wanted)
    has = (index < len(keys)) & (np.append(keys, 0)[index] == wanted)
    return has, np.where(has, np.append(values, default)[index], default)


@once
def launching_lines(trace: Trace) -> I64:
    """The lines of the host that launch device events, in order."""
    lines = distinct(trace.device.launch_line)
    return lines[lines >= 0]


def detect_framework(trace: Trace) -> str:
    """The framework by the names of its events: tensorflow, jax, pytorch or unknown.

    For advice that names an API. Without events of the host, as in many Nsight reports, the kernels that a framework
    brings tell; XLA's own run under both TensorFlow and JAX.
    """
    for framework, pattern in (
        ("pytorch", r"aten::|ProfilerStep#|autograd::engine"),
        ("jax", r"PjitFunction\(|jit\(|PJRT_LoadedExecutable|\$api\.py"),
        ("tensorflow", r"TFE_Py_|EagerExecute|FunctionRun|ExecutorState::|Iterator::|IteratorGetNext|_SOURCE:"),
        ("pytorch", r".*\b(?:at::native|at::cuda|at::BatchNorm|c10)::|_ZN2at6native|.*PyTorchMemEffAttention|"
                    r".*\bpytorch_flash::|triton_(?:poi|per|red|tem|for)_fused"),
        ("jax", r".*\bjax(?:lib)?::"),
        ("tensorflow", r".*\btensorflow::|_ZN10tensorflow|\w+_GPU_DT_\w+_kernel")):
        if name_mask(trace, pattern).any():
            return framework
    return "unknown"


def how_to_mark_steps(trace: Trace) -> str:
    """The API with which a custom training loop marks its steps, so that they are found in a trace like this one."""
    framework = detect_framework(trace)
    if trace.format == "nsys":
        return ("NVTX ranges such as torch.cuda.nvtx.range(f'ProfilerStep#{step}')" if framework == "pytorch" else
                "NVTX ranges named ProfilerStep#<number>")
    marks = {"pytorch": "torch.profiler.record_function(f'step {step}') around each step, or prof.step() after it",
             "jax": "jax.profiler.StepTraceAnnotation('train', step_num=step)",
             "tensorflow": "tf.profiler.experimental.Trace('train', step_num=step, _r=1)"}
    return marks.get(framework, "spans named ProfilerStep#<number>" if trace.format == "chrome" else
                     f"{marks['tensorflow']} or {marks['jax']}")
