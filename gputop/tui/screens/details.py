"""The texts of the details: of a GPU, a process, the host, the job and a capture."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.style import Style
from rich.text import Text

from gputop.core import samples
from gputop.core.captured_samples import is_undersampled
from gputop.core.framework import LABELS
from gputop.core.metrics import ADAPTER_METRICS, GPU_METRICS, HOST_METRICS
from gputop.profiler.capture.records import CaptureRecord
from gputop.render.gpu_columns import clock_text
from gputop.render.palette import ACCENT, BAD, BOLD, DIM, PLAIN, WARN, bar_style, step_of
from gputop.render.table import BARS, Column, Table, lane_means, table_lines
from gputop.session.capture.captures import HOW_TO_SERVE
from gputop.session.session import Session
from gputop.text import redaction
from gputop.text.commands import short_command, short_description
from gputop.text.units import NA, devices, fit, percent, printable, reading, seconds
from gputop.tui.monitor.status_lines import bar, near_memory_limit, throttled, time_ago

if TYPE_CHECKING:
    from gputop.telemetry.history import HostHistoryPoint
    from gputop.telemetry.step_period import StepPeriodEstimate

_MAX_PROCESSES_LISTED = 8  # in each list of the host's details
_WIDE_FROM_COLUMNS = 60  # with fewer, labels and figures are closer together


class _Sheet:
    """Lines of a label, a value and a remark, in columns as far as there is room."""

    def __init__(self, width: int) -> None:
        self.out = Text()
        self.width = width
        self._label, self._value = (22, 9) if width >= _WIDE_FROM_COLUMNS else (15, 0) if width >= 32 else (2, 0)

    def head(self, title: str, more: str = "") -> None:
        self.out.append(f"\n{title}", BOLD)
        self.out.append(f"  {more}\n" if more else "\n", DIM)

    def line(self, label: str, value: str, more: str = "", style: Style = PLAIN) -> None:
        """A label that is too long for its column gets a line of its own."""
        needs_line = len(label) > self._label - 2
        self.out.append(f"{label}\n{'':{self._label}}" if needs_line else f"{label:<{self._label}}", DIM)
        self.out.append(f"{value:<{self._value}}" if more else value, DIM if value == NA else style)
        self.out.append(f"  {more}\n" if more else "\n", DIM)

    def figure(self, label: str, r: samples.Reading, more: str = "", style: Style = PLAIN) -> None:
        self.line(label, reading(r, spelled=True), printable(r.reason or more), style)


def _cores(r: samples.Reading) -> str:
    return NA if r.value is None else f"{r.value:.1f} cores"


def gpu_text(gpu: samples.GpuSample, width: int = 100) -> Text:
    """Every reading of one GPU with its source, or why it has no value. ``width``: of a line."""
    sheet = _Sheet(width)
    out = sheet.out
    out.append(f"{printable(gpu.info.name)}\n", BOLD)
    if gpu.message:
        out.append(f"{printable(gpu.trouble)}\n", BAD)
    out.append("\n")
    sheet.line("UUID", gpu.info.uuid)
    sheet.line("PCI bus", gpu.info.pci_bus_id, "" if gpu.info.numa_node is None else f"NUMA node {gpu.info.numa_node}")
    out.append("\n")
    readings = [(metric, gpu[metric.id]) for metric in GPU_METRICS.values()]
    own_reasons = [(metric, r) for metric, r in readings if r.reason is None or r.reason != gpu.message]
    for metric, r in own_reasons:
        more = [(r.source or "") + (" (coarse)" if r.coarse else "")]
        more += [clock_text(gpu)] if metric.id == "sm_clock_hz" else []
        sheet.figure(metric.label, r, ", ".join(filter(None, more)), BOLD)
    if len(own_reasons) < len(readings):
        out.append(f"{'All other values' if own_reasons else 'All values'} are {NA} for the reason above.\n", DIM)
    for event in gpu.xids:
        out.append(f"\nXid {event.xid} at {time.strftime('%H:%M:%S', time.localtime(event.time_s))}", BAD)
    if gpu.xids_reason is not None:
        out.append(f"\nXid errors are not reported: {printable(gpu.xids_reason)}", DIM)
    if gpu.clock_event_reasons:
        out.append("\nClocks limited by: " + ", ".join(gpu.clock_event_reasons), WARN)
    return out


def process_text(p: samples.ProcessSample, now_s: float, gone: bool = False, width: int = 100) -> Text:
    """Everything known about a process; ``gone``: it has ended. The command line is complete, with secrets hidden."""
    sheet = _Sheet(width)
    out = sheet.out

    def line(field: str, label: str, value: str | None, more: str = "") -> None:
        """``value`` None: it is not known."""
        reason = p.reasons.get(field) or p.reason or "not sampled"
        sheet.line(label, NA if value is None else value, printable(reason if value is None else more))

    if gone:
        out.append("The process has ended or no longer holds a GPU; this is its last sample.\n", WARN)
    out.append(printable(redaction.command(p.command)) if p.command is not None
               else f"command: {NA}, {printable(p.reason or 'unknown')}", BOLD)
    out.append("\n\n")
    numbers = [f"{p.local_pid} where gputop runs"] if p.local_pid is not None else []
    numbers += [f"{p.container_pid} in its container"] if p.container_pid is not None else []
    sheet.line("PID", str(p.pid), ", ".join(numbers))
    if p.note:
        sheet.line("", printable(p.note))
    line("parent_pid", "parent", None if p.parent_pid is None else str(p.parent_pid))
    if p.framework:
        sheet.line("framework", LABELS.get(p.framework, printable(p.framework)), "based on its loaded libraries")
    line("user", "user", printable(p.user) if p.user else None)
    started = None if p.started_s is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(p.started_s))
    line("started_s", "started", started, "" if p.started_s is None else time_ago(now_s, p.started_s))
    # Not in a container, or it cannot be read.
    container = printable(p.container) if p.container else None if "container" in p.reasons else "none"
    line("container", "container", container)
    if p.kubernetes is not None:
        pod = p.kubernetes
        names = f"{pod.namespace}/{pod.pod}" if pod.pod is not None else NA
        sheet.line("pod", printable(names), printable(pod.reason or f"container {pod.container}"))
        sheet.line("pod UID", printable(pod.pod_uid))
    unset = None if "cuda_visible_devices" in p.reasons else "not set"
    for name, value in (("CUDA_VISIBLE_DEVICES", p.cuda_visible_devices), ("CUDA_DEVICE_ORDER", p.cuda_device_order)):
        line("cuda_visible_devices", name, unset if value is None else printable(value) or "empty: no GPU")
    out.append("\n")
    sheet.line("CPU, with children", _cores(p.cpu_cores), printable(p.cpu_cores.reason or ""))
    sheet.figure("memory (RSS)", p.rss_bytes)
    if p.numa_nodes:
        sheet.line("bound to", f"NUMA node {', '.join(map(str, p.numa_nodes))}", "based on the CPUs that it may use")
    line("threads", "threads", None if p.threads is None else str(p.threads))
    sheet.figure("storage read", p.io_read_bytes_per_s, "including children, excluding reads from the page cache")
    sheet.figure("storage written", p.io_write_bytes_per_s)
    if p.cgroup is not None:
        sheet.head("Control group", f"{printable(p.cgroup.name)}, all of its processes")
        _group_lines(sheet, p.cgroup)
    _gpus_of_process(out, p, width)
    return out


_GPU_COLUMNS = (Column("GPU", least=4), Column("memory", str, least=8), Column("SM", str, least=6), Column("kind"))


def _gpus_of_process(out: Text, p: samples.ProcessSample, width: int) -> None:
    table = Table("GPUs", _GPU_COLUMNS, tuple(
        (str(index) if on.mig is None else f"{index}:{on.mig}", reading(on.memory_bytes, spelled=True),
         reading(on.sm_ratio), on.kind) for index, on in sorted(p.gpus.items())), "")
    head, *rows = table_lines(table, width) if p.gpus else ["GPU   none"]
    out.append(f"\n{head}\n", BOLD)
    for row in rows:
        out.append(f"{row}\n")
    for reason in sorted({r.reason for on in p.gpus.values() for r in (on.memory_bytes, on.sm_ratio) if r.reason}):
        out.append(f"{NA}: {printable(reason)}\n", DIM)


def _load_of_cores(sheet: _Sheet, host: samples.HostSample) -> None:
    """Every core as a cell, in rows of 32 or as many as fit, colored by load; full ones are marked."""
    out = sheet.out
    per_row = next((n for n in (32, 16, 8) if 7 + 2 * n <= sheet.width), 4)
    for begin in range(0, len(host.core_ratios), per_row):
        out.append(f"{begin:>5}  ", DIM)
        for core in host.core_ratios[begin:begin + per_row]:
            full = core >= samples.FULL_CORE_RATIO
            level = BARS[min(7, int(core * 8))]
            out.append(level + ("!" if full else " "), bar_style(step_of(core)))
        out.append("\n")


def host_text(sample: samples.NodeSample, width: int = 100, past: Sequence[HostHistoryPoint] = ()) -> Text:
    """The host: load of each core, memory, disk, network, limits, and who uses them. ``width``: of a line;
    ``past``: of the last minutes, for what has a history."""
    host = sample.host
    sheet = _Sheet(width)
    out = sheet.out
    out.append(f"{printable(host.hostname)}\n\n", BOLD)
    for metric in HOST_METRICS.values():
        r = host[metric.id]
        if metric.id != "cpu_ratio" or r.value is None:
            sheet.figure(metric.label, r, metric.help)
        else:
            text, style = bar(r.value, 9)
            cores = f"{percent(r.value)} of {host.cpu_count or '?'} cores, {host.full_cores} full"
            sheet.line(metric.label, text, cores, style)
    for adapter in host.adapters:
        _adapter_lines(sheet, adapter, past)
    limit = host.cpu_limit_cores
    if limit is None:
        sheet.line("CPU limit", "none known")
    else:
        sheet.line("CPU limit", f"{limit:g} cores", "limited by control groups and CPU affinity")
    for group, of in _groups(sample):
        sheet.head(f"Control group of {of}", printable(group.name))
        _group_lines(sheet, group)
    if host.core_ratios:
        sheet.head("Cores", "height: busy share; !: fully used, for example by one Python thread")
        _load_of_cores(sheet, host)
    else:
        sheet.head("Cores", "the load of individual cores is unknown here")
    sheet.head("GPU processes by CPU", "including their children, for example input workers")
    busy = sorted(sample.processes, key=lambda p: -(p.cpu_cores.value or 0.0))[:_MAX_PROCESSES_LISTED]
    for p in busy:
        _row(sheet, p, devices(p))
    if not busy:
        out.append("  no process holds a GPU\n", DIM)
    _top_processes(sheet, sample)
    return out


def _adapter_lines(sheet: _Sheet, adapter: samples.AdapterSample, past: Sequence[HostHistoryPoint]) -> None:
    node = "" if adapter.numa_node is None else f", NUMA node {adapter.numa_node}"
    sheet.head(f"RDMA adapter {printable(adapter.name)}",
               printable(f"{adapter.link_layer or 'link'} {adapter.state or 'of an unknown state'}{node}"))
    link = adapter["rdma_max_bytes_per_s"].value
    for metric in ADAPTER_METRICS.values():
        r = adapter[metric.id]
        share = f"{percent(r.value / link)} of the link, " if (
            metric.full_scale is not None and r.value is not None and link) else ""
        sheet.figure(metric.label, r, share + metric.help)
    traffic = [max(rates) / link for point in past if link and (rates := point.rdma_bytes_per_s.get(adapter.name))]
    if traffic:
        columns = min(len(traffic), max(8, sheet.width - 24))
        sheet.out.append(f"{'the fuller way':<22}" if sheet.width >= _WIDE_FROM_COLUMNS else "  ", DIM)
        for mean in lane_means(tuple(traffic), columns):
            level = min(1.0, mean or 0.0)
            sheet.out.append(BARS[min(7, int(level * 8))], bar_style(step_of(level)))
        sheet.out.append(f"\n{'':22}the last {seconds(past[-1].time_s - past[0].time_s)}\n", DIM)


def _groups(sample: samples.NodeSample) -> list[tuple[samples.CgroupSample, str]]:
    """The control groups of gputop and of the GPU processes, each once, with the names of their members."""
    by_name: dict[str, tuple[samples.CgroupSample, list[str]]] = {}
    own_group = sample.host.cgroup
    for group, who in [(own_group, "gputop"), *((p.cgroup, str(p.pid)) for p in sample.processes)]:
        if group is not None:
            by_name.setdefault(group.name, (group, []))[1].append(who)
    out = []
    for group, members in by_name.values():
        pids = [who for who in members if who != "gputop"]
        of = ["gputop"] if "gputop" in members else []
        of += [f"PID {', '.join(pids[:4])}{' …' if len(pids) > 4 else ''}"] if pids else []
        out.append((group, " and ".join(of)))
    return out


def _group_lines(sheet: _Sheet, group: samples.CgroupSample) -> None:
    """CPU and memory of a control group against their limits; a limit that is reached is marked."""
    limit, used, held = group["cpu_limit_cores"], group["cpu_used_cores"], group["cpu_throttled_ratio"]
    of = f" of {limit.value:g}" if limit.value is not None else ""
    text = NA if used.value is None else f"{used.value:.1f}{of} cores"
    more = [limit.reason] if limit.reason and limit.reason != used.reason else []
    sheet.line("CPU", text, ", ".join(printable(reason) for reason in (*more, used.reason) if reason))
    if held.value is not None:
        sheet.line("CPU throttled", percent(held.value),
                   "of the time, the quota was used up and all threads waited",
                   WARN if throttled(group) else PLAIN)
    limit, used, kills = group["memory_limit_bytes"], group["memory_used_bytes"], group["oom_kills"]
    of = (f" of {reading(limit, spelled=True)}, {percent(used.value / limit.value)}"
          if used.value is not None and limit.value else "")
    reason = used.reason or limit.reason or "excluding page cache that can be freed immediately"
    sheet.line("memory", reading(used, spelled=True) + of, printable(reason),
               WARN if of and near_memory_limit(group) else PLAIN)
    if kills.value:
        sheet.line("OOM kills", f"{kills.value:.0f}", "processes that the kernel killed at the memory limit", BAD)


def _row(sheet: _Sheet, p: samples.ProcessSample | samples.HostProcess, gpus: str) -> None:
    """A process in one line; in two where the line is short."""
    memory = reading(p.rss_bytes, spelled=True)
    figures = f"{p.pid:>9} {fit(printable(p.user or '?'), 9)}{_cores(p.cpu_cores):>11} {memory:>8} "
    where = f"GPU {gpus} " if gpus else ""
    if sheet.width >= _WIDE_FROM_COLUMNS:
        figures += f"{where:<9}"
    else:
        sheet.out.append(f"{figures.rstrip()}\n", DIM)
        figures = f"{'':10}{where}"
    sheet.out.append(figures, DIM)
    command = NA if p.command is None else printable(short_command(p.command))
    sheet.out.append(fit(command, max(8, sheet.width - len(figures))).rstrip() + "\n", PLAIN)


def _used(r: samples.Reading, least: float) -> float:
    """Key for sorting: 0.0 for what would be shown as none."""
    return r.value if r.value is not None and r.value >= least else 0.0


def _top_processes(sheet: _Sheet, sample: samples.NodeSample) -> None:
    """Add the processes of the whole node that use most: a job without a GPU can hold up those with one."""
    host = sample.host
    holders = {p.local_pid or p.pid: devices(p) for p in sample.processes}
    for title, more, key in (
        ("All processes by CPU", "each without its children, over several seconds", lambda p: _used(p.cpu_cores, 0.05)),
        ("All processes by memory", "resident; shared pages count for each process", lambda p: _used(p.rss_bytes, 1.0)),
    ):
        sheet.head(title, more)
        shown = sorted((p for p in host.top_processes if key(p)), key=key, reverse=True)[:_MAX_PROCESSES_LISTED]
        for p in shown:
            _row(sheet, p, holders.get(p.pid, ""))
        if not shown:
            reasons = {p.cpu_cores.reason for p in host.top_processes if p.cpu_cores.reason}
            reason = host.top_reason or (", ".join(sorted(reasons)) if reasons else "no process used the CPU")
            sheet.out.append(f"  {NA if host.top_reason or reasons else 'none'}: {printable(reason)}\n", DIM)


def job_text(session: Session) -> Text:
    """The job: its profiler servers and its step period."""
    out = Text()
    out.append("Profiler servers\n", BOLD)
    for server in session.watch.servers:
        out.append("✗ " if server.problem else "● ", BAD if server.problem else ACCENT)
        about = server.problem or short_description(server.description)
        out.append(f"{printable(server.address)}  {printable(about)}")
        out.append(f"  PID {server.pid}\n" if server.pid is not None else "\n", DIM)
        if server.owner and not server.asked:
            out.append(f"  belongs to user {printable(server.owner)}; gputop asks before a capture\n", WARN)
    if not session.watch.servers:
        out.append("none found. " if session.watch.servers_known else "still looking. ", WARN)
        out.append(HOW_TO_SERVE + "\n", DIM)
    for note in session.watch.discovery_notes:
        out.append(printable(note) + "\n", DIM)
    if session.feed.step_period is not None:
        out.append("\nStep period\n", BOLD)
        step_s = None if session.results.last_capture is None else session.results.last_capture.median_step_s
        if session.feed.sample is not None and not session.feed.sample.gpus:
            by_capture = "" if step_s is None else f" In the last capture, a step took {seconds(step_s)}."
            out.append(f"unknown: gputop estimates it from GPU load, and there are no GPUs here.{by_capture}\n")
        else:
            out.append(printable(_period(session.feed.step_period, step_s)) + "\n")
    return out


def _period(estimate: StepPeriodEstimate, step_s: float | None) -> str:
    """The step period by the load alone, or why there is none. ``step_s``: the step time of the capture."""
    from gputop.telemetry.step_period import max_interval_for

    if estimate.period_s is None:
        text = f"not visible in the GPUs' load: {estimate.reason or 'not found'}"
    else:
        text = f"{seconds(estimate.period_s)}, estimated from the GPUs' load, confidence {estimate.confidence:.1f}"
    if step_s is None or estimate.interval_s is None or not is_undersampled(step_s, estimate.interval_s):
        return text
    interval_s = max_interval_for(step_s)
    text += f". The steps in the capture are too short to be seen with a sample every {estimate.interval_s:.2g} s"
    return text + ("" if interval_s is None else f": press +, or start gputop with --interval {interval_s:g}")


def capture_text(record: CaptureRecord) -> Text:
    """The remarks and the report of a capture, or why it could not be analyzed."""
    parts = [*map(printable, record.remarks), *(f"profiler: {printable(n)}" for n in record.notes)]
    parts += [record.report] if record.problem is None else [
        printable(str(record.path)), printable(record.problem.message), printable(record.problem.fix)]
    if record.path.exists():
        from gputop.launch.xprof import logdir_of, open_command

        parts.append(f"Open the trace in XProf: {printable(open_command(logdir_of(record.path)))}")
    return Text("\n".join(parts))
