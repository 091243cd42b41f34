"""Live rules about the host: its CPU has no time left while GPUs wait, or a process is bound to CPUs far from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gputop.advice.fix_code import code, code_for
from gputop.advice.live.jobs import name_of, same_of
from gputop.advice.live.node_view import NodeView, gpus_text
from gputop.advice.registry import limit, source
from gputop.advice.verdict import NO_FIGURE, Explanation, Missing, Verdict, known
from gputop.core.samples import CgroupSample, ProcessSample
from gputop.text.units import percent, ranges

_RULE = "host_cpu_saturated"


class HostCpuSaturated(Verdict, frozen=True, kw_only=True):
    """``limited_by`` tells which limit is reached: "node" (all cores), "quota" (of the job's control group, used up
    at the start of the scheduler's periods), "group" (its control group's cores), "container" (the cores granted
    here) or "thread" (one thread fills a core)."""

    limited_by: str
    window_s: float
    waiting: Mapping[int, float]  # activity of the GPUs that wait
    least_active: float  # activity of the GPU that waits most, whichever job's
    cpu: float  # of all cores of the node
    cores: float | None = None  # that the limit consists of
    of_limit: float | None = None  # share of it that is used
    throttled: float | None = None  # share of the scheduler's periods in which the quota was used up
    group: CgroupSample | None = None
    process: ProcessSample | None = None  # whose thread fills a core
    others: int = 0  # processes of which the same is true
    full_core: float | None = None  # share of the samples with a full core
    gpu_util: float | None = None


def judge_host_cpu_saturated(view: NodeView) -> HostCpuSaturated | Missing | None:
    """All cores, those that the job is granted, or the one its main thread runs on, are full."""
    window_s = view.seconds(f"{_RULE}.window_s")
    warm = {g.info.index for g in view.warmed_up_gpus}
    jobs = [p for p in view.processes if warm & set(p.gpus)]
    if not jobs:
        return view.not_at_work(window_s)
    waiting = {p.pid: gpus for p in jobs if (gpus := _waiting(view, p, window_s))}
    if not waiting:
        return None  # full or not, it holds up no GPU
    cpu = view.host_mean(lambda point: point.cpu_ratio, window_s)
    if cpu is None:
        return Missing(f"{window_s:.0f} s of CPU use "
                       f"({view.sample.host['cpu_ratio'].reason or 'not yet seen for that long'})")
    held = [p for p in jobs if p.pid in waiting]
    gpus = _union(waiting, held)
    bound, least_active = view.limit(_RULE, "cpu_", min(gpus)), min(gpus.values())

    def verdict(limited_by: str, gpus: dict[int, float], **figures: Any) -> HostCpuSaturated:
        return HostCpuSaturated(gpus=tuple(sorted(gpus)), severity="medium", limited_by=limited_by, window_s=window_s,
                                waiting=gpus, least_active=least_active, cpu=cpu, **figures)

    if cpu >= bound:
        count = view.sample.host.cpu_count
        return verdict("node", gpus, cores=float(count) if count else None)
    for process in held:
        granted = _granted(view, process, window_s, waiting[process.pid])
        if granted is not None:
            return verdict(gpus=_union(waiting, (p for p in held if p.cgroup == process.cgroup)), **granted)
    of_limit = _of_limit(view, window_s)
    if of_limit is not None and bound <= of_limit[0] <= limit(f"{_RULE}.limit_beyond"):
        return verdict("container", gpus, of_limit=of_limit[0], cores=of_limit[1])
    threads = [(p, thread) for p in held if (thread := _one_thread(view, p, window_s, waiting[p.pid])) is not None]
    least, most = (view.limit(_RULE, name, min(gpus)) * len(threads) for name in ("thread_", "most_cores_"))
    if threads and least <= view.full_cores(window_s) <= most:  # else other programs fill cores, too
        return verdict("thread", _union(waiting, (p for p, _ in threads)), process=threads[0][0],
                       others=len(threads) - 1, **threads[0][1])
    return None


def _union(waiting: Mapping[int, dict[int, float]], processes: Iterable[ProcessSample]) -> dict[int, float]:
    return {gpu: activity for process in processes for gpu, activity in waiting[process.pid].items()}


def _waiting(view: NodeView, process: ProcessSample, window_s: float) -> dict[int, float]:
    """The GPUs of the process with time left, and how active they were; none while it pauses or starts, or where
    another rule knows what they wait for."""
    out = {}
    left_out, pause = view.gpus_left_out(_RULE), limit("low_sm_active.pause")
    for gpu in view.compute_gpus(process):
        activity, index = view.activity(gpu, window_s), gpu.info.index
        if activity is None or index in left_out or activity[1] > view.limit(_RULE, "waiting_", index):
            continue
        slices = view.slice_table(gpu, activity[0], window_s)
        at_work = sum(mean >= pause for mean in slices)
        if at_work >= limit("low_sm_active.work_" + ("leave" if index in view.shown(_RULE) else "enter")) * len(slices):
            out[index] = activity[1]
    return out


def _granted(view: NodeView, process: ProcessSample, window_s: float, gpus: dict[int, float]) -> dict[str, Any] | None:
    """The figures of a job that uses up what its control groups grant of the CPU, all the time or at the start of
    each period."""
    cores = None if process.cgroup is None else process.cgroup["cpu_limit_cores"].value
    if process.cgroup is None or not cores:
        return None
    share = view.host_mean(lambda point: point.process_granted_ratio.get(process.pid), window_s)
    figures = {"cores": cores, "of_limit": share, "group": process.cgroup}
    throttled = view.host_mean(lambda point: point.process_throttled_ratio.get(process.pid), window_s)
    if throttled is not None and throttled >= view.limit(_RULE, "throttled_", min(gpus)):
        return {"limited_by": "quota", "throttled": throttled, **figures}
    if share is not None and share >= view.limit(_RULE, "cpu_", min(gpus)):
        return {"limited_by": "group", **figures}
    return None


def _of_limit(view: NodeView, window_s: float) -> tuple[float, float] | None:
    """Cores that the processes on the GPUs use of those granted here, and the number granted."""
    cores = view.sample.host.cpu_limit_cores
    pids = {p.pid for p in view.processes}
    if not cores:
        return None
    used = view.host_mean(lambda point: sum(c for pid, c in point.process_cores.items() if pid in pids)
                          if point.process_cores else None, window_s)
    return None if used is None else (used / cores, cores)


def _one_thread(view: NodeView, process: ProcessSample, window_s: float,
                gpus: dict[int, float]) -> dict[str, float] | None:
    """The figures of a job that has one core's worth of work for the CPU, on one core, while no kernel runs."""
    full = view.host_mean(lambda point: None if point.full_cores is None else float(point.full_cores > 0), window_s)
    cores = view.host_mean(lambda point: point.process_cores.get(process.pid), window_s)
    if full is None or cores is None or full < view.limit(_RULE, "thread_", min(gpus)):
        return None
    least, most = (view.limit(_RULE, f"{bound}_cores_", min(gpus)) for bound in ("least", "most"))
    if not least <= cores <= most:
        return None
    util = [m for g in view.compute_gpus(process) if g.info.index in gpus
            and (m := view.mean(g, "gpu_util", window_s)) is not None]
    # A thread that polls for the GPU fills a core too: but then a kernel runs.
    if not util or max(util) > view.limit(_RULE, "waiting_", min(gpus)):
        return None
    return {"cores": cores, "full_core": full, "gpu_util": max(util)}


def describe_host_cpu_saturated(v: HostCpuSaturated) -> Explanation:
    evidence = {"window_s": v.window_s, "cpu_ratio": v.cpu, "gpu_activity_ratio": v.least_active}
    if v.limited_by == "thread" and v.process is not None:
        return _thread_full(v, v.process, evidence)
    node, title = v.limited_by == "node", "CPU full"
    evidence |= known({"cpu_cores" if node else "cpu_limit_cores": v.cores, "cpu_of_limit_ratio": v.of_limit,
                       "cpu_throttled_ratio": v.throttled})
    cores = f"{'' if v.cores is None else f'{v.cores:g} '}CPU cores"
    who = "container or cpuset" if v.group is None else f"control group {v.group.name}"
    what = f"the node's {cores}" if node else f"the {cores} that the {who} allows"
    if v.throttled is None or node:
        what += f" were {percent(v.cpu if node else v.of_limit or 0.0)} busy"
    else:
        title = "CPU quota used up"
        what += (f" were used up in {percent(v.throttled)} of the scheduler's periods, and all threads stopped until "
                 "the next period")
    return Explanation(
        title=f"{title} while {gpus_text(v.gpus)} {'waits' if len(v.gpus) == 1 else 'wait'}",
        why=f"Over the last {v.window_s:.0f} s, {what}. The least active GPU was active for only "
            f"{percent(min(v.waiting.values()))} of this time. Input, launches, and Python compete for cores.",
        evidence=evidence, brief=f"{what[:1].upper()}{what[1:]}.", unknown="which thread is waiting?",
        action="Give the job more cores or less CPU work: cache the input or prepare it in advance, decode fewer "
               "pixels, and keep other programs off the node. A capture shows which thread is waiting.",
        snippet=code_for(v.framework, _RULE, WORKERS="no_more_than_cores"), gain=NO_FIGURE,
        source="/proc/stat, control groups; " + source(
            f"{_RULE}.{'throttled' if v.throttled is not None else 'cpu'}_enter", f"{_RULE}.waiting_enter"))


def _thread_full(v: HostCpuSaturated, process: ProcessSample, evidence: dict[str, float]) -> Explanation:
    cores, full, util = v.cores or 0.0, v.full_core or 0.0, v.gpu_util or 0.0
    return Explanation(
        title=f"One CPU thread {'of each process ' * (v.others > 0)}delays {gpus_text(v.gpus)}",
        why=f"{name_of(process)} used {cores:.1f} CPU cores over the last {v.window_s:.0f} s, and one core was fully "
            f"used in {percent(full)} of the samples. For {percent(1 - util)} of this time, no kernel was running "
            f"because the main thread was too slow (Python runs one thread at a time).{same_of(v.others)}",
        evidence=evidence | {"process_cpu_cores": cores, "full_core_share_ratio": full, "gpu_util_ratio": util},
        brief=f"For {percent(1 - util)} of the time, no kernel was running; one CPU core is fully used.",
        unknown="what does that thread do?",
        action="Give the main thread less work: "
               + ("compile the model to reduce launches" if v.framework == "pytorch" else
                  "run more steps in each call to the compiled function")
               + ", prepare input in parallel threads or worker processes, and run callbacks and metrics less often.",
        snippet=code_for(v.framework, _RULE, "thread-"), gain=NO_FIGURE,
        source="/proc: CPU use by core and by process; " + source(f"{_RULE}.thread_enter", f"{_RULE}.most_cores_enter"))


class NumaRemote(Verdict, frozen=True, kw_only=True):
    """``gpus`` are the far ones of all processes; the rest tells of one process."""

    process: ProcessSample
    far: tuple[int, ...]  # its GPUs on other nodes
    gpu_nodes: tuple[int, ...]  # the NUMA nodes of all its GPUs
    bound_nodes: tuple[int, ...]
    others: int  # further processes of which the same is true


def judge_numa_remote(view: NodeView) -> NumaRemote | Missing | None:
    """A process may only use CPUs of NUMA nodes that have not all of its GPUs. One that may use all nodes is left
    alone: where the scheduler puts it is not known."""
    remote = []
    for process in view.processes:
        if view.age_s(process) < limit("idle_gpu.age_s"):
            continue  # it may yet bind itself
        nodes = {gpu.info.index: gpu.info.numa_node for gpu in view.compute_gpus(process)}
        far = tuple(index for index, node in nodes.items() if node is not None and node not in process.numa_nodes)
        if process.numa_nodes and far:
            remote.append((process, far, tuple(sorted({node for node in nodes.values() if node is not None}))))
    if not remote:
        return None
    process, far, gpu_nodes = remote[0]
    return NumaRemote(gpus=tuple(sorted({gpu for _, far_gpus, _ in remote for gpu in far_gpus})), severity="low",
                      process=process, far=far, gpu_nodes=gpu_nodes, bound_nodes=process.numa_nodes,
                      others=len(remote) - 1)


def describe_numa_remote(v: NumaRemote) -> Explanation:
    nodes = ",".join(map(str, v.gpu_nodes))
    several = len(v.gpu_nodes) > 1
    plural = "s" if several else ""
    return Explanation(
        title=f"{gpus_text(v.gpus)}: {'its' if len(v.gpus) == 1 else 'their'} "
              f"{'processes run' if v.others else 'process runs'} on another NUMA node",
        why=f"{name_of(v.process)} may use only CPUs of NUMA node {ranges(v.bound_nodes, ', ')}, but "
            f"{gpus_text(v.far)} {'is' if len(v.far) == 1 else 'are'} on another node. Launches, copies, and input "
            f"cross the link between the sockets.{same_of(v.others)}",
        evidence={"bound_nodes_count": float(len(v.bound_nodes)), "far_gpus_count": float(len(v.far))},
        action=f"Let the process use the CPUs and the memory of NUMA node{plural} {nodes}"
               + (", or start one process per GPU, each bound to its own node." if several else
                  ". With Slurm, use --gpu-bind=closest and list the cores of each GPU in gres.conf."),
        snippet=code("numa_remote", "bind", NODES=nodes),
        gain="depends on how much the job copies and launches; " + NO_FIGURE,
        source="Cpus_allowed_list in /proc/PID/status; numa_node of the GPU's PCI device")
