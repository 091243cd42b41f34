"""Live rules that look at which process holds which GPU: idle, unused, shared, uneven, reserved."""

from __future__ import annotations

from gputop.advice.live.node_view import View, gpus_text, name_of, same_job
from gputop.advice.registry import limit, source
from gputop.core.findings import Abstained, Finding, Gain, Severity, severity_of
from gputop.core.samples import GpuSample, ProcessSample
from gputop.text.units import percent

_NO_FIGURE = "telemetry shows no steps: a capture (c) gives the figure"


def idle_gpu(view: View) -> Finding | Abstained | None:
    """A process holds GPUs that do nothing, while its others work or all together."""
    processes = view.processes
    if not processes:
        return view.no_process("idle_gpu")
    window_s = view.seconds("idle_gpu.window_s")
    judged = False
    partly: list[tuple[ProcessSample, list[int], float, int]] = []
    wholly: list[tuple[ProcessSample, list[int]]] = []
    for process in processes:
        if view.age_s(process) < limit("idle_gpu.age_s"):
            continue
        gpus = view.compute_gpus(process)
        means = {g.info.index: a[1] for g in gpus if (a := view.activity(g, window_s)) is not None}
        judged |= bool(means)
        idle = [i for i, mean in means.items() if mean <= view.limit("idle_gpu", "", i)]
        busy = [mean for i, mean in means.items() if i not in idle]
        if idle and busy and max(busy) >= limit("idle_gpu.peer_busy"):
            partly.append((process, idle, sum(busy) / len(busy), len(means)))
        elif idle and not busy and len(means) == len(gpus) and _long_idle(view, gpus):
            wholly.append((process, idle))
    if partly:
        return _partly_idle(view, partly, window_s)
    if wholly:
        return _wholly_idle(view, wholly)
    if not judged:
        return Abstained("idle_gpu", f"{window_s:.0f} s of activity readings of a process that is past its start-up "
                                     f"({limit('idle_gpu.age_s'):.0f} s)")
    return None


def _long_idle(view: View, gpus: list[GpuSample]) -> bool:
    """Whether none of these GPUs did anything over the longer window."""
    looks = [(g.info.index, view.activity(g, view.seconds("idle_gpu.all_window_s"))) for g in gpus]
    return all(a is not None and a[1] <= view.limit("idle_gpu", "", i) for i, a in looks)


def _partly_idle(view: View, found: list[tuple[ProcessSample, list[int], float, int]], window_s: float) -> Finding:
    process, idle, busy, held = max(found, key=lambda f: len(f[1]) / f[3])
    gpus = sorted({i for _, indices, _, _ in found for i in indices})
    used = sorted(set(process.gpus) - set(idle))
    evidence = {"window_s": window_s, "idle_gpus_count": float(len(idle)), "busy_gpus_activity_ratio": busy,
                "held_gpus_count" if view.complete else "held_gpus_watched_count": float(held)}
    holds, spreads, back = f"{held} GPUs", f"spreads over {held} GPUs instead of {held - len(idle)}", (
        f"\n\n# or give the idle GPUs back:\n# CUDA_VISIBLE_DEVICES={','.join(map(str, used))} python …")
    if not view.complete:  # its other GPUs may work as well
        holds, spreads, back = f"{held} of the GPUs watched", "spreads over the idle GPUs too", ""
    return Finding(
        # At least this share is idle, even if it holds every GPU that is not watched and uses it.
        id="idle_gpu", severity=severity_of(len(idle) / (held + view.sample.gpus_unwatched)), origin="live",
        gpus=tuple(gpus), evidence=evidence,
        title=f"{gpus_text(idle)} held but not used",
        why=f"{name_of(process)} holds {holds}; {gpus_text(idle)} did nothing over the last {window_s:.0f} s while "
            f"the others were active {percent(busy)} of the time.",
        action="Spread the training over all GPUs with a distribution strategy, or hide the idle ones from the process "
               "so that others can have them.",
        snippet="strategy = tf.distribute.MirroredStrategy()\n"
                "with strategy.scope():\n    model = build_and_compile()" + back,
        source="TensorFlow guide: a process takes the memory of all visible GPUs but runs on one unless distributed; "
               "limits: gputop",
        gain=Gain(None, f"at best the work {spreads}; {_NO_FIGURE}"),
    )


def _wholly_idle(view: View, found: list[tuple[ProcessSample, list[int]]]) -> Finding:
    window_s = view.seconds("idle_gpu.all_window_s")
    process, idle = max(found, key=lambda f: len(f[1]))
    gpus = sorted({i for _, indices in found for i in indices})
    cores = process.cpu_cores.value
    evidence = {"window_s": window_s, "idle_gpus_count": float(len(idle)),
                "held_gpus_count" if view.complete else "held_gpus_watched_count": float(len(idle))}
    if cores is not None:
        evidence["cpu_cores"] = cores
    doing = "" if cores is None else f" It uses {cores:.1f} CPU cores."
    cause = ": it compiles, loads, waits or is stuck"
    action = "Look at what its Python threads do; if it is a forgotten notebook, stop it to free the GPUs."
    if not view.complete:
        cause = "; what it does on GPUs that are not watched does not show here"
        action = "Look at all GPUs of the node, without --gpus: where the process works on others, spread the " \
                 "training over all or hide the idle ones from it; where it works on none, look what its threads do."
    return Finding(
        id="idle_gpu", severity="medium", origin="live", gpus=tuple(gpus), evidence=evidence,
        title=f"{gpus_text(gpus)} held, all idle for {window_s:.0f} s",
        why=f"{name_of(process)} holds {gpus_text(idle)} and has not used "
            f"{'it' if len(idle) == 1 else 'them'} for {window_s:.0f} s{cause}.{doing}",
        action=action,
        snippet=f"py-spy dump --pid {process.pid}",
        source="limits: gputop",
        gain=Gain(None, "no step runs" if view.complete else _NO_FIGURE),
    )


def unused_gpu(view: View) -> Finding | Abstained | None:
    """GPUs without any compute process while a job works on others."""
    if not view.processes:
        return view.no_process("unused_gpu")
    window_s = view.seconds("unused_gpu.window_s")
    unused, at_work = view.without_process(window_s)
    working = [a[1] for g in view.whole_gpus if g not in unused and (a := view.activity(g, window_s)) is not None]
    if not working:
        return Abstained("unused_gpu", f"{window_s:.0f} s of activity readings")
    if not unused and at_work:
        return view.unlisted("unused_gpu", at_work)
    if not unused or max(working) < limit("unused_gpu.peer_busy"):
        return None
    return Finding(
        id="unused_gpu", severity="low", origin="live", gpus=tuple(g.info.index for g in unused),
        evidence={"window_s": window_s, "unused_gpus_count": float(len(unused)),
                  "gpus_count": float(len(view.sample.gpus) + view.sample.gpus_unwatched),
                  "busiest_activity_ratio": max(working)},
        title=f"{gpus_text(unused)} free",
        why=f"No process has used {gpus_text(unused)} for {window_s:.0f} s while others are busy.",
        action="If they belong to your allocation, make them visible to the job and distribute the training over them.",
        source="NVML process lists; limits: gputop",
        gain=Gain(None, "may be on purpose; " + _NO_FIGURE),
    )


def gpu0_oversubscribed(view: View) -> Finding | Abstained | None:
    """The first GPU of a process works clearly more than the others, which wait for it."""
    processes = [p for p in view.processes if len(view.compute_gpus(p)) > 1]
    if not processes:
        if not view.processes:
            return view.no_process("gpu0_oversubscribed")
        return Abstained("gpu0_oversubscribed", "a process that holds several GPUs" if view.complete
                         else "a process that holds several of the GPUs watched")
    # Where GPUs before them are not watched, the first of these need not be the first of the process.
    processes = [p for p in processes if view.sees_below(view.compute_gpus(p)[0].info.index)]
    if not processes:
        return Abstained("gpu0_oversubscribed", "the first GPU of the job: leave out --gpus, or watch GPU 0 too")
    judged = False
    for process in processes:
        gpus = view.compute_gpus(process)
        for metric in ("sm_active", "gpu_util"):
            uneven = _uneven(view, gpus, metric)
            if uneven:
                return _oversubscribed(view, process, gpus, *uneven, metric)
            if uneven is not None and metric == "sm_active":
                judged = True
                break
            # Waiting in a collective counts as coarse utilization: that can show the fault, never exclude it.
    if not judged:
        window_s = view.seconds("window_s")
        return Abstained("gpu0_oversubscribed", f"{window_s:.0f} s of SM activity of all GPUs of the job")
    return None


def _uneven(view: View, gpus: list[GpuSample], metric: str) -> tuple[float, float, float] | tuple[()] | None:
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


def _oversubscribed(view: View, process: ProcessSample, gpus: list[GpuSample], first: float, peers: float,
                    share: float, metric: str) -> Finding:
    window_s, count = view.seconds("window_s"), len(gpus)
    even = (first + (count - 1) * peers) / count
    what = "SM activity" if metric == "sm_active" else "coarse utilization"
    index, others = gpus[0].info.index, gpus_text(gpus[1:])
    if not view.complete:
        others += " (of those watched)"
    return Finding(
        id="gpu0_oversubscribed", severity=severity_of(1 - even / first), origin="live", gpus=(index,),
        evidence={"window_s": window_s, f"first_gpu_{metric}_ratio": first, f"peers_{metric}_ratio": peers,
                  "times_peers": first / peers, "slices_share_ratio": share},
        title=f"GPU {index} works {first / peers:.1f}× as much as its peers",
        why=f"{what} of {name_of(process)} over the last {window_s:.0f} s: {percent(first)} on GPU {index}, "
            f"{percent(peers)} on {others}. In synchronous training they wait for it at every step.",
        action=f"Keep everything that is not a replica's share off GPU {index}: metrics, summaries, evaluation and "
               "variables on the CPU or mirrored; capture (c) to see which operations they are.",
        snippet="strategy = tf.distribute.MirroredStrategy(  # not ReductionToOneDevice\n"
                "    cross_device_ops=tf.distribute.NcclAllReduce())\n"
                "# metrics and summaries off the GPU:\n"
                "with tf.device('/CPU:0'):\n    ...",
        source="compares the GPUs of one process; limits: gputop, above the straggler limits of HTA and TraceML (20 %)",
        gain=Gain(None, _NO_FIGURE),
    )


def shared_gpu(view: View) -> Finding | Abstained | None:
    """Processes of different jobs compute on one GPU."""
    if not view.processes:
        return view.no_process("shared_gpu")
    if any("nvidia-cuda-mps" in (p.command or "") for p in view.sample.processes):
        return Abstained("shared_gpu", "how MPS divides the GPU: sharing through MPS is on purpose")
    unread = [p for p in view.processes if p.command is None]
    shared: dict[int, tuple[ProcessSample, ProcessSample]] = {}
    for gpu in view.whole_gpus:
        here = sorted((p for p in view.processes if _takes_part(view, p, gpu)), key=lambda p: -_sm(p, gpu))
        pairs = [(a, b) for i, a in enumerate(here) for b in here[i + 1:]
                 if None not in (a.command, b.command) and not same_job(a, b, view.complete)]
        if pairs:
            shared[gpu.info.index] = pairs[0]
    if not shared:
        if unread:
            return Abstained("shared_gpu", f"the command of pid {unread[0].pid}: {unread[0].reason or 'not readable'}")
        return None
    by_index = {g.info.index: g for g in view.whole_gpus}
    index, (a, b) = max(shared.items(), key=lambda s: _sm(s[1][1], by_index[s[0]]))
    gpu = by_index[index]
    evidence = {"together_s": min(_together_s(view, p, gpu) for p in (a, b)), "shared_gpus_count": float(len(shared))}
    for name, process in (("first", a), ("second", b)):
        sm = process.gpus[index].sm_ratio.value
        if sm is not None:
            evidence[f"{name}_sm_ratio"] = sm
    before = next((f.severity for f in view.previous if f.id == "shared_gpu"), None)
    return Finding(
        id="shared_gpu", severity=_sharing(_sm(b, gpu), before), origin="live", gpus=tuple(sorted(shared)),
        evidence=evidence, title=f"{gpus_text(shared)} shared by two jobs",
        why=f"{name_of(a)} of {a.user or 'an unknown user'} and {name_of(b)} of {b.user or 'an unknown user'} are both "
            f"on GPU {index}: their kernels take turns and neither gets all of its memory.",
        action="Give each job GPUs of its own.",
        snippet="CUDA_VISIBLE_DEVICES=0,1 python first.py\nCUDA_VISIBLE_DEVICES=2,3 python second.py",
        source="NVML process list and process utilization; CUDA time-slices contexts of different processes",
        gain=Gain(None, "depends on how much the other job uses; " + _NO_FIGURE),
    )


def _takes_part(view: View, process: ProcessSample, gpu: GpuSample) -> bool:
    """Whether the process is more than passing by: there for a while, with memory or kernels."""
    held = process.gpus.get(gpu.info.index)
    if held is None or "C" not in held.kind or _together_s(view, process, gpu) < limit("shared_gpu.together_s"):
        return False
    memory, total = held.memory_bytes.value, gpu["memory_total_bytes"].value
    holds = bool(memory and total and memory / total >= limit("shared_gpu.memory_ratio"))
    return holds or _sm(process, gpu) >= limit("shared_gpu.sm_medium")


def _together_s(view: View, process: ProcessSample, gpu: GpuSample) -> float:
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


def memory_preallocated(view: View) -> Finding | Abstained | None:
    """Nearly all memory is held and does not move: reserved at start, whatever the job needs."""
    if not view.processes:
        return view.no_process("memory_preallocated")
    window_s = view.seconds("window_s")
    pressed = view.gpus_left_out("memory_preallocated")
    reserved: dict[int, float] = {}
    judged = False
    for gpu in {g.info.index: g for p in view.processes for g in view.compute_gpus(p)}.values():
        index, total = gpu.info.index, gpu["memory_total_bytes"].value
        mean, span = view.mean(gpu, "memory_used_bytes", window_s), view.span(gpu, "memory_used_bytes", window_s)
        if mean is None or span is None or not total:
            continue
        judged = True
        if index in pressed:
            continue
        share = mean / total
        if span / total <= limit("memory_preallocated.flat") and share >= view.limit("memory_preallocated", "", index):
            reserved[index] = share
    if not judged:
        return Abstained("memory_preallocated", f"{window_s:.0f} s of memory used and the total of a held GPU")
    if not reserved:
        return None
    most = max(reserved.values())
    return Finding(
        id="memory_preallocated", severity="low", origin="live", gpus=tuple(sorted(reserved)),
        evidence={"window_s": window_s, "memory_used_of_total_ratio": most},
        title=f"{gpus_text(reserved)}: memory used says nothing about head-room",
        why=f"{percent(most)} of the memory is held and has not moved for {window_s:.0f} s. TensorFlow reserves nearly "
            "all of it at start (JAX 75 %), so this figure hides what the job really needs.",
        action="Capture (c): the allocator's peak in the trace is the true head-room, for a larger batch for example; "
               "TF_FORCE_GPU_ALLOW_GROWTH=true lets TensorFlow take only what it needs.",
        snippet="TF_FORCE_GPU_ALLOW_GROWTH=true python train.py",
        source="TensorFlow GPU guide: memory is mapped at start; limits: gputop",
        gain=Gain(None, "this explains a figure; nothing is wrong"),
    )


def memory_pressure(view: View) -> Finding | Abstained | None:
    """Processes that share a GPU have nearly used up its memory, and it still moves.

    That is all that live figures can show: what one process holds may be its allocator's reserve.
    """
    rule = "memory_pressure"
    if not view.processes:
        return view.no_process(rule)
    window_s = view.seconds("memory_pressure.window_s")
    tight: dict[int, dict[str, float]] = {}
    judged, reserves = False, []
    for gpu in {g.info.index: g for p in view.processes for g in view.compute_gpus(p)}.values():
        index, total = gpu.info.index, gpu["memory_total_bytes"].value
        used = view.mean(gpu, "memory_used_bytes", window_s)
        if used is None or not total:
            continue
        held = [p for p in view.processes if index in p.gpus]
        free = total - used - (gpu["memory_reserved_bytes"].value or 0.0)
        scarce = len(held) > 1 and free <= view.limit(rule, "free_", index) * total
        span = (view.span(gpu, "memory_used_bytes", window_s) or 0.0) if scarce else 0.0
        if scarce and (index in view.shown(rule) or span >= limit("memory_pressure.moved") * total):
            tight[index] = {"window_s": window_s, "free_of_total_ratio": max(0.0, free) / total,
                            "processes_count": float(len(held)), "memory_span_bytes": span}
        elif used >= limit("memory_pressure.full") * total:
            reserves.append(gpu)
            continue
        judged = True
    if not tight:
        if reserves:
            return Abstained(rule, f"the allocator's peak on {gpus_text(reserves)}: memory used may be reserved at "
                                   "start and says nothing; capture a trace (c)")
        return None if judged else Abstained(rule, f"{window_s:.0f} s of memory used and the total of a held GPU")
    index, evidence = min(tight.items(), key=lambda found: found[1]["free_of_total_ratio"])
    return Finding(
        id=rule, severity="medium", origin="live", gpus=tuple(sorted(tight)), evidence=evidence,
        title=f"{gpus_text(tight)}: processes compete for the last memory",
        why=f"{evidence['processes_count']:.0f} processes hold GPU {index}; {percent(evidence['free_of_total_ratio'])} "
            f"of its memory was free over the last {window_s:.0f} s, and what they hold still changed. The next one "
            "that needs more fails with out-of-memory, whichever it is.",
        action="Give each process a GPU of its own, or a memory limit that leaves room for the others.",
        snippet="gpu = tf.config.list_physical_devices('GPU')[0]\n"
                "tf.config.set_logical_device_configuration(\n"
                "    gpu, [tf.config.LogicalDeviceConfiguration(memory_limit=30_000)])  # MiB",
        source="NVML memory used, reserved and total, process list; " + source("memory_pressure.free_enter"),
        gain=Gain(None, "it averts a failure; nothing gets faster"),
    )
