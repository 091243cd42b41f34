"""What the boxes say that open on a process, on the host's line and on the job's."""

from __future__ import annotations

import time

from rich.text import Text

from gputop.export import redact
from gputop.metrics import HOST_METRICS
from gputop.samples import FULL_CORE_RATIO, CgroupSample, HostSample, NodeSample, ProcessSample, Reading
from gputop.session import Session
from gputop.text import NA, devices, fit, printable, ratio, reading, seconds
from gputop.tui.palette import ACCENT, BAD, BOLD, DIM, PLAIN, WARN, bar_style, step_of
from gputop.tui.rows import bar, near_memory_limit, since, throttled

_LABEL = 22
_TOP = 8  # processes in each list under the host


def _line(out: Text, label: str, value: str, more: str = "") -> None:
    out.append(f"{label:<{_LABEL}}", DIM)
    out.append(value, PLAIN if value != NA else DIM)
    out.append(f"  {more}\n" if more else "\n", DIM)


def _figure(out: Text, label: str, r: Reading, more: str = "") -> None:
    _line(out, label, reading(r), printable(r.reason or more))


def _cores(r: Reading) -> str:
    return NA if r.value is None else f"{r.value:.1f} cores"


def process_text(p: ProcessSample, now_s: float, gone: bool = False) -> Text:
    """All that is known of a process, or was (``gone``); its command line whole, secrets hidden."""
    out = Text()
    if gone:
        out.append("It holds no GPU any more, or has ended: this is the last look.\n", WARN)
    why = p.reasons
    out.append(printable(redact.command(p.command)) if p.command is not None
               else f"command: {NA}, {printable(p.reason or 'not known')}", BOLD)
    out.append("\n\n")
    numbers = [f"{p.local_pid} where gputop runs"] if p.local_pid is not None else []
    numbers += [f"{p.container_pid} in its container"] if p.container_pid is not None else []
    _line(out, "PID", str(p.pid), ", ".join(numbers))
    if p.note:
        _line(out, "", printable(p.note))
    _line(out, "parent", NA if p.parent_pid is None else str(p.parent_pid))
    _line(out, "user", printable(p.user) if p.user else NA, printable(why.get("user", "")))
    started = NA if p.started_s is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(p.started_s))
    _line(out, "started", started, "" if p.started_s is None else since(now_s, p.started_s))
    _line(out, "container", printable(p.container) if p.container else "none" if "container" not in why else NA,
          printable(why.get("container", "")))
    unread = why.get("cuda_visible_devices")
    for name, value in (("CUDA_VISIBLE_DEVICES", p.cuda_visible_devices), ("CUDA_DEVICE_ORDER", p.cuda_device_order)):
        shown = NA if value is None and unread else "not set" if value is None else printable(value) or "empty: no GPU"
        _line(out, name, shown, printable(unread or "") if value is None else "")
    out.append("\n")
    _line(out, "CPU, with children", _cores(p.cpu_cores), printable(p.cpu_cores.reason or ""))
    _figure(out, "memory (RSS)", p.rss_bytes)
    _line(out, "threads", NA if p.threads is None else str(p.threads))
    _figure(out, "from storage", p.io_read_bytes_per_s, "with children; what the page cache answers is not in it")
    _figure(out, "to storage", p.io_write_bytes_per_s)
    if p.cgroup is not None:
        out.append("\nControl group", BOLD)
        out.append(f"  {printable(p.cgroup.name)}, all that run in it\n", DIM)
        _group_lines(out, p.cgroup)
    out.append(f"\n{'GPU':<6}{'memory':>10}{'SM':>8}  kind\n", BOLD)
    for index, on in sorted(p.gpus.items()):
        name = str(index) if on.mig is None else f"{index}:{on.mig}"
        out.append(f"{name:<6}{reading(on.memory_bytes):>10}{reading(on.sm_ratio):>8}  {printable(on.kind)}\n")
    for reason in sorted({r.reason for on in p.gpus.values() for r in (on.memory_bytes, on.sm_ratio) if r.reason}):
        out.append(f"{NA}: {printable(reason)}\n", DIM)
    return out


def _load_of_cores(host: HostSample) -> Text:
    """Every core as a cell in rows of 32, coloured and, for those without time left, marked."""
    out = Text()
    for begin in range(0, len(host.core_ratios), 32):
        out.append(f"{begin:>5}  ", DIM)
        for core in host.core_ratios[begin:begin + 32]:
            full = core >= FULL_CORE_RATIO
            level = "▁▂▃▄▅▆▇█"[min(7, int(core * 8))]
            out.append(level + ("!" if full else " "), bar_style(step_of(core)))
        out.append("\n")
    return out


def host_text(sample: NodeSample, width: int = 100) -> Text:
    """The host in full: per-core load, memory, disk, network, limits, and who uses them. ``width``: of a line."""
    host = sample.host
    out = Text()
    out.append(f"{printable(host.hostname)}\n\n", BOLD)
    cpu = host["cpu_ratio"]
    if cpu.value is not None:
        text, style = bar(cpu.value, 20)
        out.append(f"{'CPU':<{_LABEL}}", DIM)
        out.append(text, style)
        out.append(f" {ratio(cpu.value)} of {host.cpu_count or '?'} cores, {host.full_cores} full\n")
    for metric in HOST_METRICS.values():
        if metric.id != "cpu_ratio" or cpu.value is None:
            _figure(out, metric.label, host[metric.id], metric.help)
    limit = host.cpu_limit_cores
    _line(out, "CPU limit", "none, or not known" if limit is None else f"{limit:g} cores",
          "" if limit is None else "what the control groups and the affinity of gputop grant")
    for group, of in _groups(sample):
        out.append(f"\nControl group of {of}", BOLD)
        out.append(f"  {printable(group.name)}\n", DIM)
        _group_lines(out, group)
    out.append("\nCores", BOLD)
    if host.core_ratios:
        out.append("  height: busy share; !: no time left, a Python thread that holds up GPUs looks so\n", DIM)
        out.append_text(_load_of_cores(host))
    else:
        out.append("  the load of each core is not known here\n", DIM)
    out.append("\nGPU processes by CPU", BOLD)
    out.append("  with their children, such as input workers\n", DIM)
    busy = sorted(sample.processes, key=lambda p: -(p.cpu_cores.value or 0.0))[:_TOP]
    for p in busy:
        _row(out, width, p.pid, p.user, p.cpu_cores, p.rss_bytes, devices(p), p.command)
    if not busy:
        out.append("  no process holds a GPU\n", DIM)
    _top_processes(out, sample, width)
    return out


def _groups(sample: NodeSample) -> list[tuple[CgroupSample, str]]:
    """The control groups of gputop and of the GPU processes, each once, and whose they are."""
    found: dict[str, tuple[CgroupSample, list[str]]] = {}
    own = sample.host.cgroup
    for group, who in [(own, "gputop"), *((p.cgroup, str(p.pid)) for p in sample.processes)]:
        if group is not None:
            found.setdefault(group.name, (group, []))[1].append(who)
    out = []
    for group, members in found.values():
        pids = [who for who in members if who != "gputop"]
        of = ["gputop"] if "gputop" in members else []
        of += [f"PID {', '.join(pids[:4])}{' …' if len(pids) > 4 else ''}"] if pids else []
        out.append((group, " and ".join(of)))
    return out


def _group_lines(out: Text, group: CgroupSample) -> None:
    """CPU and memory of a control group against their limits; what is strained is marked."""
    limit, used, held = group["cpu_limit_cores"], group["cpu_used_cores"], group["cpu_throttled_ratio"]
    of = f" of {limit.value:g}" if limit.value is not None else ""
    text = NA if used.value is None else f"{used.value:.1f}{of} cores"
    more = [limit.reason] if limit.reason and limit.reason != used.reason else []
    _line(out, "CPU", text, ", ".join(printable(why) for why in (*more, used.reason) if why))
    if held.value is not None:
        out.append(f"{'CPU throttled':<{_LABEL}}", DIM)
        out.append(ratio(held.value), WARN if throttled(group) else PLAIN)
        out.append("  of the scheduler's periods: the quota was used up, all threads stood\n", DIM)
    limit, used, kills = group["memory_limit_bytes"], group["memory_used_bytes"], group["oom_kills"]
    out.append(f"{'memory':<{_LABEL}}", DIM)
    if used.value is None:
        out.append(NA, DIM)
    elif limit.value:
        out.append(f"{reading(used)} of {reading(limit)}, {ratio(used.value / limit.value)}",
                   WARN if near_memory_limit(group) else PLAIN)
    else:
        out.append(reading(used), PLAIN)
    why = used.reason or limit.reason or "without the page cache that can be dropped at once"
    out.append(f"  {printable(why)}\n", DIM)
    if kills.value:
        out.append(f"{'OOM kills':<{_LABEL}}", DIM)
        out.append(f"{kills.value:.0f}", BAD)
        out.append("  the kernel killed processes of it at the memory limit\n", DIM)


def _row(out: Text, width: int, pid: int, user: str | None, cores: Reading, rss: Reading, gpus: str,
         command: str | None) -> None:
    figures = (f"{pid:>9} {fit(printable(user or '?'), 9)}{_cores(cores):>11} {reading(rss):>6} "
               f"{'GPU ' + gpus if gpus else '':<8} ")
    out.append(figures, DIM)
    out.append(fit(NA if command is None else printable(redact.command(command)), max(8, width - len(figures))).rstrip()
               + "\n", PLAIN)


def _used(r: Reading, least: float) -> float:
    """For sorting: 0.0 for what would be shown as none."""
    return r.value if r.value is not None and r.value >= least else 0.0


def _top_processes(out: Text, sample: NodeSample, width: int) -> None:
    """Those of the whole node that use most: a job without a GPU can hold up those with one."""
    host = sample.host
    holders = {p.local_pid or p.pid: devices(p) for p in sample.processes}
    for title, more, key in (
        ("All processes by CPU", "each without its children, over some seconds", lambda p: _used(p.cpu_cores, 0.05)),
        ("All processes by memory", "resident, shared pages counted in each", lambda p: _used(p.rss_bytes, 1.0)),
    ):
        out.append(f"\n{title}", BOLD)
        out.append(f"  {more}\n", DIM)
        shown = sorted((p for p in host.top_processes if key(p)), key=key, reverse=True)[:_TOP]
        for p in shown:
            _row(out, width, p.pid, p.user, p.cpu_cores, p.rss_bytes, holders.get(p.pid, ""), p.command)
        if not shown:
            reasons = {p.cpu_cores.reason for p in host.top_processes if p.cpu_cores.reason}
            why = host.top_reason or (", ".join(sorted(reasons)) if reasons else "none used any")
            out.append(f"  {NA if host.top_reason or reasons else 'none'}: {printable(why)}\n", DIM)


def job_text(session: Session) -> Text:
    """The job: its servers, what it is, and what the captures of this session said and cost."""
    out = Text()
    now_s = session.clock()
    out.append("Profiler servers\n", BOLD)
    for server in session.servers:
        out.append("✗ " if server.problem else "● ", BAD if server.problem else ACCENT)
        about = server.problem or redact.command(server.description)
        out.append(f"{printable(server.address)}  {printable(about)}")
        out.append(f"  PID {server.pid}\n" if server.pid is not None else "\n", DIM)
    if not session.servers:
        out.append("none found. " if session.servers_known else "still looking. ", WARN)
        out.append("In the job: tf.profiler.experimental.server.start(6009) or jax.profiler.start_server(6009)\n", DIM)
    for note in session.discovery_notes:
        out.append(printable(note) + "\n", DIM)
    if session.rhythm is not None:
        out.append("\nRhythm\n", BOLD)
        rhythm = session.rhythm
        out.append(f"a period of {seconds(rhythm.period_s)} in the live figures, an estimate\n" if rhythm.period_s
                   else f"no period in the live figures: {printable(rhythm.reason or 'not found')}\n")
    out.append("\nCaptures of this session\n", BOLD)
    for record in reversed(session.captures):
        step = "no steps" if record.step_s is None else f"{seconds(record.step_s)}/step"
        mark = "A " if record is session.before else "  "
        out.append(mark, ACCENT)
        out.append(f"{since(now_s, record.time_s):>10}  {step:<14}", PLAIN)
        plan = record.plan
        out.append(f"{plan.chosen_s if plan else record.asked_s:g} s from {printable(record.address)}\n", DIM)
        for line in record.remarks:
            out.append(f"{'':14}{printable(line)}\n", DIM)
        out.append(f"  {printable(str(record.path))}\n", DIM)  # a long word: it has a line to itself
    if not session.captures:
        out.append("none yet: c captures a trace\n", DIM)
    return out
