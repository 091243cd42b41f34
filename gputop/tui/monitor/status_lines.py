"""The single lines of the main screen: header, host, training job. Pure."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import Struct
from rich.style import Style

from gputop.core.captured_samples import SURE, is_undersampled, steps_per_period
from gputop.core.errors import sentences
from gputop.core.samples import CgroupSample, HostSample, NodeSample, Reading
from gputop.render.gpu_columns import gpu_kinds
from gputop.render.palette import ACCENT, BAD, BOLD, DARK, DIM, PLAIN, WARN, bar_style, step_of
from gputop.render.styled_text import StyledText, justify
from gputop.text.units import NA, bytes_, percent, printable, rate, reading, seconds

if TYPE_CHECKING:
    from gputop.profiler.capture.records import CaptureRecord, CaptureStatus, Server
    from gputop.telemetry.step_period import StepPeriodEstimate

# These use the palette's colors: colors of the terminal itself turn black under a box that dims the screen.
SIMULATED_STYLE = Style(color=DARK.names["ground"], bgcolor=DARK.names["warn"], bold=True)
REPLAY_STYLE = Style(color=DARK.names["ground"], bgcolor=DARK.names["accent"], bold=True)


_BAR_COLORS = 3  # few: with a new one all cells of a bar are sent, not only those at its end
_RATE_CELLS = 9  # the longest rate, "99.4 MB/s"


def header(sample: NodeSample | None, interval_s: float, paused: bool, width: int,
           replay: tuple[str, str] | None = None) -> list[StyledText]:
    """Node, GPUs, where the figures come from, what gputop itself costs, the time.

    ``replay`` is a badge for data that is not live, and how it plays: ("REPLAY", "2×"), ("SNAPSHOT", "").
    """
    if sample is None:
        return [(" gputop ", BOLD), ("  opening the recording…" if replay else "  opening the GPUs…", DIM)]
    left: list[StyledText] = [(" gputop ", BOLD), (" " + printable(sample.host.hostname) + " ", PLAIN)]
    if sample.simulated:
        left.insert(1, (" SIMULATED ", SIMULATED_STYLE))
    if replay:
        left.insert(1, (f" {replay[0]} ", REPLAY_STYLE))
    # MIG instances of a GPU that is listed itself are counted separately.
    whole = {g.info.index for g in sample.gpus if g.info.mig is None}
    instances = sum(g.info.mig is not None for g in sample.gpus if g.info.index in whole)
    left.append((f" {gpu_kinds(sample) or 'no GPU'} ", PLAIN))
    if instances:
        left.append((f" {instances} MIG ", PLAIN))
    stamp = "%Y-%m-%d %H:%M:%S " if replay else "%H:%M:%S "
    right: list[StyledText] = [(time.strftime(stamp, time.localtime(sample.time_s)), PLAIN)]
    if replay and replay[1]:
        right.insert(0, (f"{replay[1]}  ", WARN))
    if paused:
        right.insert(0, ("PAUSED  ", WARN))
    # Without GPUs the source is the reason, which stands in their place.
    # What a demo shows is told as such: it is no verdict of gputop's.
    source = printable(sample.source).replace("SIMULATED: ", "demo: ", 1) if sample.gpus else ""
    cost = "" if sample.own_cpu_ratio is None else f"gputop {100 * sample.own_cpu_ratio:.1f}% CPU"
    used = sum(len(t) for t, _ in (*left, *right))
    for extra in (f" {source} ", f" every {interval_s:.4g} s ", f" {cost} "):
        if extra.strip() and used + len(extra) < width:
            left.append((extra, DIM))
            used += len(extra)
    badges = left[:1 + bool(replay) + sample.simulated]
    if sum(len(text) for text, _ in (*badges, *right)) >= width:
        right = []  # the badges are more important than the time
    return justify(left, right, width)


def replay_line(width: int, place_s: tuple[float, float] | None = None,
                step_period: StepPeriodEstimate | None = None) -> list[StyledText]:
    """Line in the place of the training job: how far a recording is played and how long it is (``place_s``); None: a
    snapshot."""
    if place_s is None:
        keys = "snapshot of the node  ← →: earlier minutes  t: its capture"
        return justify([(" Snapshot  ", BOLD), (keys, DIM)], [], width)
    played_s, length_s = place_s
    left: list[StyledText] = [(" Recording  ", BOLD), (f"{_clock(played_s)} of {_clock(length_s)}  ", PLAIN)]
    period = _first_that_fits(_step_period(step_period, None), width - _cells(left) - _MIN_PLAYED_BAR - 2)
    room = width - _cells(left) - (_cells(period) + 2 if period else 1)
    return justify([*left, bar(played_s / length_s if length_s > 0 else 1.0, max(0, room))], period, width)


_MIN_PLAYED_BAR = 20  # columns


def _clock(time_s: float) -> str:
    """Time as players show it: 3:20, 1:03:20."""
    minutes, rest_s = divmod(int(time_s), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest_s:02}" if minutes >= 60 else f"{minutes}:{rest_s:02}"


def time_ago(now_s: float, then_s: float) -> str:
    """Age in whole units."""
    ago_s = max(0.0, now_s - then_s)
    return f"{ago_s:.0f} s ago" if ago_s < 99.5 else f"{seconds(ago_s)} ago"


def bar(level: float, width: int) -> StyledText:
    """A horizontal bar, 0-1, in eighths of a cell."""
    level = min(1.0, max(0.0, level))
    full, part = divmod(round(level * width * 8), 8)
    text = "█" * full + ("▏▎▍▌▋▊▉"[part - 1] if part else "")
    return text.ljust(width), bar_style(step_of(round(_BAR_COLORS * level) / _BAR_COLORS))


def _labeled(label: str, r: Reading, text: str) -> list[StyledText]:
    return [(f" {label} ", DIM), ("N/A" if r.value is None else text, DIM if r.value is None else PLAIN)]


_NEAR_LIMIT = 0.9  # share of a control group's memory; above it the kernel reclaims pages or kills a process


def throttled(group: CgroupSample) -> bool:
    """Return whether its CPU quota runs out as often as the rule host_cpu_saturated requires."""
    share = group["cpu_throttled_ratio"].value
    if not share:
        return False  # as nearly always: the limits need not be there for the first picture
    from gputop.advice.registry import limit

    return share >= limit("host_cpu_saturated.throttled_enter")


def near_memory_limit(group: CgroupSample) -> bool:
    used, multiple = group["memory_used_bytes"].value, group["memory_limit_bytes"].value
    return used is not None and multiple is not None and used >= _NEAR_LIMIT * multiple


def _reached_limits(sample: NodeSample) -> list[str]:
    """The limits that a control group of a GPU process has reached, else those of gputop's own; each once."""
    groups = [group for p in sample.processes if (group := p.cgroup) is not None]
    if not groups and sample.host.cgroup is not None:
        groups = [sample.host.cgroup]
    out: dict[str, None] = {}
    for group in groups:
        if throttled(group):
            out[f"CPU quota: throttled {percent(group['cpu_throttled_ratio'].value or 0.0)}"] = None
        if near_memory_limit(group):
            out[f"memory limit: {reading(group['memory_used_bytes'])}/{reading(group['memory_limit_bytes'])}"] = None
    return list(out)


def _rdma(h: HostSample) -> list[list[StyledText]]:
    """Traffic through all RDMA adapters, and how full the fullest is; nothing without one."""
    if not h.adapters:
        return []
    ways = [(way, [v for adapter in h.adapters if (v := adapter[metric].value) is not None])
            for way, metric in (("↓", "rdma_rx_bytes_per_s"), ("↑", "rdma_tx_bytes_per_s"))]
    text = " ".join(f"{way} {rate(sum(rates)) if rates else NA}" for way, rates in ways)
    fullest = [full for adapter in h.adapters if (full := adapter.load_ratio) is not None]
    several = len(h.adapters) > 1
    more = f"{', fullest' if several else ''} {percent(max(fullest))}" if fullest else ""
    name = f" RDMA ×{len(h.adapters)} " if several else " RDMA "
    return [[(name, DIM), (text, PLAIN if any(rates for _, rates in ways) else DIM), (more, DIM)]]


def host(sample: NodeSample, width: int) -> list[StyledText]:
    """CPU, memory, disk and network of the node; parts that do not fit are left out from the right."""
    h = sample.host
    cpu, memory, total = h["cpu_ratio"], h["memory_used_bytes"], h["memory_total_bytes"]
    parts: list[list[StyledText]] = []
    runs: list[StyledText] = [(" Host ", BOLD), (" CPU ", DIM)]
    if cpu.value is None:
        runs.append(("N/A", DIM))
    else:
        runs += [bar(cpu.value, 8 if width < 130 else 16), (f" {percent(cpu.value):>4}", PLAIN)]
        if h.cpu_count:
            runs.append((f" of {h.cpu_count} cores" + (f", {h.full_cores} full" if h.full_cores else ""), DIM))
    parts.append(runs)
    parts += [[(f" {text}", WARN)] for text in _reached_limits(sample)]
    wait = h["iowait_ratio"]
    ram = "" if memory.value is None or total.value is None else f"{bytes_(memory.value)}/{bytes_(total.value)}"
    parts.append(_labeled("RAM", memory, ram))
    parts += _rdma(h)
    for label, metric in (("disk ↓", "disk_read_bytes_per_s"), ("net ↓", "net_rx_bytes_per_s"),
                          ("disk ↑", "disk_write_bytes_per_s"), ("net ↑", "net_tx_bytes_per_s")):
        r = h[metric]
        # As wide for every rate: what is behind it would move, and be sent, each time its length changes.
        parts.append(_labeled(label, r, "" if r.value is None else rate(r.value).ljust(_RATE_CELLS)))
    parts.append(_labeled("I/O wait", wait, "" if wait.value is None else percent(wait.value)))
    out: list[StyledText] = []
    used = 0
    for part in parts:
        size = _cells(part) + 1
        blanks = len(part[-1][0]) - len(part[-1][0].rstrip())
        if used + size - blanks > width and out:
            break
        out += [*part, (" ", PLAIN)]
        used += size
    return out


class JobState(Struct, frozen=True):
    servers: tuple[Server, ...]
    servers_known: bool  # they were looked for
    status: CaptureStatus | None = None
    record: CaptureRecord | None = None  # of the last capture
    step_period: StepPeriodEstimate | None = None
    auto_capture: str = ""  # how that stands; "" without one
    ended: Server | None = None  # the server of a job that has ended
    restarted_s: float | None = None  # when the job was started again
    unserved: bool = False  # jobs on the GPUs have no server, and those that answer are of jobs beside them


def job(state: JobState, now_s: float, width: int) -> list[StyledText]:
    """The training job: its profiler server, step time and estimated step period; its progress while a capture runs.
    """
    servers, status, record, ended = state.servers, state.status, state.record, state.ended
    if status is not None and status.running:
        return _progress(status, now_s, width)
    from gputop.profiler.capture.records import usable  # not for the first frame, nor is the next
    from gputop.text.commands import short_description

    left: list[StyledText] = [(" Job  ", BOLD)]
    if ended is not None:
        about = f"  {printable(ended.address)}  {printable(short_description(ended.description))}"
        another = bool(usable(servers))
        return justify([*left, ("■ ", BAD), (f"process {ended.pid} has ended", WARN), (about, DIM)],
                       [("c: capture another job… ", ACCENT)] if another else [], width)
    if status is not None and status.phase == "failed":
        text = printable(sentences(status.message, status.fix))
        return justify([(" Job  ", BOLD), ("capture failed: ", BAD), (text, PLAIN)], [], width)
    answering = () if state.unserved else usable(servers)
    step: list[StyledText] = []
    right: list[StyledText] = []
    if record is not None:
        ago = time_ago(now_s, record.time_s)
        if record.step_text:
            step = [(f"step time {record.step_text}  ", BOLD)]
            right = [(f"captured {ago} ", DIM)] if width >= _WIDE_JOB else []
        else:
            right = [(f"no steps in the capture, {ago} ", DIM)]
    elif answering:
        right = [("c: capture a trace ", ACCENT)]
        if state.restarted_s is not None:
            right.insert(0, (f"restarted {time_ago(now_s, state.restarted_s)}  ", PLAIN))
    left += _servers(state, answering, width)
    room = width - min(_cells(left), _JOB_CELLS) - _cells(step) - _cells(right) - 1
    median_s = record.median_step_s if record is not None else None
    period = _first_that_fits(_step_period(state.step_period, median_s, now_s - (state.restarted_s or 0.0)), room)
    return justify(left, [*step, *period, *right], width)


def _servers(state: JobState, answering: Sequence[Server], width: int) -> list[StyledText]:
    """The server that answers and its job; or why there is none, and what to do."""
    from gputop.text.commands import short_description

    if answering:
        first = answering[0]
        # The job's name tells more than its server's address where there is no room for both.
        address = printable(first.address) + "  " if width >= _WIDE_JOB or not first.description else ""
        return [("● ", ACCENT), (address, PLAIN),
                *([(printable(state.auto_capture) + "  ", ACCENT)] if state.auto_capture else []),
                (printable(short_description(first.description)), DIM),
                *([(f"  +{len(answering) - 1} more", DIM)] if len(answering) > 1 else [])]
    broken = next((s for s in state.servers if s.asked and s.problem), None)
    if broken is not None:
        return [("✗ ", BAD), (printable(broken.address), PLAIN), ("  " + printable(broken.problem or ""), WARN)]
    if not state.servers_known:
        return [("looking for profiler servers…", DIM)]
    none = "no profiler server in the job on the GPUs" if state.unserved else "no profiler server found"
    return [(f"{none}   c: start one   a: enter its address" if width >= _WIDE_JOB else
             "no profiler server   c: start one", DIM)]


_WIDE_JOB = 60  # columns: less has no room for the server's address and the age of the capture
_JOB_CELLS = 20  # the server's share of the line, before the period is told in fewer words


def _cells(runs: Sequence[StyledText]) -> int:
    return sum(len(text) for text, _ in runs)


def _first_that_fits(texts: Sequence[list[StyledText]], room: int) -> list[StyledText]:
    return next((way for way in texts if _cells(way) <= room), [])


def _step_period(step_period: StepPeriodEstimate | None, step_s: float | None, age_s: float = math.inf
                 ) -> list[list[StyledText]]:
    """The estimated step period against the step time of a trace: a long way to say it, then shorter ones. Nothing
    where it is not sure, as the details of the job tell, or of a job so young that it may be that of the one before."""
    if step_period is None or step_period.period_s is None or step_period.interval_s is None or (
            age_s < 2 * step_period.period_s):
        return []
    if step_period.confidence < SURE or (step_s is not None and is_undersampled(step_s, step_period.interval_s)):
        return []
    shown: list[StyledText] = [("period ", DIM), (seconds(step_period.period_s), BOLD)]
    gpus, varying = len(step_period.gpus), step_period.varying_gpus
    part_of_gpus = f" on {gpus} of {varying} GPUs" if gpus < varying else ""
    count = steps_per_period(step_period.period_s, step_s) if step_s is not None else None
    multiple = f" ≈ {count} step{'s' if count != 1 else ''}" if count is not None else ""
    return [[*shown, (text + "  ", DIM)] for text in (part_of_gpus + multiple, multiple, "")]


_PHASES = {"starting": "starting a profiler server in",
           "waiting": "capture waits for", "connecting": "connecting to",
           "probing": "taking a short test capture of", "recording": "recording",
           "overview": "watching for rare events in", "receiving": "receiving the trace from",
           "saving": "saving the trace from", "analyzing": "analyzing the trace from"}


def _progress(status: CaptureStatus, now_s: float, width: int) -> list[StyledText]:
    length_s = status.overview_s if status.phase == "overview" else (
        status.asked_s if status.chosen_s is None else status.chosen_s)
    share = min(1.0, status.elapsed_s / length_s) if length_s else 1.0
    of = status.message if status.phase == "waiting" else status.address
    left: list[StyledText] = [(" Job  ", BOLD), ("● ", BAD), (f"{_PHASES[status.phase]} {printable(of)} ", PLAIN)]
    right: list[StyledText] = []
    if status.phase in ("recording", "overview"):
        right = [bar(share, max(6, min(30, width - 60))),
                 (f" {status.elapsed_s:4.1f} of {length_s:g} s", PLAIN),
                 ("  x: stop ", ACCENT) if status.stoppable else (" ", PLAIN)]
        short = status.why.partition(", ")[0]
        ways: tuple[str, ...] = (status.why, short) if status.why and status.phase == "recording" else ()
        if ways and status.overview_s:
            then = f"then {status.overview_s:g} s of rare events"
            ways = (f"{status.why}, {then}", f"{short}, {then}", then)
        left += _first_that_fits([[(f"({printable(way)}) ", DIM)] for way in ways], width - _cells([*left, *right]) - 1)
    elif status.phase == "waiting":
        ways = ("esc: capture now  x: cancel ", "esc: capture now ")
        right = _first_that_fits([[(keys, ACCENT)] for keys in ways], width - _cells(left))
    elif status.phase not in ("starting", "connecting"):
        # A capture that is opened again has one status: its clock runs here.
        since_s = max(0.0, now_s - status.time_s) if status.time_s else 0.0
        right = [(f"{status.elapsed_s + since_s:.0f} s ", DIM)]
    return justify(left, right, width)
