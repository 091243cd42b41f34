"""Live rules about which process holds which GPU: idle, unused, shared, uneven, or none."""

from __future__ import annotations

from msgspec import Struct

from gputop.advice.fix_code import code, code_for
from gputop.advice.live.jobs import is_inference_server, name_of, same_job, same_of, stacks_command, wait_for, waits_for
from gputop.advice.live.node_view import NodeView, gpus_text
from gputop.advice.registry import limit
from gputop.advice.verdict import NO_FIGURE, Explanation, Missing, Verdict, known
from gputop.core.findings import Severity, severity_of
from gputop.core.framework import LABELS
from gputop.core.samples import GpuSample, ProcessSample
from gputop.text.commands import program_name
from gputop.text.units import bytes_, counted, percent, seconds

_EVEN_WORK = {
    "": "put metrics, summaries, and evaluation on the CPU, and mirror variables.",
    "jax": "work that is not sharded, such as metrics outside the jitted step, runs on the first GPU.",
    "pytorch": "DataParallel gathers the outputs and computes the loss on the first GPU, but DistributedDataParallel "
               "does not.",
}


class _Holder(Struct, frozen=True):
    process: ProcessSample
    idle: tuple[int, ...]
    busy_activity: float | None  # mean of its other GPUs; None: none of them works
    held: int  # GPUs whose activity is known


class IdleGpu(Verdict, frozen=True, kw_only=True):
    window_s: float
    worst: _Holder
    complete: bool  # all GPUs of the node are watched
    others: tuple[ProcessSample, ...] = ()  # that use none of their GPUs either
    busy_gpus: tuple[int, ...] = ()  # of the same job, which other processes hold


def judge_idle_gpu(view: NodeView) -> IdleGpu | Missing | None:
    """A process holds GPUs that do nothing, while its others work or all together."""
    window_s = view.seconds("idle_gpu.window_s")
    left_out = view.gpus_left_out("idle_gpu")
    old = [p for p in view.processes if view.age_s(p) >= limit("idle_gpu.age_s")
           and not left_out & {g.info.index for g in view.compute_gpus(p)}]
    judged = False
    partly: list[_Holder] = []
    wholly: list[_Holder] = []
    for process in old:
        gpus = view.compute_gpus(process)
        means = {g.info.index: a[1] for g in gpus if (a := view.activity(g, window_s)) is not None}
        judged |= bool(means)
        idle = tuple(i for i, mean in means.items() if mean <= view.limit("idle_gpu", "", i))
        busy = [mean for i, mean in means.items() if i not in idle]
        if idle and busy and max(busy) >= limit("idle_gpu.peer_busy"):
            partly.append(_Holder(process, idle, sum(busy) / len(busy), len(means)))
        elif idle and not busy and len(means) == len(gpus) and all(
                (a := view.activity(g, view.seconds("idle_gpu.all_window_s"))) is not None
                and a[1] <= view.limit("idle_gpu", "", g.info.index) for g in gpus):
            wholly.append(_Holder(process, idle, None, len(means)))
    if partly:
        worst = max(partly, key=lambda holder: len(holder.idle) / holder.held)
        # At least this share is idle, even if it holds every GPU that is not watched and uses it.
        severity = severity_of(len(worst.idle) / (worst.held + view.sample.gpus_unwatched))
        return IdleGpu(gpus=_all_idle(partly), severity=severity, window_s=window_s, worst=worst,
                       complete=view.complete)
    if wholly:
        # One that should be at work comes before those that wait for requests or for their user.
        worst = max(wholly, key=lambda holder: (not waits_for(holder.process), len(holder.idle)))
        busy_gpus = {
            g.info.index for p in view.processes if same_job(p, worst.process, view.complete)
            for g in view.compute_gpus(p) if (a := view.activity(g, window_s)) and a[1] >= limit("idle_gpu.peer_busy")}
        return IdleGpu(gpus=_all_idle(wholly), severity="low" if waits_for(worst.process) else "medium",
                       window_s=view.seconds("idle_gpu.all_window_s"), worst=worst, complete=view.complete,
                       others=tuple(holder.process for holder in wholly if holder is not worst),
                       busy_gpus=tuple(sorted(busy_gpus)))
    return None if judged or left_out else Missing(
        f"{window_s:.0f} s of activity readings from a process that is past startup ({limit('idle_gpu.age_s'):.0f} s)")


def _all_idle(holders: list[_Holder]) -> tuple[int, ...]:
    return tuple(sorted({index for holder in holders for index in holder.idle}))


def describe_idle_gpu(v: IdleGpu) -> Explanation:
    return _wholly_idle(v) if v.worst.busy_activity is None else _partly_idle(v, v.worst.busy_activity)


def _partly_idle(v: IdleGpu, busy: float) -> Explanation:
    process, idle, held = v.worst.process, v.worst.idle, v.worst.held
    used = sorted(set(process.gpus) - set(idle))
    holds, spreads, back = f"{held} GPUs", f"spreads over {held} GPUs instead of {held - len(idle)}", (
        f"\n{code('idle_gpu', 'back', GPUS=','.join(map(str, used)))}")
    if not v.complete:  # its other GPUs may work as well
        holds, spreads, back = f"{held} of the GPUs watched", "also spreads over the idle GPUs", ""
    return Explanation(
        title=f"{gpus_text(idle)} held but not used",
        why=f"{name_of(process)} holds {holds}, but {gpus_text(idle)} did nothing over the last {v.window_s:.0f} s "
            f"while the others were active for {percent(busy)} of the time.",
        evidence={"window_s": v.window_s, "idle_gpus_count": float(len(idle)), "busy_gpus_activity_ratio": busy,
                  "held_gpus_count" if v.complete else "held_gpus_watched_count": float(held)},
        brief=f"{name_of(process)} uses {held - len(idle)} of {holds}.",
        action="Spread the training over all GPUs, or hide the idle GPUs from the process so that other jobs can use "
               "them.",
        snippet=code_for(v.framework, "idle_gpu", COUNT=held) + back,
        gain=f"at best, the work {spreads}; {NO_FIGURE}",
        source="TensorFlow and JAX guides: a process reserves memory on all visible GPUs but runs on only one unless "
               "the training is distributed; gputop's own thresholds")


def _wholly_idle(v: IdleGpu) -> Explanation:
    process, idle = v.worst.process, v.worst.idle
    cores, waits = process.cpu_cores.value, waits_for(process)
    quiet = cores is not None and cores < limit("job_on_cpu.cores_enter")
    doing = "" if cores is None else f" The process uses {cores:.1f} CPU cores."
    may_be = (f"waiting for {waits}" if waits and quiet else "waiting or stuck" if quiet else
              "compiling, loading, waiting, or stuck" if cores is None else
              "compiling, loading, computing on the CPU, or stuck")
    cause, who = f", because it is {may_be}", name_of(process)
    action = ("If nobody needs it, stop it to free the GPUs." if waits else
              "Look at what its Python threads are doing. If this is a forgotten notebook, stop it to free the GPUs.")
    doing += same_of(len(v.others))
    if v.others:
        who = f"{who} and {counted(len(v.others), 'other process', 'es')}"
    if v.busy_gpus:
        action, doing = "Look at what its Python threads are doing.", f"{doing} It {wait_for(v.busy_gpus)}"
    if not v.complete:
        cause = ". The process may be using GPUs that gputop is not watching"
        action = ("Look at all GPUs of the node, without --gpus. If the process works on other GPUs, spread the "
                  "training over all GPUs, or hide the idle GPUs from it. Otherwise, see what its threads are doing.")
    return Explanation(
        title=f"{gpus_text(v.gpus)} held but not used for {v.window_s:.0f} s",
        why=f"{name_of(process)} holds {gpus_text(idle)} and has not used {'it' if len(idle) == 1 else 'them'} for "
            f"{v.window_s:.0f} s{cause}.{doing}",
        evidence=known({
            "window_s": v.window_s, "idle_gpus_count": float(len(idle)),
            "held_gpus_count" if v.complete else "held_gpus_watched_count": float(len(idle)), "cpu_cores": cores}),
        action=action,
        snippet=None if waits else stacks_command((process, *v.others)),
        brief=f"{who} {'are' if v.others else 'is'} {may_be}." if v.complete else "",
        unknown="the line that it is executing" if v.complete and not waits else "",
        gain="no step is running" if v.complete else NO_FIGURE, source="gputop's own limits")


class UnusedGpu(Verdict, frozen=True, kw_only=True):
    window_s: float
    gpus_count: int  # of the node
    busiest: float  # activity of the busiest other GPU


def judge_unused_gpu(view: NodeView) -> UnusedGpu | Missing | None:
    """GPUs without any compute process while a job works on others."""
    window_s = view.seconds("unused_gpu.window_s")
    idle, at_work = view.without_process(window_s)
    left_out = view.gpus_left_out("unused_gpu")
    unused = [gpu for gpu in idle if gpu.info.index not in left_out]
    others = [a[1] for g in view.whole_gpus if g not in idle and (a := view.activity(g, window_s)) is not None]
    if not others:
        return Missing(f"{window_s:.0f} s of activity readings")
    if not idle and at_work:
        return view.unlisted(at_work)
    if not unused or max(others) < limit("unused_gpu.peer_busy"):
        return None
    return UnusedGpu(gpus=tuple(g.info.index for g in unused), severity="low", window_s=window_s,
                     gpus_count=len(view.sample.gpus) + view.sample.gpus_unwatched, busiest=max(others))


def describe_unused_gpu(v: UnusedGpu) -> Explanation:
    return Explanation(
        title=f"{gpus_text(v.gpus)} not used by any compute process",
        why=f"No compute process has used {gpus_text(v.gpus)} for {v.window_s:.0f} s, while other GPUs are busy.",
        evidence={"window_s": v.window_s, "unused_gpus_count": float(len(v.gpus)),
                  "gpus_count": float(v.gpus_count), "busiest_activity_ratio": v.busiest},
        action="If these GPUs belong to your allocation, make them visible to the job and distribute the training over "
               "them.",
        gain="unknown, because this may be intentional; " + NO_FIGURE,
        source="NVML process lists; gputop's own thresholds")


class JobOnCpu(Verdict, frozen=True, kw_only=True):
    window_s: float
    age_s: float
    process: ProcessSample


def judge_job_on_cpu(view: NodeView) -> JobOnCpu | Missing | None:
    """A process with a framework computes, and no process of the node uses a GPU."""
    if any(gpu.processes for gpu in view.sample.gpus) or not view.sample.gpus:
        return None
    window_s = view.seconds("job_on_cpu.window_s")
    # From inside a container no process may be listed, but its memory is seen.
    unused = [gpu for gpu in view.without_process(window_s)[0] if _is_free(gpu)]
    if len(unused) < len(view.sample.gpus) or not view.complete:
        return Missing(f"all GPUs of the node without work and memory in use for {window_s:.0f} s")
    enough = view.limit("job_on_cpu", "cores_", unused[0].info.index)
    jobs = [p for p in view.sample.processes if p.framework and view.age_s(p) >= window_s
            and (p.cpu_cores.value or 0.0) >= enough]
    if not jobs:
        return None
    oldest = max(jobs, key=view.age_s)
    return JobOnCpu(gpus=tuple(gpu.info.index for gpu in unused), severity="high", framework=oldest.framework,
                    window_s=window_s, age_s=view.age_s(oldest), process=oldest)


def _is_free(gpu: GpuSample) -> bool:
    used, total = gpu["memory_used_bytes"].value, gpu["memory_total_bytes"].value
    return used is not None and total is not None and used <= limit("job_on_cpu.memory_ratio") * total


def describe_job_on_cpu(v: JobOnCpu) -> Explanation:
    process, hidden = v.process, v.process.cuda_visible_devices
    cores = process.cpu_cores.value or 0.0
    uses = f"uses {cores:.1f} CPU cores"
    action = ("Check that the framework sees the GPUs. If it does not, install its build for CUDA. If it does, place "
              "the model and each batch on a GPU.")
    snippet = code_for(v.framework, "job_on_cpu")
    if hidden is not None and hidden.strip() in ("", "-1"):
        uses += f" and was started with CUDA_VISIBLE_DEVICES={hidden or repr(hidden)}, which hides all GPUs from it"
        action, snippet = "Start the job without CUDA_VISIBLE_DEVICES.", code("job_on_cpu", "hidden") or ""
    return Explanation(
        title=f"No process uses a GPU: {program_name(process.command or 'a job')} runs on the CPU",
        why=f"{name_of(process)} has {LABELS.get(v.framework, 'a framework')} loaded, has run for {seconds(v.age_s)}, "
            f"and {uses}. No process has used a GPU of this node for {v.window_s:.0f} s.",
        evidence={"window_s": v.window_s, "unused_gpus_count": float(len(v.gpus)), "cpu_cores": cores},
        action=action, snippet=snippet, brief=f"{name_of(process)} {uses}.",
        gain="depends on the model; a capture before and one after the fix show it",
        source="NVML process lists and the libraries that the process has mapped; gputop's own thresholds")


class Gpu0Oversubscribed(Verdict, frozen=True, kw_only=True):
    window_s: float
    process: ProcessSample
    peers: tuple[int, ...]
    metric: str  # sm_active or gpu_util
    first_activity: float
    peers_activity: float
    slices: float  # share of the slices in which the first GPU stands out
    complete: bool  # all GPUs of the node are watched


def judge_gpu0_oversubscribed(view: NodeView) -> Gpu0Oversubscribed | Missing | None:
    """The first GPU of a process works clearly more than the others, which wait for it."""
    processes = [p for p in view.processes if len(gpus := view.compute_gpus(p)) > 1
                 and len({gpu.info.name for gpu in gpus}) == 1]  # others differ for the same work
    if not processes:
        return Missing(f"a process that holds several {'' if view.complete else 'of the watched '}GPUs of one model")
    # Where GPUs before them are not watched, the first of these need not be the first of the process.
    watched = {gpu.info.index for gpu in view.sample.gpus}
    processes = [p for p in processes if view.complete or set(range(view.compute_gpus(p)[0].info.index)) <= watched]
    if not processes:
        return Missing("the first GPU of the job; omit --gpus, or also watch GPU 0")
    judged = False
    for process in processes:
        gpus = view.compute_gpus(process)
        for metric in ("sm_active", "gpu_util"):
            uneven = _uneven(view, gpus, metric)
            if uneven:
                first, peers, share = uneven
                even, (index, *others) = (first + (len(gpus) - 1) * peers) / len(gpus), (g.info.index for g in gpus)
                return Gpu0Oversubscribed(
                    gpus=(index,), severity=severity_of(1 - even / first), window_s=view.seconds("window_s"),
                    process=process, peers=tuple(others), metric=metric, first_activity=first, peers_activity=peers,
                    slices=share, complete=view.complete)
            if uneven is not None and metric == "sm_active":
                judged = True
                break
            # Waiting in a collective counts as coarse utilization: that can show the fault, never exclude it.
    return None if judged else Missing(f"{view.seconds('window_s'):.0f} s of SM activity on all GPUs of the job")


def _uneven(view: NodeView, gpus: list[GpuSample], metric: str) -> tuple[float, float, float] | tuple[()] | None:
    """Mean activity of the first GPU, that of the others, and the share of slices in which the first
    stands out; empty where it does not, None where that cannot be told."""
    window_s, rule = view.seconds("window_s"), "gpu0_oversubscribed"
    if any(view.mean(g, metric, window_s) is None for g in gpus):
        return None
    slices = view.slice_means(gpus, metric, window_s)
    index = gpus[0].info.index
    ratio, gap = view.limit(rule, "ratio_", index), view.limit(rule, "gap_", index)
    firsts, others, above = [], [], 0
    for first, *peers in slices:
        mean = sum(peers) / len(peers)
        if min(peers) < limit(f"{rule}.peer_active"):
            continue  # a phase in which the others take no part
        firsts.append(first)
        others.append(mean)
        # Above each of them: one slow peer does not make GPU 0 the busy one.
        above += first >= ratio * mean and first - max(peers) >= gap
    if len(firsts) < view.slices(window_s) * view.limit(rule, "slices_", index):
        return ()
    share = above / len(firsts)
    if share < view.limit(rule, "slices_", index):
        return ()
    return sum(firsts) / len(firsts), sum(others) / len(others), share


def describe_gpu0_oversubscribed(v: Gpu0Oversubscribed) -> Explanation:
    index, times = v.gpus[0], v.first_activity / v.peers_activity
    what = "SM activity" if v.metric == "sm_active" else "coarse utilization"
    others = gpus_text(v.peers) + ("" if v.complete else " (of the watched GPUs)")
    return Explanation(
        title=f"GPU {index} works {times:.1f}× as much as the others",
        why=f"For {name_of(v.process)}, {what} over the last {v.window_s:.0f} s was {percent(v.first_activity)} on GPU "
            f"{index} and {percent(v.peers_activity)} on {others}. In synchronous training, the other GPUs wait for "
            f"GPU {index} at every step.",
        brief=f"{what[:1].upper()}{what[1:]} is {percent(v.first_activity)} on GPU {index} and "
              f"{percent(v.peers_activity)} on {others}, which wait for GPU {index}.",
        unknown=f"what runs only on GPU {index}?",
        evidence={"window_s": v.window_s, f"first_gpu_{v.metric}_ratio": v.first_activity,
                  f"peers_{v.metric}_ratio": v.peers_activity, "times_peers": times, "slices_share_ratio": v.slices},
        action=f"Let GPU {index} compute only its share of the batch: {_EVEN_WORK.get(v.framework, _EVEN_WORK[''])} "
               f"A capture shows which operations run only on GPU {index}.",
        snippet=code_for(v.framework, "gpu0_oversubscribed"), gain=NO_FIGURE,
        source="comparison of the GPUs of one process; gputop's own thresholds, above the straggler thresholds of HTA "
               "and TraceML (20%)")


class SharedGpu(Verdict, frozen=True, kw_only=True):
    gpu: int  # where the lesser job takes most
    processes: tuple[ProcessSample, ProcessSample]  # the one that uses it more first
    together_s: float
    shared: int  # GPUs shared


def judge_shared_gpu(view: NodeView) -> SharedGpu | CrowdedGpu | Missing | None:
    """Processes of different jobs compute on one GPU, or several of one job while other GPUs are free."""
    if any("nvidia-cuda-mps" in (p.command or "") for p in view.sample.processes):
        return Missing("to know how MPS divides the GPU, because sharing through MPS is intentional")
    unread = [p for p in view.processes if p.command is None]
    shared: dict[int, tuple[ProcessSample, ProcessSample]] = {}
    for gpu in view.whole_gpus:
        here = sorted((p for p in view.processes if _takes_part(view, p, gpu)), key=lambda p: -_sm(p, gpu))
        pairs = [(a, b) for i, a in enumerate(here) for b in here[i + 1:]
                 if None not in (a.command, b.command) and not same_job(a, b, view.complete)]
        if pairs:
            shared[gpu.info.index] = pairs[0]
    if not shared and (crowd := _crowd(view)) is not None:
        return crowd
    if not shared:
        return Missing(f"the command of pid {unread[0].pid} ({unread[0].reason or 'not readable'})") if unread else None
    by_index = {g.info.index: g for g in view.whole_gpus}
    index, pair = max(shared.items(), key=lambda s: _sm(s[1][1], by_index[s[0]]))
    gpu = by_index[index]
    before = next((f.severity for f in view.previous if f.id == "shared_gpu"), None)
    return SharedGpu(
        gpus=tuple(sorted(shared)), severity=_sharing(_sm(pair[1], gpu), before), gpu=index, processes=pair,
        together_s=min(_together_s(view, p, gpu) for p in pair), shared=len(shared))


def _takes_part(view: NodeView, process: ProcessSample, gpu: GpuSample) -> bool:
    """Return whether the process is more than passing by: there for a while, with memory or kernels."""
    held = process.gpus.get(gpu.info.index)
    if held is None or "C" not in held.kind or _together_s(view, process, gpu) < limit("shared_gpu.together_s"):
        return False
    memory, total = held.memory_bytes.value, gpu["memory_total_bytes"].value
    holds = bool(memory and total and memory / total >= limit("shared_gpu.memory_ratio"))
    return holds or _sm(process, gpu) >= limit("shared_gpu.sm_medium")


def _together_s(view: NodeView, process: ProcessSample, gpu: GpuSample) -> float:
    since_s = view.history.held_since(gpu.info.uuid, process.pid)
    return 0.0 if since_s is None else view.sample.time_s - since_s


def _sm(process: ProcessSample, gpu: GpuSample) -> float:
    """SM share of the process on this GPU; 0 for one that is not known, which sorts it last."""
    return process.gpus[gpu.info.index].sm_ratio.value or 0.0


def _sharing(second_sm: float, before: Severity | None) -> Severity:
    """Severity by the share of the lesser job; one that is shown falls only at half of its limit."""
    high, medium = limit("shared_gpu.sm_high"), limit("shared_gpu.sm_medium")
    if second_sm >= (high / 2 if before == "high" else high):
        return "high"
    return "medium" if second_sm >= (medium / 2 if before in ("high", "medium") else medium) else "low"


def describe_shared_gpu(v: SharedGpu | CrowdedGpu) -> Explanation:
    if isinstance(v, CrowdedGpu):
        return _crowded(v)
    (a, b), gpu = v.processes, v.gpu
    first, second = (f"{name_of(one)[:-1]}, user {one.user or 'unknown'})" for one in (a, b))
    memory, sm = b.gpus[gpu].memory_bytes.value, b.gpus[gpu].sm_ratio.value
    title, why = "", f"{first} and {second} are both using GPU {gpu}. Their kernels take turns, and neither job can use"
    brief, action, snippet = (f"{name_of(a)} and {name_of(b)} take turns on GPU {gpu}.", "Give each job its own GPUs.",
                              code("shared_gpu", "jobs"))
    if memory is not None and sm is not None and sm < limit("shared_gpu.sm_medium"):
        brief = f"{second} holds {bytes_(memory)} of the memory of GPU {gpu} but hardly computes."
        title, why = ", one of which hardly computes", f"{brief} {first} is also using this GPU, but cannot use"
        action = "If nobody needs that process, stop it. Otherwise, give it another GPU."
        snippet = f"ps -fp {b.local_pid or b.pid}"
    return Explanation(
        title=f"{gpus_text(v.gpus)} shared by two jobs{title}", why=f"{why} all of the GPU memory.",
        evidence=known({"together_s": v.together_s, "shared_gpus_count": float(v.shared),
                        "first_sm_ratio": a.gpus[gpu].sm_ratio.value, "second_sm_ratio": sm}),
        brief=brief, action=action, snippet=snippet,
        gain=f"depends on how much GPU time the other job uses; {NO_FIGURE}",
        source="NVML process list and process utilization; CUDA time-slices contexts of different processes")


class CrowdedGpu(Verdict, frozen=True, kw_only=True):
    """Processes of one program on one GPU."""

    gpu: int
    process: ProcessSample  # one of them
    count: int
    memory_bytes: float  # that they hold there
    unused: tuple[int, ...]  # GPUs that no process holds; empty: each has a GPU of its own besides this one


def _crowd(view: NodeView) -> CrowdedGpu | None:
    """Ranks that landed on one GPU while others are free, or that hold memory on the first one besides their own. The
    processes of an inference server, and children of another one, are workers by design."""
    unused = tuple(sorted(view.gpus_explained_by("unused_gpu")))
    for gpu in view.whole_gpus if view.complete else ():
        index = gpu.info.index
        here = [p for p in view.processes if gpu in view.compute_gpus(p) and not is_inference_server(p)]
        pids = {p.pid for p in here}
        for one in here:
            ranks = [p for p in here if same_job(one, p) and p.parent_pid not in pids]
            alone = [p for p in ranks if len(p.gpus) == 1 and _takes_part(view, p, gpu)]
            guests = [p for p in ranks if len(p.gpus) == 2 and _memory(p, index) < min(
                _memory(p, other) for other in p.gpus if other != index)]
            crowd = alone if unused and len(alone) > 1 else guests if alone and len(guests) > 1 else []
            if crowd:
                return CrowdedGpu(
                    gpus=(index,), severity="medium" if crowd is alone else "low", gpu=index, process=crowd[0],
                    count=len(crowd), memory_bytes=sum(_memory(p, index) for p in crowd),
                    unused=unused if crowd is alone else ())
    return None


def _memory(process: ProcessSample, index: int) -> float:
    return process.gpus[index].memory_bytes.value or 0.0


def _crowded(v: CrowdedGpu) -> Explanation:
    name, held = program_name(v.process.command or "one program"), bytes_(v.memory_bytes)
    title = f"{v.count} processes of {name} also hold memory on GPU {v.gpu}"
    brief = f"They hold {held} there and compute on other GPUs."
    action, gain = ("Select the GPU of the local rank before anything else uses CUDA.",
                    f"none: a fix frees memory of GPU {v.gpu}")
    if v.unused:
        others = f"{gpus_text(v.unused)} {'is' if len(v.unused) == 1 else 'are'}"
        title = f"{v.count} processes of {name} share GPU {v.gpu}, while {others} unused"
        brief = f"Their kernels take turns on GPU {v.gpu}."
        action = "If they are ranks of one job, let each one select the GPU of its local rank."
        gain = f"depends on how much of the GPU each process uses; {NO_FIGURE}"
    return Explanation(
        title=title, why=f"{name_of(v.process)} and {counted(v.count - 1, 'other process', 'es')} of this program hold "
                         f"{held} of the memory of GPU {v.gpu}. {brief}",
        evidence={"processes_count": float(v.count), "held_bytes": v.memory_bytes,
                  "unused_gpus_count": float(len(v.unused))},
        brief=brief, action=action, snippet=code("shared_gpu", f"ranks-{v.framework}", "ranks"), gain=gain,
        source="NVML process list")
