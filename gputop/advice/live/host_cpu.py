"""The live rule about the host: its CPU has no time left while the GPUs wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gputop.advice.live.node_view import View, gpus_text, name_of
from gputop.advice.registry import limit, source
from gputop.core.findings import Abstained, Finding, Gain
from gputop.core.samples import CgroupSample, ProcessSample
from gputop.telemetry.history import HostHistoryPoint
from gputop.text.units import percent

_RULE = "host_cpu_saturated"
_INPUT = (
    "dataset = dataset.map(decode, num_parallel_calls=tf.data.AUTOTUNE).cache().prefetch(tf.data.AUTOTUNE)\n"
    "# cache what is the same in each epoch; decode fewer pixels; give the job more cores\n"
    "# (--cpus-per-task, --cpus, resources.limits.cpu)"
)


def host_cpu_saturated(view: View) -> Finding | Abstained | None:
    """All cores, those that the job is granted, or the one its main thread runs on, are full."""
    if not view.processes:
        return view.no_process(_RULE)
    window_s = view.seconds(f"{_RULE}.window_s")
    settled = {g.info.index for g in view.warmed_up_gpus}
    jobs = [p for p in view.processes if settled & set(p.gpus)]
    if not jobs:
        return view.not_at_work(_RULE, window_s)
    waiting = {p.pid: gpus for p in jobs if (gpus := _waiting(view, p, window_s))}
    if not waiting:
        return None  # full or not, it holds up no GPU
    looks = view.host(window_s)
    cpu = _mean(looks, lambda look: look.cpu_ratio, window_s, view)
    if cpu is None:
        return Abstained(_RULE, f"{window_s:.0f} s of CPU use: "
                                f"{view.sample.host['cpu_ratio'].reason or 'not yet seen for that long'}")
    held = [p for p in jobs if p.pid in waiting]
    gpus = {i: a for p in held for i, a in waiting[p.pid].items()}
    bound = view.limit(_RULE, "cpu_", min(gpus))
    evidence = {"window_s": window_s, "cpu_ratio": cpu, "gpu_activity_ratio": min(gpus.values())}
    count = view.sample.host.cpu_count
    if cpu >= bound:
        if count:
            evidence["cpu_cores"] = float(count)
        return _full(gpus, evidence, window_s, f"all {f'{count} ' if count else ''}cores were {percent(cpu)} busy")
    for process in held:
        finding = _granted(view, process, looks, window_s, waiting[process.pid], evidence)
        if finding is not None:
            return finding
    of_limit = _of_limit(view, looks, window_s)
    if of_limit is not None and bound <= of_limit[0] <= limit(f"{_RULE}.limit_beyond"):
        share, cores = of_limit
        evidence |= {"cpu_limit_cores": cores, "cpu_of_limit_ratio": share}
        return _full(gpus, evidence, window_s,
                     f"the {cores:g} cores that the container or cpuset grants were {percent(share)} busy")
    for process in held:
        finding = _one_thread(view, process, looks, window_s, waiting[process.pid], evidence)
        if finding is not None:
            return finding
    return None


def _waiting(view: View, process: ProcessSample, window_s: float) -> dict[int, float]:
    """The GPUs of the process with time left, and how active they were; none while it pauses or starts, or where
    another rule knows what they wait for."""
    out = {}
    otherwise = view.gpus_left_out(_RULE)
    for gpu in view.compute_gpus(process):
        activity, index = view.activity(gpu, window_s), gpu.info.index
        if activity is None or index in otherwise or activity[1] > view.limit(_RULE, "waiting_", index):
            continue
        slices = view.slice_table(activity[0], window_s)[:, view.column(gpu)].tolist()
        at_work = sum(mean >= limit("low_sm_active.pause") for mean in slices)
        if at_work >= limit("low_sm_active.work_" + ("leave" if index in view.shown(_RULE) else "enter")) * len(slices):
            out[index] = activity[1]
    return out


def _mean(looks: Sequence[HostHistoryPoint], value: Callable[[HostHistoryPoint], float | None], window_s: float,
          view: View) -> float | None:
    """Mean over the window; None where too little of it was seen."""
    known = [(look.time_s, v) for look in looks if (v := value(look)) is not None]
    if len(known) < limit("min_readings"):
        return None
    seen_s = (known[-1][0] - known[0][0]) * len(known) / (len(known) - 1)
    late_s = view.sample.time_s - known[-1][0]
    if seen_s < limit("coverage") * window_s or late_s > (1 - limit("coverage")) * window_s:
        return None
    return sum(v for _, v in known) / len(known)


def _granted(view: View, process: ProcessSample, looks: Sequence[HostHistoryPoint], window_s: float,
             gpus: dict[int, float], evidence: dict[str, float]) -> Finding | None:
    """A job that uses up what its control groups grant of the CPU, all the time or at the start of each period."""
    cores = None if process.cgroup is None else process.cgroup["cpu_limit_cores"].value
    if process.cgroup is None or not cores:
        return None
    share = _mean(looks, lambda look: look.process_granted_ratio.get(process.pid), window_s, view)
    evidence = evidence | {"cpu_limit_cores": cores} | ({} if share is None else {"cpu_of_limit_ratio": share})
    throttled = _mean(looks, lambda look: look.process_throttled_ratio.get(process.pid), window_s, view)
    if throttled is not None and throttled >= view.limit(_RULE, "throttled_", min(gpus)):
        return _full(gpus, evidence | {"cpu_throttled_ratio": throttled}, window_s,
                     f"{_granted_by(process.cgroup, cores)} were used up in {percent(throttled)} of the scheduler's "
                     "periods, all threads then standing until the next", "CPU quota used up")
    if share is not None and share >= view.limit(_RULE, "cpu_", min(gpus)):
        return _full(gpus, evidence, window_s, f"{_granted_by(process.cgroup, cores)} were {percent(share)} busy")
    return None


def _granted_by(group: CgroupSample, cores: float) -> str:
    return f"the {cores:g} cores that the control group {group.name} grants"


def _of_limit(view: View, looks: Sequence[HostHistoryPoint], window_s: float) -> tuple[float, float] | None:
    """What the processes on the GPUs use of the cores granted here, and how many those are."""
    cores = view.sample.host.cpu_limit_cores
    pids = {p.pid for p in view.processes}
    if not cores:
        return None
    used = _mean(looks, lambda look: sum(c for pid, c in look.process_cores.items() if pid in pids)
                 if look.process_cores else None, window_s, view)
    return None if used is None else (used / cores, cores)


def _full(gpus: dict[int, float], evidence: dict[str, float], window_s: float, what: str,
          title: str = "CPU full") -> Finding:
    return Finding(
        id=_RULE, severity="medium", origin="live", gpus=tuple(sorted(gpus)), evidence=evidence,
        title=f"{title} while {gpus_text(gpus)} {'waits' if len(gpus) == 1 else 'wait'}",
        why=f"Over the last {window_s:.0f} s {what}, and the GPUs active as little as "
            f"{percent(min(gpus.values()))} of the time: input, launches and Python compete for cores.",
        action="Give the job more cores, or its CPU less to do: cache or prepare the input, decode fewer pixels, and "
               "keep other programs off the node. A capture (c) tells which thread waits.",
        snippet=_INPUT,
        source="/proc/stat, control groups; " + source(
            f"{_RULE}.{'throttled' if 'cpu_throttled_ratio' in evidence else 'cpu'}_enter", f"{_RULE}.waiting_enter"),
        gain=Gain(None, "telemetry shows no steps: a capture (c) gives the figure"),
    )


def _one_thread(view: View, process: ProcessSample, looks: Sequence[HostHistoryPoint], window_s: float,
                gpus: dict[int, float], evidence: dict[str, float]) -> Finding | None:
    """A job that has one core's worth of work for the CPU, on one core, while no kernel runs."""
    full = _mean(looks, lambda look: None if look.full_cores is None else float(look.full_cores > 0), window_s, view)
    cores = _mean(looks, lambda look: look.process_cores.get(process.pid), window_s, view)
    if full is None or cores is None or full < view.limit(_RULE, "thread_", min(gpus)):
        return None
    most = view.limit(_RULE, "most_cores_", min(gpus))
    if not view.limit(_RULE, "least_cores_", min(gpus)) <= cores <= most:
        return None
    if view.full_cores(window_s) > most:
        return None  # other programs fill cores too: the job's need not be among them
    util = [m for g in view.compute_gpus(process) if g.info.index in gpus
            and (m := view.mean(g, "gpu_util", window_s)) is not None]
    # A thread that polls for the GPU fills a core too: but then a kernel runs.
    if not util or max(util) > view.limit(_RULE, "waiting_", min(gpus)):
        return None
    return Finding(
        id=_RULE, severity="medium", origin="live", gpus=tuple(sorted(gpus)),
        evidence=evidence | {"process_cpu_cores": cores, "full_core_share_ratio": full, "gpu_util_ratio": max(util)},
        title=f"One CPU thread holds up {gpus_text(gpus)}",
        why=f"{name_of(process)} used {cores:.1f} cores over the last {window_s:.0f} s, one of them full in "
            f"{percent(full)} of the looks, while no kernel ran in {percent(1 - max(util))} of the time: its main "
            "thread (Python runs one at a time) does not keep up.",
        action="Take work off the main thread: more steps per call of the compiled function, input by parallel tf.data "
               "maps or worker processes, callbacks and metrics less often.",
        snippet="model.compile(…, steps_per_execution=32, jit_compile=True)\n"
                "dataset = dataset.map(decode, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)",
        source="/proc: CPU by core and by process; " + source(f"{_RULE}.thread_enter", f"{_RULE}.most_cores_enter"),
        gain=Gain(None, "telemetry shows no steps: a capture (c) gives the figure"),
    )
