"""PyTorch's threads on the CPU: one where several CPUs are idle, or more than there are CPUs."""

from __future__ import annotations

import numpy as np

from gputop.advice.registry import limit, source
from gputop.advice.trace.cpu_contention import others_take
from gputop.advice.trace.facts import TraceFacts
from gputop.advice.trace.job import Job
from gputop.advice.verdict import Explanation, Missing, Verdict
from gputop.core.findings import Culprit
from gputop.core.job_cpus import JobCpus
from gputop.text.units import counted, percent
from gputop.trace.intervals import coverage, union
from gputop.trace.lookups import computes_on_cpu, host_rows
from gputop.trace.threads import MAIN, lines_of

# Ops that PyTorch divides between its threads, however they are reached.
_PARALLEL = (r"aten::(?:addmm|mm|bmm|baddbmm|mkldnn_\w+|thnn_conv2d|_slow_conv2d\w*|_?convolution\w*|linear|matmul|"
             r"_?scaled_dot_product\w*|lstm|gru|conv\w+)$")
_LARGE_NS = 1_000_000  # of such an op: dividing it takes some 10 µs. gputop's own figure
_NOT_KNOWN = Missing("how many of the job's threads had work and how many CPUs were idle, which gputop records when it "
                     "captures a job on its own machine")


def _cpus(facts: TraceFacts) -> JobCpus | None:
    cpus = facts.trace.job_cpus
    if cpus is None or None in (cpus.used, cpus.others, cpus.threads, cpus.waited):
        return None
    return cpus


# -- threads_unused -------------------------------------------------------------------------------------

class ThreadsUnused(Verdict, frozen=True, kw_only=True):
    large_ratio: float  # share of the step in large ops
    used: float
    idle_cpus: float
    allowed: float
    threads: int  # that the job could have, all ranks alike


def judge_threads_unused(facts: TraceFacts) -> ThreadsUnused | Missing | None:
    """One thread computes ops that PyTorch would divide, while cores are idle."""
    if not computes_on_cpu(facts.trace) or facts.period_s <= 0:
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
    processes = max(len(facts.host.divided) if facts.host is not None else 1, 1)
    covered = coverage(union(host.start_ns[large], host.end_ns[large]), spans.start, spans.end).sum()
    ratio = min(float(covered) / spans.total, 1.0)
    share = ratio * (1 - 1 / threads)
    if share < limit("threads_unused.share"):
        return None
    longest = large[inside.argmax()]
    per = facts.steps_or_window * processes
    name = host.name[longest]
    return ThreadsUnused(
        gpus=(), share=share, large_ratio=ratio, used=cpus.used, idle_cpus=idle, allowed=cpus.limit, threads=threads,
        culprits=(Culprit(facts.trace.names[name], "host", float(inside[host.name[large] == name].sum()) / per / 1e9,
                          facts.basis, at_s=int(host.start_ns[longest]) / 1e9),))


def describe_threads_unused(v: ThreadsUnused, job: Job) -> Explanation:
    op = v.culprits[0].name if v.culprits else "an op"
    return Explanation(
        title=f"One thread computes {percent(v.large_ratio)} of the {job.basis}, and {v.idle_cpus:.2g} CPUs are idle",
        why=(f"The job kept {v.used:.2g} of {v.allowed:.3g} CPUs busy, nearly all by its main thread, and "
             f"{v.idle_cpus:.2g} were idle. {percent(v.large_ratio)} of the {job.basis} are ops that PyTorch can "
             f"divide between threads, most of all {op}."),
        evidence={"large_ops_ratio": v.large_ratio, "job_cpus": v.used, "idle_cpus": v.idle_cpus,
                  "allowed_cpus": v.allowed, "share_ratio": v.share},
        action=(f"Give PyTorch {v.threads} threads. torchrun sets OMP_NUM_THREADS=1 if nothing else does."),
        snippet=(f"torch.set_num_threads({v.threads})  # at the start of the script\n"
                 f"# or: OMP_NUM_THREADS={v.threads} torchrun …"),
        gain=f"at most: the time of these ops, divided by {v.threads} threads",
        source=source("threads_unused.share", "threads_unused.idle"),
    )


# -- thread_oversubscription ----------------------------------------------------------------------------

class ThreadOversubscription(Verdict, frozen=True, kw_only=True):
    working: int  # threads of the process that run or want to
    waiting: float  # of them without a CPU, on average
    allowed: float
    ranks: int  # processes of the job on this node
    held_up: float  # share of the time in which the main thread has no CPU
    threads: int  # to set


def judge_thread_oversubscription(facts: TraceFacts) -> ThreadOversubscription | Missing | None:
    """The job's own threads are more than the CPUs that it may use, and wait for each other's CPU."""
    if not computes_on_cpu(facts.trace) or facts.period_s <= 0:
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
        held_up=cpus.held_up, threads=max(int(np.floor(min(cpus.limit, cpus.cores or cpus.limit) / ranks)), 1),
        best_case=True, frees_cpus=True)


def describe_thread_oversubscription(v: ThreadOversubscription, job: Job) -> Explanation:
    of_ranks = f" in each of about {v.ranks} processes" if v.ranks > 1 else ""
    return Explanation(
        title=f"{v.working} threads{of_ranks} share {v.allowed:.3g} CPUs",
        why=(f"{v.working} threads had work{of_ranks}, and {v.waiting:.2g} of them waited for a CPU on average. "
             f"The main thread had no CPU for {percent(v.held_up)} of the time. An op is done when its last "
             "thread is, so each op waits for threads without a CPU."),
        evidence={"working_threads": float(v.working), "waiting_threads": v.waiting, "allowed_cpus": v.allowed,
                  "main_thread_held_up_ratio": v.held_up},
        action=f"Give each process {counted(v.threads, 'thread')}, so that there are as many threads as CPUs.",
        snippet=(f"torch.set_num_threads({v.threads})  # at the start of the script\n"
                 f"# or: OMP_NUM_THREADS={v.threads} in the environment"),
        gain="the time in which the main thread had no CPU, if there were no more threads than CPUs",
        source=source("thread_oversubscription.threads", "thread_oversubscription.held_up"),
    )
