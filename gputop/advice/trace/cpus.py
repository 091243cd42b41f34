"""CPUs: do other programs, or processes that the job started, keep them busy while the job needs them? Does PyTorch
have one thread where several CPUs are idle, or more than there are CPUs? Do tf.data's threads keep those that launch
kernels from running?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import structs
from msgspec.structs import replace

from gputop.advice.fix_code import code, joined
from gputop.advice.registry import limit, source
from gputop.advice.trace.facts import TraceFacts, on_host, removed_host_time, waits_for_host
from gputop.advice.trace.job import Job
from gputop.advice.trace.known_work import ENOUGH_CPUS
from gputop.advice.trace.other_programs import host_share, lost_share, others_take
from gputop.advice.verdict import Explanation, Missing, Verdict, known
from gputop.analysis.host.gaps import ranked_work, work_in
from gputop.analysis.host.interruptions import interrupted, interruptions
from gputop.analysis.what_if.cure import Cure
from gputop.core.captured_samples import CpuUser, JobCpus
from gputop.core.findings import Culprit
from gputop.text.units import counted, counted_cpus, percent, printable, seconds
from gputop.trace.intervals import EMPTY, contains, coverage, intersect
from gputop.trace.lookups import computes_on_cpu, distinct, host_rows, spans_of
from gputop.trace.threads import GLOBAL_POOL, INPUT, MAIN, lines_of

_NAMED, _NAME_CHARS = 3, 32
_MAIN_SHARE = 0.5  # share of what the other processes use


class CpuContention(Verdict, frozen=True, kw_only=True):
    allowed: float  # CPUs that the job may run on
    used: float
    programs: float  # CPUs that other programs and the job's child processes keep busy, its ranks and gputop aside
    children: float | None  # of them by processes that the job started; None: not known
    held_up: float | None  # share of the recording in which the main thread had no CPU
    busiest: Sequence[CpuUser]


def judge_cpu_contention(facts: TraceFacts) -> CpuContention | Missing | None:
    """No CPU is idle, other processes take a good part of them, and the job's host has work that takes time."""
    cpus = _with_few_workers(facts.trace.job_cpus)
    if cpus is None or cpus.used is None or cpus.programs is None:
        return Missing("data on the CPU time of the job and of other programs, which gputop records when it captures a "
                       "job on its own machine")
    if len(facts.trace.paths) > 1 and cpus.ranks is None:
        return Missing("to know which processes on the node belong to other ranks of the job")
    if not others_take(cpus) or host_share(facts) < limit("cpu_contention.share"):
        return None
    return CpuContention(
        # More than the CPU time itself: their work also empties caches and interrupts the job's threads.
        gpus=facts.active_numbers, share=lost_share(facts, cpus),
        claim=None if facts.steps is None else facts.on_cpus("at most"), allowed=cpus.allowed, used=cpus.used,
        programs=cpus.programs, children=cpus.children, held_up=cpus.held_up,
        busiest=tuple(user for user in cpus.busiest if user.cpus >= limit("cpu_contention.named") * cpus.programs))


def _with_few_workers(cpus: JobCpus | None) -> JobCpus | None:
    """The same with the processes that the job started, such as a DataLoader's workers, as part of the job; unless they
    are most of what keeps the CPUs busy next to it: then they are the finding."""
    if cpus is None or cpus.children is None or cpus.used is None or cpus.others is None or not cpus.programs or (
            cpus.children >= _MAIN_SHARE * cpus.programs):
        return cpus
    return replace(cpus, used=cpus.used + cpus.children, others=cpus.others - cpus.children, children=0.0,
                   busiest=tuple(user for user in cpus.busiest if not user.child))


def describe_cpu_contention(v: CpuContention, job: Job) -> Explanation:
    mostly_children = v.children is not None and v.children >= _MAIN_SHARE * v.programs
    who = "Other processes" if mostly_children else "Other programs"
    started = f", including {v.children:.2g} for processes that the job started" if mostly_children else ""
    why = (f"{who} used {v.programs:.2g} of the {counted_cpus(v.allowed)} that the job may use{started}. The job "
           f"itself got {v.used:.2g} CPUs, and no CPU was idle.")
    if v.held_up is not None and v.held_up >= 0.01:
        why += f" The main thread was ready to run but had no CPU for {percent(v.held_up)} of the time."
    named = [f"{printable(user.name)[:_NAME_CHARS]} (PID {user.pid}{', started by the job' if user.child else ''}) "
             f"with {user.cpus:.2g}" for user in v.busiest[:_NAMED]]
    if named:
        why += f" The busiest processes are {', '.join(named)} CPUs."
    action = ("Give the job more CPUs, or start fewer of these processes: find out what each one is for (input "
              "pipeline workers, a second program)." if mostly_children else
              "Stop these programs, lower their priority, move them to other CPUs, or run the job on its own node.")
    pids = " ".join(str(user.pid) for user in v.busiest[:_NAMED]) or "PID"
    return Explanation(
        title=f"{who} keep {v.programs:.2g} of {counted_cpus(v.allowed)} busy, and the job gets {v.used:.2g}", why=why,
        evidence=known({
            "allowed_cpus": v.allowed, "job_cpus": v.used, "other_programs_cpus": v.programs,
            "child_processes_cpus": v.children, "main_thread_held_up_ratio": v.held_up, "share_ratio": v.share}),
        action=action, snippet=None if mostly_children else code("cpu_contention", "others", PIDS=pids),
        gain="unknown, because the trace has no steps" if v.claim is None else
             f"assumes that the threads that delay the {job.basis} always get a CPU when they are ready to run",
        source=source("cpu_contention.full", "cpu_contention.others"))


# Ops that PyTorch divides between its threads, however they are reached.
_PARALLEL = (r"aten::(?:addmm|mm|bmm|baddbmm|mkldnn_\w+|thnn_conv2d|_slow_conv2d\w*|_?convolution\w*|linear|matmul|"
             r"_?scaled_dot_product\w*|lstm|gru|conv\w+)$")
_LARGE_NS = 1_000_000  # of such an op: dividing it takes some 10 µs. gputop's own figure
_NOT_KNOWN = Missing("the numbers of runnable job threads and idle CPUs, which gputop records when it captures a "
                     "job on its own machine")


def _cpus(facts: TraceFacts) -> JobCpus | None:
    cpus = facts.trace.job_cpus
    if cpus is None or None in (cpus.used, cpus.others, cpus.threads, cpus.waited):
        return None
    return cpus


class ThreadsUnused(Verdict, frozen=True, kw_only=True):
    large_ratio: float  # share of the step in large ops
    used: float
    idle_cpus: float
    allowed: float
    threads: int  # that the job could have, all ranks alike


def judge_threads_unused(facts: TraceFacts) -> ThreadsUnused | Missing | None:
    """One thread computes ops that PyTorch would divide, while cores are idle."""
    if not computes_on_cpu(facts.trace) or not facts.shares:
        return None
    cpus = _cpus(facts)
    if cpus is None or cpus.cores is None or cpus.main is None:
        return _NOT_KNOWN
    assert cpus.used is not None and cpus.others is not None
    ranks = 1 + round((cpus.ranks or 0.0) / max(cpus.used, 0.1))
    idle = cpus.limit - cpus.used - cpus.others
    threads = min(int(cpus.cores // ranks), 1 + int(idle / ranks + limit("threads_unused.idle")))
    # The ops' threads share the work with the main one; a profiler's or a loader's thread takes little.
    if cpus.main < limit("threads_unused.main") * cpus.used or threads < 2:
        return None
    spans, large = facts.analyzed_spans, host_rows(facts.trace, _PARALLEL)
    host = facts.trace.host
    large = large[lines_of(facts.trace, MAIN)[host.line[large]] & (
        host.end_ns[large] - host.start_ns[large] >= _LARGE_NS)]
    inside = coverage(spans, host.start_ns[large], host.end_ns[large])
    large, inside = large[inside > 0], inside[inside > 0]
    if not len(large) or not spans.total:
        return None
    covered = coverage(spans_of(facts.trace, large), spans.start, spans.end).sum()
    ratio = min(float(covered) / spans.total, 1.0)
    share = ratio * (1 - 1 / threads)
    if share < limit("threads_unused.share"):
        return None
    longest = large[inside.argmax()]
    per = facts.steps_or_window * facts.processes
    name = host.name[longest]
    return ThreadsUnused(
        gpus=(), share=share, large_ratio=ratio, used=cpus.used, idle_cpus=idle, allowed=cpus.limit, threads=threads,
        culprits=(Culprit(facts.trace.names[name], "host", float(inside[host.name[large] == name].sum()) / per / 1e9,
                          facts.basis, at_s=int(host.start_ns[longest]) / 1e9),))


def describe_threads_unused(v: ThreadsUnused, job: Job) -> Explanation:
    op = v.culprits[0].name if v.culprits else "an op"
    return Explanation(
        title=f"One thread computes for {percent(v.large_ratio)} of the {job.basis} while {v.idle_cpus:.2g} CPUs are "
              "idle",
        why=(f"The job kept {v.used:.2g} of {counted_cpus(v.allowed)} busy, almost entirely with its main thread, and "
             f"{v.idle_cpus:.2g} CPUs were idle. Ops that PyTorch can split across threads, mainly {op}, take "
             f"{percent(v.large_ratio)} of the {job.basis}."),
        evidence={"large_ops_ratio": v.large_ratio, "job_cpus": v.used, "idle_cpus": v.idle_cpus,
                  "allowed_cpus": v.allowed, "share_ratio": v.share},
        action=f"Give PyTorch {v.threads} threads. torchrun sets OMP_NUM_THREADS=1 by default.",
        snippet=code("threads_unused", "pytorch", THREADS=v.threads),
        gain=f"assumes that these ops run in 1/{v.threads} of the time with {v.threads} threads",
        source=source("threads_unused.share", "threads_unused.idle"))


class ThreadOversubscription(Verdict, frozen=True, kw_only=True):
    working: int  # threads of the process that run or want to
    waiting: float  # of them without a CPU, on average
    allowed: float
    ranks: int  # processes of the job on this node
    threads: int  # to set


def judge_thread_oversubscription(facts: TraceFacts) -> ThreadOversubscription | Missing | None:
    """The job's own threads are more than the CPUs that it may use, and wait for each other's CPU."""
    if not computes_on_cpu(facts.trace) or not facts.shares:
        return None
    cpus = _cpus(facts)
    if cpus is None or cpus.held_up is None:
        return _NOT_KNOWN
    assert cpus.used is not None and cpus.threads is not None and cpus.waited is not None
    if others_take(cpus):
        return None
    ranks = 1 + round((cpus.ranks or 0.0) / max(cpus.used, 0.1))
    most = limit("thread_oversubscription.threads") * cpus.limit
    if cpus.threads < 2 or cpus.threads * ranks <= most or (cpus.used + cpus.waited) * ranks <= most or (
            cpus.held_up < limit("thread_oversubscription.held_up")):
        return None
    return ThreadOversubscription(
        gpus=(), share=cpus.held_up, working=cpus.threads, waiting=cpus.waited, allowed=cpus.limit, ranks=ranks,
        threads=max(int(np.floor(min(cpus.limit, cpus.cores or cpus.limit) / ranks)), 1), claim="about")


def describe_thread_oversubscription(v: ThreadOversubscription, job: Job) -> Explanation:
    of_ranks = f"in each of about {v.ranks} processes" if v.ranks > 1 else ""
    return Explanation(
        title=f"{v.working} threads{of_ranks and ' ' + of_ranks} share {counted_cpus(v.allowed)}",
        why=(f"{of_ranks[:1].upper()}{of_ranks[1:]}{of_ranks and ', '}{v.working} threads were runnable; on average, "
             f"{v.waiting:.2g} of those threads were waiting for a CPU. "
             f"The main thread had no CPU for {percent(v.share)} of the time. An op is done when its last "
             "thread is done, so each op waits for threads without a CPU."),
        evidence={"working_threads": float(v.working), "waiting_threads": v.waiting, "allowed_cpus": v.allowed,
                  "main_thread_held_up_ratio": v.share},
        action=f"Give each process {counted(v.threads, 'thread')}, so that the total matches the number of CPUs. "
               "NumPy's threads come on top of PyTorch's and compete for the CPUs even while they wait.",
        snippet=code("thread_oversubscription", "pytorch", THREADS=v.threads),
        gain="assumes that the main thread always has a CPU when there are no more threads than CPUs",
        source=source("thread_oversubscription.threads", "thread_oversubscription.held_up"))


_WORTH_NAMING = 0.05  # share of what tf.data's threads do while launches are late


class ThreadContention(Verdict, frozen=True, kw_only=True):
    launch_wait_s: float  # per step: the GPU waits inside the step's call for a launch
    collective_wait_s: float  # per step: other GPUs wait in collectives for one whose launches were held up
    held_up: float  # share of the launch wait for single launches that come far later than the others
    threads_at_work: float  # of tf.data, on average
    shared: float  # of them on threads that the model's ops need as well
    cpus: int
    input_meanwhile: float  # share of the late launches during which tf.data works
    pool: str | None  # where launches come from: TensorFlow's GPU thread mode


class ThreadsInterrupted(Verdict, frozen=True, kw_only=True):
    launch_wait_s: float  # per step: the GPU waits while a launching thread stands still within a call
    calls: float  # such calls per step, and GPU
    names: Sequence[str]  # of these calls
    longest_s: float


def _judge_interrupted(facts: TraceFacts) -> ThreadsInterrupted | None:
    """The GPU waits while threads of PyTorch stand still in the middle of calls of many kinds."""
    waits, rows = removed_host_time(facts, "dispatch"), interrupted(facts.trace)
    rows = rows[contains(facts.analyzed_spans, facts.trace.host.start_ns[rows])]
    late = {timeline.gpu: intersect(waits.get(timeline.gpu, EMPTY), interruptions(facts.trace, timeline))
            for timeline in facts.gpu_timelines}
    per = 1e9 * facts.steps_or_window * max(len(late), 1)
    wait_s = sum(spans.total for spans in late.values()) / per
    if not len(rows) or wait_s < limit("thread_contention.share") * facts.period_s:
        return None
    names, time = facts.trace.host.name[rows], facts.trace.host.end_ns[rows] - facts.trace.host.start_ns[rows]
    by_time = sorted(distinct(names).tolist(), key=lambda name: -int(time[names == name].sum()))
    return ThreadsInterrupted(
        gpus=facts.active_numbers, share=wait_s / facts.period_s, launch_wait_s=wait_s, calls=len(rows) * 1e9 / per,
        names=[facts.trace.names[name] for name in by_time], longest_s=int(time.max()) / 1e9,
        cure=Cure(host=late, assumes="Assumes that the launching threads always have a CPU."))


def _describe_interrupted(v: ThreadsInterrupted, job: Job) -> Explanation:
    each = " and GPU" if len(v.gpus) > 1 else ""
    return Explanation(
        title=f"Launching threads stop in the middle of calls for {percent(v.share)} of the {job.basis}",
        why=(f"For {percent(v.share)} of the {job.basis}, a GPU waits while the thread that launches its kernels "
             f"stands still in the middle of a call: {v.calls:.3g} times per {job.basis}{each}, for up to "
             f"{seconds(v.longest_s)}. This happens in {len(v.names)} kinds of calls, for example "
             f"{', '.join(v.names[:_NAMED])}, which take far less time otherwise. So the thread most likely had no "
             "CPU, or waited for another thread."),
        evidence={"launch_wait_s": v.launch_wait_s, "share_ratio": v.share, "interrupted_calls_count": v.calls,
                  "longest_pause_s": v.longest_s},
        action=ENOUGH_CPUS, snippet=code("thread_contention", job.framework),
        gain="assumes that launching threads always have a CPU",
        source=source("thread_contention.share"))


def judge_thread_contention(facts: TraceFacts) -> ThreadContention | ThreadsInterrupted | Missing | None:
    """Single launches are held up while tf.data's threads fill the CPUs.

    Evidence is needed for all of it: the GPU waits inside the step's call, most of that in launches that come
    far later than usual, and tf.data's threads fill the cores during most of those.
    """
    if facts.framework == "pytorch":
        return _judge_interrupted(facts)
    threads, host = facts.analysis.launch_threads, facts.host
    assert threads is not None and host is not None
    if not facts.shares or host.stalled is None or threads.input_threads_at_launch is None:
        return None
    held_up = host.dispatch_s * host.stalled
    if (held_up < limit("thread_contention.share") * facts.period_s or host.stalled < limit("thread_contention.stalled")
            or (host.input_together or 0.0) < limit("thread_contention.together")):
        return None
    pool = sum(GLOBAL_POOL.match(line.name) is not None for line in facts.trace.lines)
    # Where tf.data takes the threads that launch, their number is the limit, whatever CPUs there are.
    cpus = pool if host.input_shared_threads >= limit("thread_contention.busy") * pool > 0 else threads.cpus
    if cpus is None:
        return Missing("the number of CPUs that the job may use (cpu_budget in tf.data's iterator events); launches "
                       "are late while tf.data works, but the trace does not show whether tf.data uses all CPUs")
    at_work = host.input_threads or 0.0
    if at_work < limit("thread_contention.busy") * cpus:
        return None
    waits = facts.waits
    # GPUs that wait in a collective for the one whose launches were held up longest wait for the same CPUs: with
    # this the mean over the GPUs becomes what the last one of each collective lost.
    others_s = waits.late_by_host_s * (1 - 1 / len(waits.waiting_s)) if waits is not None else 0.0
    time_by_name = work_in(facts.trace, late := waits_for_host(facts, "dispatch"), lines_of(facts.trace, INPUT))[0]
    work = [item for item in ranked_work(time_by_name, 1) if item.s_per_step >= _WORTH_NAMING * sum(
        time for time, _ in time_by_name.values()) / 1e9]
    return ThreadContention(
        # Without times: theirs are sums over many threads.
        culprits=tuple(structs.replace(item, time_s=None) for item in on_host(facts, work, late)),
        gpus=facts.active_numbers, share=(host.dispatch_s + host.stalled * others_s) / facts.period_s,
        launch_wait_s=host.dispatch_s, collective_wait_s=others_s, held_up=host.stalled, threads_at_work=at_work,
        shared=host.input_shared_threads, cpus=threads.cpus or pool, input_meanwhile=host.input_together or 0.0,
        pool=threads.mode, cure=Cure(host=removed_host_time(facts, "dispatch"), assumes=(
            "Assumes that the launching threads always have a CPU, so that no launch is late.")))


def describe_thread_contention(v: ThreadContention | ThreadsInterrupted, job: Job) -> Explanation:
    if isinstance(v, ThreadsInterrupted):
        return _describe_interrupted(v, job)
    tensorflow = job.framework != "jax"  # which has neither that pool nor these settings
    private = v.pool == "gpu_private" or not tensorflow
    workers = max(v.cpus - 2 * max(len(v.gpus), 1) - 1, 1)
    limited = code("thread_contention", "pool", THREADS=min(workers, max(v.cpus // 2, 1)))
    why = (f"For {percent(v.launch_wait_s / job.period_s)} of the {job.basis}, the GPU waits for launches within the "
           f"step. Individual launches that are much later than the others cause {percent(v.held_up)} of this wait, "
           f"during which {v.threads_at_work:.0f} tf.data threads are running on {v.cpus} CPUs."
           + " Launches come from the thread pool that all of TensorFlow shares." * (v.pool == "global" and tensorflow))
    if tensorflow and v.shared >= 0.5:
        why += f" {v.shared:.0f} of these threads belong to the shared pool, and the model's ops wait for a free one."
    if v.collective_wait_s >= limit("thread_contention.share") * job.period_s:
        why += (f" For another {percent(v.collective_wait_s / job.period_s)} of the time, GPUs wait in collectives for "
                "a GPU that was delayed in this way.")
    return Explanation(
        title=f"tf.data's threads delay launches for {percent(v.share)} of the {job.basis}", why=why,
        evidence={
            "launch_wait_s": v.launch_wait_s, "collective_wait_s": v.collective_wait_s, "share_ratio": v.share,
            "held_up_ratio": v.held_up, "input_threads_at_work": v.threads_at_work, "cpus": float(v.cpus),
            "input_working_meanwhile_ratio": v.input_meanwhile},
        action=("Limit the number of tf.data threads, so that the launching threads have free CPUs." if private else
                "Give each GPU its own launching threads, and limit the number of tf.data threads."),
        snippet=limited if private else joined(code("thread_contention", "launches"), limited),
        gain="assumes that launching threads always have a CPU, so that GPUs do not wait for late launches",
        source=source("thread_contention.busy", "thread_contention.stalled")
        + "; TensorFlow's GPU performance guide: GPU host thread contention")
