"""The tables of a capture, made from its analysis: their rows, their order, and why one is empty. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from gputop.analysis.gpu.rank_times import least_median_most
from gputop.analysis.results import Analysis, Collectives, TraceSummary
from gputop.diagnosis import per_step
from gputop.diagnosis.python_lines import line_words, per_basis, worth_showing
from gputop.diagnosis.report_figures import mfu_text
from gputop.diagnosis.roofline import picture
from gputop.diagnosis.wall_text import wall_rows, wall_title
from gputop.render.finding_text import BY_TRACER
from gputop.render.step_parts import limit_step, path_kind
from gputop.render.table import CALL, Column, Table, Value
from gputop.text.units import bytes_, count, counted, percent, portion, printable, ranges, rate, seconds, size
from gputop.trace.kernel_names import short_kernel

_HOT = 0.1  # share of the training loop's time: a line of Python is unfolded at first
_WORTH_EAGER = 0.01


def tables(analysis: Analysis | None) -> tuple[Table, ...]:
    """All tables of an analysis, in the order of their tabs; empty ones where it is None."""
    shown = analysis if analysis is not None else Analysis(trace=TraceSummary())
    made = (_kernels(shown, by_op=False), _kernels(shown, by_op=True), _collectives(shown), _memory(shown),
            _copies(shown), _host_ops(shown), _functions(shown), _input(shown), _layers(shown), _limit(shown),
            _ranks(shown), _critical_path(shown), _wall_time(shown), _gpus(shown))
    if analysis is not None:  # the last tab stands where stacks were to be sampled: all fit 80 columns without
        return (*made, _python(shown)) if shown.stacks is not None else made
    return tuple(Table(t.name, t.columns, (), "The trace could not be analyzed. Press t to see why.") for t in made)


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _kernels(analysis: Analysis, by_op: bool) -> Table:
    kernels = analysis.kernels
    columns = (Column("share", portion), Column("time", seconds), Column("count", count), Column("mean", seconds),
               Column("type", spare=True), Column("tensor", portion, spare=True), Column("GPUs", spare=True),
               Column("occup.", portion, spare=True), Column("TF op" if by_op else "kernel", wide=True))
    name = "By op" if by_op else "Kernels"
    if kernels is None:
        return Table(name, columns, (),
                     "No kernels: no GPU worked in the window, or the trace was recorded without GPU events.")
    table = kernels.by_op if by_op else kernels.by_name
    of_step, by = per_step.kernels_per_step(analysis, table or ())
    rows = tuple((r.share, r.time_s, r.count, r.mean_s, _type(r.types), r.tensor_core, ranges(r.by_gpu), r.occupancy,
                  r.name.removeprefix("void ") or f"and {r.names} more") for r in of_step)
    empty = (f"No kernel ran in the {'steps' if table else 'window'}." if table is not None else
             "The kernels in this trace have no op names, so the op of each kernel is unknown.")
    each = " for each GPU that runs the kernel" if by.gpus > 1 else ""
    note = f"Times and counts {by.text(by_gpu=False)}{each}. tensor: share of the time on tensor cores."
    note += f" occup.: occupancy, {kernels.occupancy_is}." if kernels.occupancy_is else ""
    computing = [r for r in kernels.by_name if not r.collective] if not by_op else []
    if (time_s := sum(r.time_s for r in computing)) > 0:
        half, unknown = (sum(r.time_s * r.types.get(name, 0.0) for r in computing for name in names) / time_s
                         for names in (("fp16", "bf16"), ("unknown",)))
        note += f" In 16 bits: {percent(half)} of the kernels' time without collectives (unknown: {percent(unknown)})."
    return Table(name, columns, rows, empty, note if rows else "", commands={
        r.name.removeprefix("void "): r.ncu for r in table or () if r.ncu})


def _type(types: Mapping[str, float]) -> str | None:
    name = max(types, key=lambda t: types[t], default=None)
    return None if name in (None, "unknown") else name


def _collectives(analysis: Analysis) -> Table:
    columns = (Column("operation"), Column("count", count), Column("time", seconds), Column("transfer", seconds),
               Column("waiting", portion), Column("bytes", bytes_, spare=True),
               Column("exposed", seconds, spare=True), Column("remark", wide=True))
    empty = ("The trace has only one GPU, so no GPUs exchange data." if len(analysis.gpus) == 1 else
             "No collectives in the window: the GPUs do not exchange gradients through NCCL here.")
    collectives = analysis.collectives
    if collectives is None:
        return Table("Collectives", columns, (), empty)
    of_step, by = per_step.collectives_per_step(analysis)
    rows = tuple((op.operation, op.count, op.time_s, op.transfer_s, op.waiting, op.bytes,
                  max(op.exposed_s.values(), default=None), op.reason or "") for op in of_step)
    note = (f"{seconds(sum(row.time_s for row in of_step))} {by.basis}"
            f"{_waiting(collectives, sum(row.transfer_s or 0.0 for row in of_step))}. "
            f"Times, counts, and bytes {by.text()}.")
    return Table("Collectives", columns, rows, empty, note)


def _waiting(collectives: Collectives, moving_s: float) -> str:
    """Words for the parts of the time: transfer, and waiting for which GPU."""
    late = sorted((collectives.last_to_arrive or {}).items(), key=lambda item: -item[1])[:4]
    last = f" ({', '.join(f'GPU {gpu} last at {n}' for gpu, n in late)})" if late else ""
    if collectives.transfer_s is not None and collectives.waiting is not None:
        return (f": {seconds(moving_s)} transfer, {percent(collectives.waiting)} waiting for the last GPU to arrive"
                + last)
    return last + (f"; how much of this is waiting is unknown: {printable(collectives.reason)}"
                   if collectives.reason else "")


def _memory(analysis: Analysis) -> Table:
    columns = (Column("allocator"), Column("at the peak", bytes_), Column("of the peak", portion, spare=True),
               Column("of capacity", portion), Column("allocations", _count, spare=True), Column("held by", wide=True))
    rows: list[tuple[Value, ...]] = []
    for use in analysis.memory:
        peak, room, highest = use.peak_in_window_bytes, use.capacity_bytes, use.peak_bytes
        parts: list[tuple[int, int | None, str]] = []
        if highest != peak:
            parts.append((highest, None, "total, highest ever"))
        if peak is not None:
            parts.append((peak, None, "total, highest in the capture" if parts else "total, highest ever"))
        parts += [(h.bytes, h.allocations, h.op) for h in use.holders]
        if use.unattributed_bytes:
            parts.append((use.unattributed_bytes, None,
                          "Allocated before the capture (variables, optimizer state), or by an unnamed op."))
        rows += [(use.allocator, size, size / peak if peak else None, size / room if room else None, count, what)
                 for size, count, what in parts]
    held = any(use.holders for use in analysis.memory)
    note = "" if held or not rows else "The trace does not show what held the memory at peak. "
    sized = [(free, use) for use in analysis.memory if (free := use.headroom_bytes) is not None and use.capacity_bytes]
    if sized:
        free, use = min(sized, key=lambda pair: pair[0] / pair[1].capacity_bytes)
        note += f"{printable(use.allocator)}: {size(free)} free at the peak in this window"
        broken = use.fragmentation_at_peak
        note += f", fragmentation {percent(broken)}." if broken is not None else "."
    return Table("Memory", columns, tuple(rows),
                 "No allocator in the trace: TensorFlow records allocators with its host events.", note.rstrip())


def _copies(analysis: Analysis) -> Table:
    columns = (Column("GPU"), Column("way"), Column("memory"), Column("count", count), Column("bytes", bytes_),
               Column("time", seconds), Column("rate", rate), Column("TF op", wide=True))
    rows: list[tuple[Value, ...]] = []
    of_gpus, of_ops, by = per_step.copies_per_step(analysis)
    rows += [(f"{r.gpu:>2}", r.direction, " → ".join(m for m in (r.source, r.target) if m != "device") or "device",
              r.count, r.bytes, r.time_s, r.bytes_per_s, "") for r in of_gpus]  # the memory that is not the GPU's own
    rows += [("mean" if by.gpus > 1 else "", r.direction, "", r.count, r.bytes, r.time_s,
              r.bytes / r.time_s if r.bytes and r.time_s else None, r.op)
             for r in of_ops]
    note = f"Times, counts, and bytes {by.text()}." if rows else ""
    note += " The copies in this trace have no op names." if rows and not of_ops else ""
    return Table("Copies", columns, tuple(rows), "No copies to, from, or between GPUs in the window.", note)


def _host_ops(analysis: Analysis) -> Table:
    ops, by = analysis.ops, per_step.per_step(analysis)
    has_gpus = bool(analysis.gpus) or (ops is not None and any(r.device_s for r in ops.types))
    on_gpus = (Column("GPU time", seconds),) if has_gpus else ()
    columns = (Column("type"), Column("on"), Column("count", count), Column("host time", seconds),
               *on_gpus, Column("longest", wide=True))
    rows: list[tuple[Value, ...]] = []
    if ops is not None:
        if ops.basis == "steps" and analysis.steps is not None:
            by = by._replace(steps=max(1, analysis.steps.count), unit=analysis.steps.unit)
        else:
            by = by._replace(steps=1.0, unit="window")
        # An op whose events on the host were not traced is known by its work on the GPU alone.
        rows += [(r.type, r.placement, r.count / by.steps or None, r.host_s / by.steps if r.count else None,
                  *((r.device_s / by.steps_times_gpus,) if on_gpus else ()),
                  r.example.removeprefix(CALL)) for r in ops.types]
        rows += [(r.name, "eager", r.count / by.steps, r.seconds / by.steps, *((None,) if on_gpus else ()),
                  "run one by one from Python") for r in ops.eager]
    note = f"Times and counts {by.text(by_gpu=False)}{', GPU time as mean over the GPUs' if by.gpus > 1 else ''}."
    if ops is not None and (ops.eager_share or 0.0) >= _WORTH_EAGER:
        note += f" Eager ops take {percent(ops.eager_share or 0.0)} of the time in calls from Python."
    if ops is not None and ops.device_s and any(r.count for r in ops.types):
        on_host = ops.host_s / (ops.host_s + ops.device_s)
        note += f" {percent(on_host)} of the time of all ops is on the host, and {percent(1 - on_host)} on GPUs."
    return Table("Host ops", columns, tuple(rows),
                 "No TF ops on host threads: the trace has no host events or is from another framework.",
                 note if rows else "")


def _functions(analysis: Analysis) -> Table:
    columns = (Column("calls", count), Column("time", seconds), Column("tracings", _count),
               Column("retracings", _count), Column("tracing", seconds, spare=True), Column("XLA"),
               Column("XLA run", seconds, spare=True), Column("modes", spare=True), Column("tf.function", wide=True))
    empty = "No tf.function calls in the window: the job uses an eager loop or another framework."
    functions = analysis.functions
    if functions is None:
        return Table("Functions", columns, (), empty)
    of_step, by = per_step.functions_per_step(analysis)
    rows = tuple((r.calls, r.seconds, r.tracings, r.retracings, r.tracing_s,
                  None if r.xla is None else "yes" if r.xla else "no", r.xla_s,
                  ", ".join(f"{mode} {n}" for mode, n in r.modes.items()), r.name) for r in of_step)
    compiled = functions.xla_compilations
    note = f"Calls and times {by.text(by_gpu=False)}, tracings in the window." if rows else ""
    times = "once" if compiled == 1 else f"{compiled} times"
    note += f" XLA compiled {times}, in {seconds(functions.xla_compile_s)}." if compiled else ""
    return Table("Functions", columns, rows, empty, note.lstrip())


def _stage(path: str) -> str:
    """The stage itself, then what it feeds: of the path the end tells most, and the end would be cut."""
    return " < ".join(reversed(path.split("::")))


def _input(analysis: Analysis) -> Table:
    columns = (Column("per batch", seconds), Column("own time", seconds), Column("function", seconds, spare=True),
               Column("calls", count, spare=True), Column("workers", _count, spare=True), Column("parallel", _count),
               Column("buffer empty", portion), Column("stage", wide=True))
    waits = analysis.input
    if waits is None:
        return Table("Input", columns, (), "No tf.data stages ran in the window: the job does not use tf.data, or all "
                                           "batches were ready.")
    by = per_step.per_step(analysis)
    rows = tuple((s.cost_s_per_batch, s.self_s / by.steps, per_step.over(s.function_s, by.steps), s.calls / by.steps,
                  s.workers, s.parallelism, s.buffer_empty, _stage(s.path)) for p in waits.pipelines for s in p.stages)
    loop, basis = ("A step waits {} for its", "step") if analysis.steps else ("The loop waits {} for each", "window")
    note = f"{loop.format(seconds(waits.wait_s_per_step))} batch ({percent(waits.wait_ratio)} of the {basis})."
    for p in waits.pipelines:
        each = f"{counted(p.batches, 'batch', 'es')}, {seconds(p.wait_s / p.batches)} per call" if p.batches else ""
        bounding = f"bounded by {_stage(p.bounding)}" if p.bounding else ""
        note += f" {p.dataset or 'tf.data'}: {'; '.join(filter(None, (each, bounding)))}." if each or bounding else ""
    note += f" Times and calls {by.text(by_gpu=False)}." if rows else ""
    return Table("Input", columns, rows, "The trace shows no stages of the input pipeline.", printable(note))


def _layers(source: Analysis) -> Table:
    table = source.layers or source.cpu_layers
    on_cpu = table is not None and not table.gpus
    columns = (Column("share", portion), Column("CPU time" if on_cpu else "GPU time", seconds), Column("idle", seconds),
               Column("ops" if on_cpu else "kernels", count), Column("FLOPs", _flops, spare=True),
               Column("FLOP/s", _flops, spare=True), Column("bytes", bytes_, spare=True), Column("layer", wide=True))
    empty = ("The kernels in this trace have no op names, so the layer of each kernel is unknown." if source.gpus else
             "The trace has neither kernels nor ops, so it does not show where the time goes.")
    if table is None:
        return Table("Layers", columns, (), empty)
    rows = tuple((r.share, r.device_s, r.wait_s, r.kernels, r.flops or None,
                  r.flops / (r.device_s * r.flops_known) if r.flops and r.device_s and r.flops_known else None, r.bytes,
                  r.name + (f"  ({r.source})" if r.source else f": {r.reason}" if r.reason else ""))
                 for r in table.rows)
    note = (f"CPU time per {table.basis}, because the trace has no GPU. Overlapping ops share the time."
            if on_cpu else f"Times and counts per GPU in {'the' if table.basis == 'window' else 'each'} {table.basis}. "
            "Idle is the GPU idle time before these kernels.")
    return Table("Layers", columns, rows, "Nothing ran in the steps.", note, table.parents)


def _ranks(analysis: Analysis) -> Table:
    """The ranks with least, median and most load or waiting first, then all of them by their numbers."""
    extremes = least_median_most(analysis.ranks)
    columns = (Column(f"by {extremes.by}"), Column("rank"), Column("load", seconds), Column("transfer", seconds),
               Column("waiting", seconds, missing="cannot be separated from transfer: no other rank has matching "
                                                  "collectives"),
               Column("other", seconds), Column("steps with most load", _count, spare=True),
               Column("host", wide=True))
    if analysis.steps is None:
        return Table("Ranks", columns, (), "No steps found in the trace, so ranks cannot be compared by step.")
    if len(analysis.ranks) < 2:
        return Table("Ranks", columns, (), "Only one GPU computes in the trace, so there is nothing to compare.")
    words = {rank: word for word, rank in extremes.ranks}
    ordered = [rank for _, rank in extremes.ranks] + [rank for rank in analysis.ranks if rank not in words]
    rows = tuple((words.get(r, ""), f"GPU {r.gpu}", r.load_s, r.communication_s, r.waiting_s, r.other_s,
                  float(r.most_steps), r.host) for r in ordered)
    unit = analysis.steps.unit
    note = (f"Times per {unit}, mean of {counted(analysis.steps.count, unit)}. load: kernels and copies; transfer, "
            "waiting: collective time without overlapping load."
            ) + " The other ranks wait for the rank that waits least." * (extremes.by == "waiting")
    return Table("Ranks", columns, rows, "", note)


def _limit(analysis: Analysis) -> Table:
    columns = (Column("share", portion), Column("time", seconds), Column("part"), Column("what it is", wide=True))
    limits = analysis.limits
    if limits is None:
        return Table("Limit", columns, (), "No steps found, or no GPU in the trace, so there is no step to compare "
                                           "with the GPU's limit.")
    if not limits.gpu:  # without a peak the rows would be the step's parts again
        return Table("Limit", columns, (), f"The distance of the step from the GPU's limit is unknown. {limits.reason}")
    rows = tuple((step.time_s / limits.step_s if limits.step_s else None, step.time_s, *limit_step(step.id))
                 for step in limits.steps)
    note = (f"From the mean step down to the limit of the {printable(limits.gpu)}. "
            f"MFU {printable(mfu_text(limits).rstrip('.'))}.")
    return Table("Limit", columns, rows, "", note, picture=tuple(picture(limits)))


def _critical_path(analysis: Analysis) -> Table:
    columns = (Column("kind"), Column("on path", seconds), Column("share", portion), Column("beside", seconds),
               Column("slack", lambda value: "any" if value == _ANY else seconds(value)), Column("where", spare=True),
               Column("count", _count, spare=True), Column("what", wide=True))
    path = analysis.critical_path
    if path is None or not path.kinds:
        reason = path.reason if path is not None else "gputop found no steps or no GPU in the trace."
        return Table("Path", columns, (), printable(reason))
    count = {kind.id: sum(s.stretches for s in path.segments if s.kind == kind.id) for kind in path.kinds}
    rows: list[tuple[Value, ...]] = [
        (path_kind(kind.id)[0], kind.time_s, kind.time_s / path.step_s if path.step_s else None, kind.other_s,
         0.0 if not kind.other_s else _ANY if kind.slack_s is None else kind.slack_s, "", count[kind.id],
         path_kind(kind.id)[1]) for kind in path.kinds if kind.time_s or kind.other_s]
    rows += [(path_kind(row.kind)[0], 0.0, 0.0, row.time_s, _ANY if row.slack_s is None else row.slack_s, row.place,
              row.count, short_kernel(row.name)) for row in path.slack]
    return Table("Path", columns, tuple(rows), "", (
        f"Step {path.step} takes {seconds(path.step_s)}. Slack is how much longer work off the critical path could "
        "take without delaying the step. " + path.reason).rstrip())


_ANY = float("inf")  # a slack: nothing that ran until the end of the next step waited for it


def _python(analysis: Analysis) -> Table:
    """The stacks of the training loop as a tree, which is a flame graph that unfolds."""
    stacks = analysis.stacks
    columns = (Column("share", portion), Column("time", seconds), Column("in gaps", seconds), Column("line", wide=True))
    if stacks is None or not stacks.flame:
        reason = stacks.reason if stacks is not None and stacks.reason else "no sample fell into the trace."
        return Table("Python", columns, (), f"No Python stacks were sampled: {reason}")
    whole = sum(node.time_s for node in stacks.flame if node.parent is None)
    rows = tuple((node.time_s / whole if whole else 0.0, node.time_s, node.gap_s, node.line) for node in stacks.flame)
    period_s = analysis.steps.mean_s if analysis.steps is not None else analysis.trace.window_s
    ran = "; ".join(line_words(gaps.lines[0], stacks.basis) for gaps in worth_showing(stacks, period_s) if gaps.lines)
    by_whom = BY_TRACER * stacks.traced
    return Table("Python", columns, rows, "", f"Training loop by time {per_basis(stacks.basis)}{by_whom}. In gaps: "
                 f"{ran or 'no line was seen'}.", tuple(node.parent for node in stacks.flame),
                 opened=tuple(i for i, node in enumerate(stacks.flame) if node.time_s >= _HOT * whole))


def _wall_time(analysis: Analysis) -> Table:
    columns = (Column("share", portion), Column("time", seconds), Column("part"),
               Column("longest", seconds, spare=True), Column("how often"),
               Column("what the host did", wide=True, prose=True))
    wall = analysis.wall_time
    if wall is None:
        return Table("Time", columns, (), "The trace does not show when it was recorded.")
    rows = tuple((row.share, row.time_s, row.name, row.longest_s or None, row.often, row.what or row.meaning)
                 for row in wall_rows(wall))
    note = wall_title(wall)
    note += f", mean over {len(wall.ranks)} ranks." if wall.ranks else "."
    if wall.per_step_s is not None and analysis.steps is not None and wall.pauses_show(analysis.steps.mean_s):
        note += f" A step takes {seconds(wall.per_step_s)} of wall time, including the time between steps."
    return Table("Time", columns, rows, "", note)


def _flops(value: float) -> str:
    for unit, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= unit:
            return f"{value / unit:.3g} {prefix}"
    return f"{value:,.0f}"


def _gpus(analysis: Analysis) -> Table:
    """The GPUs of the trace by the job's own numbers."""
    columns = (
        Column("GPU", str), Column("busy", percent), Column("compute", percent), Column("coll.", percent, spare=True),
        Column("exposed", percent, spare=True), Column("copies", percent),
        Column("by host", percent, missing="never idle, or most launches that ended idle time are not in the trace"),
        Column("tensor", percent, spare=True, missing="no kernel name shows tensor core use"),
        Column("delay", seconds, missing="the launches are not in the trace"), Column("kernels/s", _count))
    rows = tuple((gpu.gpu, gpu.busy, gpu.compute, gpu.collectives, gpu.collectives_exposed, gpu.copies,
                  gpu.idle_host_fault, gpu.tensor_core_time, gpu.launch_delay_median_s, gpu.kernels_per_s)
                 for gpu in analysis.gpus)
    return Table("GPUs", columns, rows, "No GPU in the trace.", "Shares of the time, with the job's own GPU numbers. "
                 "by host: idle time caused by the host; tensor: kernel time on tensor cores; delay: launch delay.")
