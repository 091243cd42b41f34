"""The GPUs' side of the text report: kernels, their sizes, copies, and the GPUs against each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import median

from gputop.analysis.gpu.rank_times import least_median_most
from gputop.analysis.results import (
    Analysis,
    Concurrency,
    LaunchOrder,
    Limits,
    RankTimes,
    Replicas,
    StepSkew,
)
from gputop.diagnosis.per_step import KernelsPerStep, collectives_per_step, copies_per_step, kernels_per_step
from gputop.diagnosis.roofline import picture
from gputop.render.step_parts import limit_step, path_kind
from gputop.text.units import bytes_, fit, percent, printable, rate, seconds
from gputop.text.wrapping import wrap

_KERNELS_SHOWN = 8
_OPS_SHOWN = 5
_COPIES_SHOWN = 6
_LAYER_ROWS, _LAYER_SHARE = 24, 0.03  # rows of the tree that are shown
_WORTH_NAMING = 0.005  # less rounds to nothing
_INDENT = 15
_EVEN = 0.05  # GPUs whose work is this close to the others' are called even
_BARS = "▁▂▃▄▅▆▇█"


def _count(number: float) -> str:
    return f"{number:,.0f}" if number >= 9.95 else f"{number:.2g}"


def across_gpus(a: Analysis, width: int) -> Iterator[str]:
    """Work, running side by side, and who begins late; nothing with fewer than two GPUs at work."""
    r = a.replicas
    if r is None or r.work is None:
        return
    yield f"{len(r.work)} GPUs compared"
    yield from _labeled("work", _work(r), width)
    for label, figure, text in (("together", "compute", _together(r.compute)),
                                ("first kernel", "first_kernel", _skew(r.first_kernel)),
                                ("launches", "launches", _launches(r.launches))):
        reason = r.missing.get(figure)
        yield from _labeled(label, text or (f"not judged: {reason}" if reason else ""), width)


def ranks(a: Analysis, width: int) -> Iterator[str]:
    """The ranks with least, median and most load or waiting, side by side."""
    extremes = least_median_most(a.ranks)
    shown = extremes.ranks
    if not shown or a.steps is None:
        return
    unit, several = a.steps.unit, len({rank.host for rank in a.ranks}) > 1
    yield from wrap(f"{len(a.ranks)} ranks in the mean {unit}, sorted by {extremes.sorted_by}. transfer, waiting: "
                    "time in collectives that no load hides", width, "Ranks    ")
    yield f"{'':<25}{'load':>8} {'transfer':>8} {'waiting':>8} {'other':>8}"
    for word, rank in shown:
        waiting = "?" if rank.waiting_s is None else seconds(rank.waiting_s)
        yield (f"  {word:<6} {rank_label(rank, several):<16}{seconds(rank.load_s):>8} "
               f"{seconds(rank.communication_s):>8} {waiting:>8} {seconds(rank.other_s):>8}")
    if extremes.by == "waiting":
        return
    most, rest = shown[-1][1], [rank.load_s for rank in a.ranks if rank is not shown[-1][1]]
    if most.load_s > (1 + _EVEN) * median(rest):
        yield from wrap(f"{rank_label(most, several)} has the highest load in {most.most_steps} of {a.steps.count} "
                        f"{unit}s",
                        width, "  ")


def rank_label(rank: RankTimes, host: bool) -> str:
    """ "GPU 3", with its ``host`` where that tells them apart."""
    return f"GPU {rank.gpu}" + (f" {fit(printable(rank.host), 9).rstrip()}" if host and rank.host else "")


def _work(r: Replicas) -> str:
    work = r.work or ()
    compared = [w for w in work if w.compute_ratio is not None]
    if not compared:
        return f"compute per {r.basis} cannot be compared"
    heavy = max(compared, key=lambda w: w.compute_ratio or 0.0)
    light = min(compared, key=lambda w: w.compute_ratio or 0.0)
    low, high = light.compute_ratio or 0.0, heavy.compute_ratio or 0.0
    if high <= 1 + _EVEN and low >= 1 - _EVEN:
        return (f"even: the GPUs compute {seconds(heavy.compute_s)} per {r.basis} at most, each within "
                f"{percent(max(high - 1, 1 - low))} of the others' median")
    text = (f"GPU {heavy.gpu} computes {high:.2f} times the median of the others per {r.basis} "
            f"({seconds(heavy.compute_s)})")
    if heavy.kernels_ratio is not None:
        text += f", with {heavy.kernels_ratio:.2f} times the kernels"
    return text + f"; GPU {light.gpu} {low:.2f} times"


def _together(c: Concurrency | None) -> str:
    if c is None or c.serial is None or c.serial_by_chance is None:
        return ""
    n = len(c.exactly) - 1
    return (f"only one computes in {percent(c.serial)} of the time in which any does ({percent(c.serial_by_chance)} by "
            f"chance); {'both' if n == 2 else f'all {n}'} compute at once for {percent(c.exactly[n])} of the time, "
            f"none for {percent(c.exactly[0])}")


def _skew(skew: StepSkew | None) -> str:
    if skew is None:
        return ""
    text = f"{seconds(skew.median_s)} from the first GPU's to the last's (median; 95%: {seconds(skew.p95_s)})"
    if skew.last:
        gpu, times = max(skew.last.items(), key=lambda item: item[1])
        if times * 2 > skew.steps:
            text += f", GPU {gpu} last in {times} of {skew.steps} steps"
    return text


def _launches(launches: LaunchOrder | None) -> str:
    if launches is None:
        return ""
    most = max(launches.threads.values())
    if launches.launches_per_turn is not None:
        text = (f"{percent(launches.shared_launches)} of them by host threads that serve several GPUs, half of these "
                f"in series of at least {launches.launches_per_turn} to one GPU")
    else:
        text = "each GPU has its own host thread" if most == 1 else f"each GPU has its own host threads, up to {most}"
    if launches.delay_median_s:
        gpu, delay = max(launches.delay_median_s.items(), key=lambda item: item[1])
        text += f"; GPU {gpu}'s first launch of a step comes {seconds(delay)} after the first of all"
    return text


def kernels(a: Analysis, width: int) -> Iterator[str]:
    """The kernels that take most time, and the ops they belong to."""
    k = a.kernels
    if k is None:
        return
    rows, by = kernels_per_step(a, k.by_name)
    shown = [kernel for kernel in rows if kernel.row.name][:_KERNELS_SHOWN]
    occupancy = f"; occupancy {k.occupancy_is}" if k.occupancy_is else ""
    on = "; each line: of a GPU that runs it" if any(0 < len(kernel.row.by_gpu) < by.gpus for kernel in shown) else ""
    count, time_s = _sum(rows)
    yield from wrap(f"{_count(count)}, {seconds(time_s)} {by.basis}{occupancy}{on}", width, "Kernels  ")
    yield "      time    count     mean type     tensor occ. name"
    for kernel in shown:
        yield _kernel(kernel, width)
    rest = [kernel for kernel in rows if kernel not in shown]
    if rest:
        count, time_s = _sum(rest)
        yield f"  {seconds(time_s):>8} {_count(count):>8}  others"
    if k.by_op_type:
        ops = [f"{printable(row.name)} {percent(row.share)}" for row in k.by_op_type
               if row.name and row.share >= _WORTH_NAMING][:_OPS_SHOWN]
        yield from _labeled("op types", ", ".join(ops), width)
    yield from _sizes(a, width)
    command = next((kernel.row.ncu for kernel in shown if kernel.row.ncu), "")
    if command:
        yield from _labeled("Nsight", "Compute, of the kernel that takes most time (collectives aside):", width)
        yield f"{'':{_INDENT}}{printable(command)}"


def _sum(rows: Iterable[KernelsPerStep]) -> tuple[float, float]:
    """Count and seconds, the mean of all GPUs."""
    kernels = list(rows)
    return sum(k.count * k.gpus for k in kernels), sum(k.time_s * k.gpus for k in kernels)


def _kernel(k: KernelsPerStep, width: int) -> str:
    row = k.row
    tensor = "?" if row.tensor_core is None else "yes" if row.tensor_core > 0.5 else "no"
    kind = "collect." if row.collective else next(iter(row.types), "unknown")
    occupancy = "?" if row.occupancy is None else percent(row.occupancy)
    name = printable(row.name).removeprefix("void ")
    return (f"  {seconds(k.time_s):>8} {_count(k.count):>8} {seconds(k.time_s / k.count):>8} {kind:<8} "
            f"{tensor:<6} {occupancy:>4} " + fit(name, width - 50).rstrip())


def _sizes(a: Analysis, width: int) -> Iterator[str]:
    if not a.kernel_sizes:
        return
    counts = [sum(column) for column in zip(*(s.count for s in a.kernel_sizes), strict=True)]
    bounds = a.kernel_sizes[0].bounds_s
    total = sum(counts)
    below = {limit: sum(counts[:bounds.index(limit) + 1]) / total for limit in (20e-6, 40e-6)}
    highest = max(counts)
    bars = "".join(_BARS[round(c / highest * (len(_BARS) - 1))] if c else " " for c in counts)
    # What another framework takes is another figure.
    pace = ": TensorFlow takes 20-40 µs to launch one" if a.trace.format == "xspace" else ""
    yield from _labeled("durations", (
        f"{percent(below[20e-6])} are shorter than 20 µs, {percent(below[40e-6])} than 40 µs{pace}. "
        "Counts by duration, which doubles from bar to bar:"), width)
    yield f"{'':{_INDENT}}{seconds(bounds[0])} |{bars}| {seconds(bounds[-1])}"


def layers(a: Analysis, width: int) -> Iterator[str]:
    """Yield the time of the step by phase and layer: the tree down to what costs some percent, and the lines of
    source."""
    table = a.layers or a.cpu_layers
    if table is None:
        return
    unit = "window" if table.basis == "window" else f"mean {table.basis}"
    what = ("the GPU's time, and its idle time that their kernels end" if table.gpus else
            "the time in which the CPU runs their ops; ops that overlap share it")
    yield from wrap(f"phases of training and layers of the model in the {unit} of {seconds(table.total_s)}: {what}",
                    width, "Layers   ")
    yield f"   share {'GPU' if table.gpus else 'CPU'} time     idle {'kernels' if table.gpus else 'ops':>8} name"
    # A part has no more than what holds it, so whatever is among the largest has all around it there as well.
    largest = sorted(range(len(table.rows)), key=lambda i: -table.rows[i].share)[:_LAYER_ROWS]
    for i, (row, depth) in enumerate(zip(table.rows, table.depths, strict=True)):
        if (i in largest and row.share >= _LAYER_SHARE) or (depth == 0 and row.share >= _WORTH_NAMING):
            yield (f"  {row.share:>6.1%} {seconds(row.device_s):>8} {seconds(row.wait_s):>8} {_count(row.kernels):>8} "
                   + fit("  " * depth + printable(row.name), width - 36).rstrip())
    for row in table.rows:
        if row.reason and row.share >= _WORTH_NAMING:
            yield from wrap(f"{row.name}: {row.reason}", width, "  ", "    ")
    if table.sources:
        lines = [f"{printable(line.line)} {percent(line.share)}" for line in table.sources[:_OPS_SHOWN]
                 if line.share >= _WORTH_NAMING]
        yield from _labeled("lines", ", ".join(lines) + f" of the {'GPU' if table.gpus else 'CPU'}'s time", width)


def critical_path(a: Analysis, width: int) -> Iterator[str]:
    """Yield the critical path of a typical step, and the slack of what is beside it."""
    path = a.critical_path
    if path is None:
        return
    if not path.kinds:
        yield from wrap(f"No critical path. {path.reason}", width)
        return
    yield from wrap(f"critical path of step {path.step}, {seconds(path.step_s)}: the work that the step waited for. "
                    "Slack: how much longer work off the path could take without delaying the next step", width,
                    "Path     ")
    yield "                on path       off path    slack"
    for kind in path.kinds:
        if max(kind.time_s, kind.other_s) >= _WORTH_NAMING / 10 * path.step_s:
            share = kind.time_s / path.step_s if path.step_s else 0.0
            slack = "" if not kind.other_s else "any" if kind.slack_s is None else seconds(kind.slack_s)
            beside = seconds(kind.other_s) if kind.other_s else ""
            yield f"  {path_kind(kind.id)[0]:<12} {seconds(kind.time_s):>8} {share:>6.1%} {beside:>8} {slack:>8}"
    if path.reason:
        yield from wrap(path.reason, width, "  ")


def limits(a: Analysis, width: int) -> Iterator[str]:
    """The limit ladder, and MFU."""
    gpu_limits = a.limits
    if gpu_limits is None:
        return
    if not gpu_limits.gpu:  # without a peak it would repeat the step's parts
        yield from wrap(f"unknown. {gpu_limits.reason}", width, "Limit    ")
        return
    yield f"From the mean step down to the limit of the {gpu_limits.gpu}"
    for step in gpu_limits.steps:
        if step.time_s >= _WORTH_NAMING / 10 * gpu_limits.step_s:
            yield f"  {limit_step(step.id)[0]:<22}{seconds(step.time_s):>10} {step.time_s / gpu_limits.step_s:>6.1%}"
    yield from _labeled("MFU", mfu_text(gpu_limits), width)
    if gpu_limits.points:
        yield "Roofline"
        yield from (f"  {line}"[:width] for line in picture(gpu_limits, width - 4))


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
              f" by XLA's programs, which hold the work of {percent(gpu_limits.coverage)} of the compute time")
    return f"{gpu_limits.mfu:.1%}{again}: {flops}, at {peaks} ({source})"


def copies(a: Analysis, width: int) -> Iterator[str]:
    """Copies by direction and memory, the mean of a step and GPU, and the ops that make them."""
    if a.copies is None:
        return
    rows, of_ops, by = copies_per_step(a)
    ways: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        sums = ways.setdefault((row.direction, row.source, row.target), [0.0, 0.0, 0.0, 0.0])
        has_rate = row.bytes_per_s is not None and row.bytes is not None
        for i, value in enumerate((row.count, row.bytes or 0, row.time_s,
                                   (row.bytes or 0) / (row.bytes_per_s or 1) if has_rate else 0.0)):
            sums[i] += value
    yield from wrap(f"{by.basis}, rates of a single copy", width, "Copies   ")
    yield f"  {'way':<5} {'memory':<17} {'count':>8} {'time':>8} {'bytes':>6} {'rate':>9}"
    largest = sorted(ways.items(), key=lambda item: -item[1][2])
    for (direction, source, target), (count, size, time, timed_s) in largest[:_COPIES_SHOWN]:
        amount = f"{bytes_(size / by.gpus):>6} {rate(size / timed_s):>9}" if timed_s else f"{'?':>6} {'?':>9}"
        yield (f"  {direction:<5} {source + ' → ' + target:<17} {_count(count / by.gpus):>8} "
               f"{seconds(time / by.gpus):>8} {amount}")
    if len(largest) > _COPIES_SHOWN:
        yield f"  and {len(largest) - _COPIES_SHOWN} more ways, shorter"
    ops = [f"{printable(op.op)} {op.direction} {seconds(op.time_s)}" for op in of_ops[:_OPS_SHOWN]]
    yield from _labeled("by op", ", ".join(ops), width)


def collective_operations(a: Analysis) -> Iterator[str]:
    """One line an operation, where there are several or their sizes are known."""
    operations = a.collectives.operations if a.collectives else ()
    if len(operations) < 2 and not any(op.bytes for op in operations):
        return
    yield "  operation       count     time exposed waiting     bytes"
    for of_step in collectives_per_step(a)[0]:
        op = of_step.op
        exposed = sum(op.exposed_s.values()) / op.time_s if op.time_s else 0.0
        waiting = "?" if op.waiting is None else percent(op.waiting)
        size = "?" if of_step.bytes is None else bytes_(of_step.bytes)
        yield (f"  {op.operation:<13} {_count(of_step.count):>7} {seconds(of_step.time_s):>8} {percent(exposed):>7} "
               f"{waiting:>7} {size:>9}")


def _labeled(label: str, text: str, width: int) -> list[str]:
    return wrap(text, width, f"  {label:<13}") if text else []
