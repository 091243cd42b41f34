"""The figures of the text report beside its tables: kernels by length, the GPUs against each other, the host's gaps,
lines of Python and launch threads."""

from __future__ import annotations

from collections.abc import Iterator

from gputop.analysis.results import Analysis, Concurrency, LaunchOrder, LaunchThreads, Limits, Replicas, StepSkew
from gputop.diagnosis.python_lines import cost_words, gap_words, worth_showing
from gputop.diagnosis.python_lines import lines_of_gaps as python_lines
from gputop.render.table import BARS
from gputop.text.units import percent, printable, seconds, wrap

_OPS_SHOWN = 5
_WORTH_NAMING = 0.005  # less rounds to nothing
_INDENT = 15
_EVEN = 0.05  # GPUs whose work is this close to the others' are called even


def across_gpus(a: Analysis, width: int) -> Iterator[str]:
    """Work, running side by side, and who begins late; nothing with fewer than two GPUs at work."""
    r = a.replicas
    if r is None or r.work is None:
        return
    yield f"{len(r.work)} GPUs compared"
    yield from _detail("work", _work(r), width)
    for label, figure, text in (("together", "compute", _together(r.compute)),
                                ("first kernel", "first_kernel", _skew(r.first_kernel)),
                                ("launches", "launches", _launches(r.launches))):
        reason = r.missing.get(figure)
        yield from _detail(label, text or (f"not evaluated: {reason}" if reason else ""), width)


def _work(r: Replicas) -> str:
    work = r.work or ()
    compared = [w for w in work if w.compute_ratio is not None]
    if not compared:
        return f"the compute per {r.basis} cannot be compared"
    heavy = max(compared, key=lambda w: w.compute_ratio or 0.0)
    light = min(compared, key=lambda w: w.compute_ratio or 0.0)
    low, high = light.compute_ratio or 0.0, heavy.compute_ratio or 0.0
    if high <= 1 + _EVEN and low >= 1 - _EVEN:
        return (f"even: each GPU computes for at most {seconds(heavy.compute_s)} per {r.basis}, within "
                f"{percent(max(high - 1, 1 - low))} of the median of the others")
    text = (f"GPU {heavy.gpu} computes {high:.2f}× as long as the median of the others per {r.basis} "
            f"({seconds(heavy.compute_s)})")
    if heavy.kernels_ratio is not None:
        text += f", with {heavy.kernels_ratio:.2f}× as many kernels"
    return text + f"; GPU {light.gpu} computes {low:.2f}× as long"


def _together(c: Concurrency | None) -> str:
    if c is None or c.serial is None or c.serial_by_chance is None:
        return ""
    n = len(c.exactly) - 1
    return (f"only one GPU computes for {percent(c.serial)} of the time in which any GPU computes "
            f"({percent(c.serial_by_chance)} by chance); {'both' if n == 2 else f'all {n}'} GPUs compute at the same "
            f"time for {percent(c.exactly[n])} of the time, and none for {percent(c.exactly[0])}")


def _skew(skew: StepSkew | None) -> str:
    if skew is None:
        return ""
    text = f"{seconds(skew.median_s)} from the first to the last GPU (median; 95th percentile: {seconds(skew.p95_s)})"
    if skew.last:
        gpu, times = max(skew.last.items(), key=lambda item: item[1])
        if times * 2 > skew.steps:
            text += f"; GPU {gpu} is last in {times} of {skew.steps} steps"
    return text


def _launches(launches: LaunchOrder | None) -> str:
    if launches is None:
        return ""
    most = max(launches.threads.values())
    if launches.launches_per_turn is not None:
        text = (f"{percent(launches.shared_launches)} of the launches come from host threads that serve several GPUs, "
                f"half of them in runs of at least {launches.launches_per_turn} to one GPU")
    else:
        text = "each GPU has its own host thread" if most == 1 else f"each GPU has up to {most} host threads of its own"
    if launches.delay_median_s:
        gpu, delay = max(launches.delay_median_s.items(), key=lambda item: item[1])
        text += f"; the first launch of a step on GPU {gpu} comes {seconds(delay)} after the first on any GPU"
    return text


def kernel_details(a: Analysis, width: int) -> Iterator[str]:
    """Types of the ops of the kernels, their durations, and the command that looks at one."""
    k = a.kernels
    if k is None:
        return
    ops = [f"{printable(row.name)} {percent(row.share)}" for row in k.by_op_type or ()
           if row.name and row.share >= _WORTH_NAMING][:_OPS_SHOWN]
    yield from _detail("op types", ", ".join(ops), width)
    yield from _sizes(a, width)
    command = next((row.ncu for row in k.by_name if row.ncu), "")
    if command:
        yield from _detail("Nsight", "Compute command for the longest kernel (except collectives):", width)
        yield f"{'':{_INDENT}}{printable(command)}"


def source_lines(a: Analysis, width: int) -> Iterator[str]:
    """Yield the lines of source whose layers take most time."""
    table = a.layers or a.cpu_layers
    if table is not None and table.sources:
        lines = [f"{printable(line.line)} {percent(line.share)}" for line in table.sources[:_OPS_SHOWN]
                 if line.share >= _WORTH_NAMING]
        yield from _detail("lines", ", ".join(lines) + f" of {'GPU' if table.gpus else 'CPU'} time", width)


def _sizes(a: Analysis, width: int) -> Iterator[str]:
    if not a.kernel_sizes:
        return
    counts = [sum(column) for column in zip(*(s.count for s in a.kernel_sizes), strict=True)]
    bounds = a.kernel_sizes[0].bounds_s
    total = sum(counts)
    below = {limit: sum(counts[:bounds.index(limit) + 1]) / total for limit in (20e-6, 40e-6)}
    highest = max(counts)
    bars = "".join(BARS[round(c / highest * (len(BARS) - 1))] if c else " " for c in counts)
    # What another framework takes is another figure.
    pace = ". TensorFlow takes 20-40 µs to launch an op" if a.trace.format == "xspace" else ""
    yield from _detail("durations", (
        f"{percent(below[20e-6])} of the kernels run for less than 20 µs, and {percent(below[40e-6])} for less than "
        f"40 µs{pace}. Kernel counts by duration (each bar covers twice the duration of the previous bar):"), width)
    yield f"{'':{_INDENT}}{seconds(bounds[0])} |{bars}| {seconds(bounds[-1])}"


def mfu_text(gpu_limits: Limits) -> str:
    """MFU with the peak and the coverage that it rests on, or why there is none."""
    if gpu_limits.mfu is None:
        return f"unknown. {gpu_limits.reason}"
    peaks = ", ".join(f"{p.dtype} {p.flops_per_s / 1e12:,.4g} TFLOP/s" for p in gpu_limits.peaks)
    source = gpu_limits.peaks[0].source if gpu_limits.peaks else ""
    hfu = gpu_limits.hfu or 0.0
    again = f", HFU {hfu:.1%} with recomputation" if hfu > gpu_limits.mfu else ""
    flops = f"{(gpu_limits.flops or 0.0) / 1e12:,.4g} TFLOP per step and GPU"
    flops += (", as given" if gpu_limits.flops_source == "given" else
              f" from XLA programs, which cover {percent(gpu_limits.coverage)} of the compute time")
    return f"{gpu_limits.mfu:.1%}{again}: {flops}, at {peaks} ({source})"


def _detail(label: str, text: str, width: int) -> list[str]:
    return wrap(text, width, f"  {label:<13}") if text else []


_NAMES = 5  # shown in a list
_NAME_WIDTH = 44
_WORTH_GAPS = 0.01  # share of the step


def gaps(a: Analysis, width: int) -> Iterator[str]:
    """Yield the work of the host in the steps' gaps."""
    g = a.gaps
    if g is None or a.steps is None or g.total_s_per_step < _WORTH_GAPS * a.steps.mean_s:
        return
    yield from _labeled("Gaps", f"{seconds(g.total_s_per_step)} per {a.steps.unit}, {g.what}", width)
    parts = [(work.name, work.s_per_step) for work in g.main]
    if g.no_event_s_per_step is not None:
        parts.append(("Python without events", g.no_event_s_per_step))
    parts.sort(key=lambda part: -part[1])
    for label, times in (("training loop", parts), ("executors", [(w.name, w.s_per_step) for w in g.executor])):
        shown = [f"{_short(name)} {seconds(time)}" for name, time in times[:_NAMES] if time > 0]
        if shown:
            yield from _labeled("", f"{label}: {', '.join(shown)}", width)


def stacks(a: Analysis, width: int) -> Iterator[str]:
    if a.stacks is None:
        return
    period_s = a.steps.mean_s if a.steps is not None else a.trace.window_s
    if a.stacks.reason:
        if a.gaps is not None and a.gaps.total_s_per_step >= _WORTH_GAPS * period_s:
            text = f"It is unknown which lines of code ran in the gaps: {a.stacks.reason}"
            yield from _labeled("Python", text, width)
        return
    shown = worth_showing(a.stacks, period_s)
    for number, gaps in enumerate(shown):
        yield from _labeled("" if number else "Python", gap_words(gaps, a.stacks), width)
        for text in python_lines(gaps, a.stacks):
            yield from wrap(text, width, " " * 11, " " * 13)
    if shown:
        yield from _labeled("", cost_words(a.stacks, a.simulated), width)


def launch_threads(a: Analysis, width: int) -> Iterator[str]:
    """Yield the threads that launch, and whether tf.data was at work while launches were late."""
    t = a.launch_threads
    if t is None:
        return
    text = f"by one thread, {t.threads[0].name}"
    if len(t.threads) > 1:
        fewest, most = min(t.threads_per_gpu.values()), max(t.threads_per_gpu.values())
        text = (f"by {len(t.threads)} host threads, {fewest if fewest == most else f'{fewest} to {most}'} per GPU")
    if t.mode != "unknown":
        text += f"; TF_GPU_THREAD_MODE {t.mode}"
    yield from _labeled("Launches", text + _contention(t), width)


def _contention(t: LaunchThreads) -> str:
    text = ""
    if t.busy_threads_at_launch is not None and (t.cpus is not None or len(t.threads) > 1):
        cpus = "" if t.cpus is None else f" on {t.cpus} CPUs"
        text += f"; {t.busy_threads_at_launch:.1f} threads were busy during launches{cpus}"
    if t.input_busy_late is not None:
        text += f"; tf.data works for {percent(t.input_busy_late)} of the time in which GPUs wait for launches"
        if t.input_busy is not None:
            text += f", and for {percent(t.input_busy)} of the rest"
    return text


def _short(name: str) -> str:
    """A long name's end where it begins with scopes, else its beginning."""
    name = printable(name)
    if len(name) <= _NAME_WIDTH:
        return name
    return "…" + name[1 - _NAME_WIDTH:] if "/" in name else name[:_NAME_WIDTH - 1] + "…"


def _labeled(label: str, text: str, width: int) -> list[str]:
    return wrap(text, width, f"{label:<9}")
