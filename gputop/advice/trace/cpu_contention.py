"""CPUs: do other programs, or processes that the job started, keep them busy while the job needs them?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gputop.advice.registry import limit, source
from gputop.advice.trace.facts import TraceFacts
from gputop.advice.trace.job import Job
from gputop.advice.verdict import Explanation, Missing, Verdict
from gputop.core.job_cpus import CpuUser, JobCpus
from gputop.text.units import percent, printable

_OF_HOST = ("input", "launch", "host")  # parts of the step in which GPUs wait for a CPU's work
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
        return Missing("the CPU time of the job and of other programs, which gputop records when it captures a job on "
                       "its own machine")
    if len(facts.trace.paths) > 1 and cpus.ranks is None:
        return Missing("which processes of the node belong to the job's other ranks")
    host = 1.0  # without a GPU all of the step is the CPUs' work
    if facts.active:
        host = sum((facts.shares or {}).get(part, 0.0) for part in _OF_HOST)
    if not others_take(cpus) or host < limit("cpu_contention.share"):
        return None
    return CpuContention(
        # More than the CPU time itself: their work also empties caches and interrupts the job's threads.
        gpus=facts.active_numbers, share=_lost(facts, cpus, host), frees_cpus=True, best_case=True,
        allowed=cpus.allowed, used=cpus.used,
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


def others_take(cpus: JobCpus | None) -> bool:
    """Return whether other processes take so much of the CPUs that the job's own work is slower for it."""
    if cpus is None or cpus.used is None or cpus.programs is None or cpus.busy is None:
        return False
    if cpus.quota is not None and cpus.used >= limit("cpu_contention.full") * cpus.quota:
        return False  # it gets all that it is granted
    return (cpus.busy >= limit("cpu_contention.full") * cpus.allowed
            and cpus.programs >= limit("cpu_contention.others") * cpus.allowed)


def _lost(facts: TraceFacts, cpus: JobCpus, host: float) -> float:
    """Upper bound of the share of the step that is lost. What the main thread does itself, others hold up no more than
    it was seen to wait for a CPU; of the rest any thread may have waited."""
    if cpus.held_up is None or facts.host is None or facts.period_s <= 0:
        return host * taken(cpus)
    main_s = facts.host.tracing_s + facts.host.eager_s + (facts.host.gap_s or 0.0)
    main = min(main_s / facts.period_s, host)
    return main * min(cpus.held_up, taken(cpus)) + (host - main) * taken(cpus)


def taken(cpus: JobCpus) -> float:
    """Upper bound of the share of the host's time that goes to other processes: 0 if the job had their CPUs as well."""
    programs, used = cpus.programs or 0.0, cpus.used or 0.0
    return programs / (programs + used) if programs else 0.0


def may_be_others(facts: TraceFacts, share: float, *, silent: bool) -> str | None:
    """Reason why other processes may have taken this share of the time, where only its length speaks for the job's own
    Python; None where they do not take so much.

    ``silent``: the main thread shows no event in most of it, so it ran Python or waited for a CPU, which was measured.
    In an event it may also have waited for another thread, which had no CPU.
    """
    cpus = facts.trace.job_cpus
    if cpus is None or not others_take(cpus):
        return None
    if share > (cpus.held_up if silent and cpus.held_up is not None else taken(cpus)):
        return None
    return (f"CPUs for the job: other processes kept {cpus.programs:.2g} of {cpus.allowed:.3g} CPUs busy and no CPU "
            "was idle, which also makes steps longer; capture again when they are not running")


def describe_cpu_contention(v: CpuContention, job: Job) -> Explanation:
    mostly_children = v.children is not None and v.children >= _MAIN_SHARE * v.programs
    who = "Other processes" if mostly_children else "Other programs"
    evidence = {"allowed_cpus": v.allowed, "job_cpus": v.used, "other_programs_cpus": v.programs}
    if v.children is not None:
        evidence["child_processes_cpus"] = v.children
    if v.held_up is not None:
        evidence["main_thread_held_up_ratio"] = v.held_up
    evidence["share_ratio"] = v.share
    started = f", {v.children:.2g} of them by processes that the job started" if mostly_children else ""
    why = (f"{who} used {v.programs:.2g} of the {v.allowed:.3g} CPUs that the job may use{started}. The job itself "
           f"got {v.used:.2g}, and no CPU was idle.")
    if v.held_up is not None:
        why += f" For {percent(v.held_up)} of the time its main thread was ready to run and had no CPU."
    named = [f"{printable(user.name)[:_NAME_CHARS]} (PID {user.pid}{', started by the job' if user.child else ''}) "
             f"{user.cpus:.2g}" for user in v.busiest[:_NAMED]]
    if named:
        why += f" The busiest: {', '.join(named)} CPUs."
    action = ("Give the job more CPUs, or start fewer of these processes: find out the purpose of each (workers of "
              "the input pipeline, a second program)." if mostly_children else
              "Stop these programs, lower their priority or keep them on other CPUs, or run the job on its own node.")
    pids = " ".join(str(user.pid) for user in v.busiest[:_NAMED]) or "PID"
    return Explanation(
        title=f"{who} keep {v.programs:.2g} of {v.allowed:.3g} CPUs busy, the job gets {v.used:.2g}", why=why,
        evidence=evidence, action=action,
        snippet=None if mostly_children else f"renice 19 {pids}  # or: taskset -apc CPUS PID\n# Slurm: --exclusive",
        gain=f"at most: the part of {'the waiting for the host' if v.gpus else 'the time'} that is these processes' "
             "share of the CPUs in use, if the job had those CPUs as well",
        source=source("cpu_contention.full", "cpu_contention.others"),
    )
