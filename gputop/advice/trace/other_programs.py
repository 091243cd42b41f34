"""The part of a job's CPUs that other programs on the node take, and the time that it may lose to them."""

from __future__ import annotations

import numpy as np

from gputop.advice.registry import limit
from gputop.advice.trace.facts import TraceFacts, waits_for_input
from gputop.analysis.steps.training_loops import LOADER, loads_itself
from gputop.core.captured_samples import JobCpus
from gputop.text.units import percent
from gputop.trace.intervals import coverage, union
from gputop.trace.lookups import name_mask
from gputop.trace.threads import INPUT, lines_of

_OF_HOST = ("input", "launch", "host")  # parts of the step in which GPUs wait for a CPU's work
_STEADY_CALLS = 20
_ONE_BY_ONE = 1.05  # times the time in which any of them runs
_SLICE_NS = 1_000_000  # a thread that computes on full CPUs waits for another's slice of 1 to 4 ms, or several


def others_take(cpus: JobCpus | None) -> bool:
    """Return whether other processes take so much of the CPUs that the job's own work is slower for it."""
    if cpus is None or cpus.used is None or cpus.programs is None or cpus.busy is None:
        return False
    if cpus.quota is not None and cpus.used >= limit("cpu_contention.full") * cpus.quota:
        return False  # it gets all that it is granted
    return (cpus.busy >= limit("cpu_contention.full") * cpus.allowed
            and cpus.programs >= limit("cpu_contention.others") * cpus.allowed)


def host_share(facts: TraceFacts) -> float:
    """Share of the step in which GPUs wait for a CPU's work; without a GPU all of it."""
    return sum(facts.shares.get(part, 0.0) for part in _OF_HOST) if facts.active else 1.0


def lost_share(facts: TraceFacts, cpus: JobCpus) -> float:
    """Upper bound of the share of the step that is lost: in which a thread that it waits for was ready to run and had
    no CPU. The least of

    1. what the main thread does itself, as far as it was seen to wait for a CPU, and the others' part of the rest;
    2. all waits for a CPU, and all time in which not every thread slept, where no child process works for the job;
    3. the main thread's waits for a CPU, and the time that it sleeps while no batch is loaded, where it loads them;
    4. what is left beside the input pipeline's calls, did each take as long as most do;
    5. beside the steps that wait for a batch of a DataLoader's workers the waits of these: they set the pace, whatever
       the main thread waits for meanwhile.
    """
    host = host_share(facts)
    bounds = [host * taken(cpus), 1 - _undisturbed(facts)]
    if cpus.held_up is not None and facts.host is not None and facts.shares:
        main_s = facts.host.tracing_s + facts.host.eager_s + (facts.host.gap_s or 0.0)
        main = min(main_s / facts.period_s, host)
        bounds.append(main * min(cpus.held_up, taken(cpus)) + (host - main) * taken(cpus))
        if cpus.main is not None and loads_itself(facts.trace, facts.analyzed_spans):
            asleep = 1 - cpus.main - cpus.held_up
            bounds.append(cpus.held_up + max(asleep - facts.shares.get("input", 0.0), 0.0))
        elif cpus.main is not None and cpus.children_waited is not None:
            bounds.append(1 - _paced_by_workers(facts, 1 - cpus.main - cpus.held_up) * (1 - cpus.children_waited))
    recorded = facts.trace.job_cpus
    if recorded is not None and not recorded.children:
        bounds += [lost for lost in (cpus.waited, None if cpus.asleep is None else 1 - cpus.asleep) if lost is not None]
    return max(min(bounds), 0.0)


def _paced_by_workers(facts: TraceFacts, asleep: float) -> float:
    """Share of the time in steps that wait for a batch of PyTorch's workers. In such a wait the main thread is asleep:
    ``asleep`` is the share of the time in which it was, and what is beyond it were waits for a CPU."""
    input_share = facts.shares.get("input", 0.0)
    if facts.steps is None or not input_share or not name_mask(facts.trace, LOADER).any():
        return 0.0
    begin, end = facts.steps.edges_ns[:, 0], facts.steps.edges_ns[:, 1]
    waits = coverage(waits_for_input(facts), begin, end) >= limit("input_bound.share") * (end - begin)
    return float((end - begin)[waits].sum() / (end - begin).sum()) * min(max(asleep, 0.0) / input_share, 1.0)


def _undisturbed(facts: TraceFacts) -> float:
    """Share of the steps in which the input pipeline's threads run calls of one name, were each as long as most are; of
    calls that run one by one with the time from each to the next.

    Only of a name half of whose calls take the same within a time slice of the scheduler: what sleeps or waits for
    storage, or runs for less than a slice. A call that computes and has to wait for a CPU waits for whole slices.
    """
    trace, spans = facts.trace, facts.analyzed_spans
    host = trace.host
    rows = np.flatnonzero(lines_of(trace, INPUT).take(host.line))
    rows = rows[coverage(spans, host.start_ns[rows], host.end_ns[rows]) == host.end_ns[rows] - host.start_ns[rows]]
    times = np.bincount(host.name[rows], host.end_ns[rows] - host.start_ns[rows])
    most = 0.0
    for name in np.flatnonzero(times >= limit("cpu_contention.share") * max(spans.total, 1)).tolist():
        start, end = (column[rows[host.name[rows] == name]] for column in (host.start_ns, host.end_ns))
        took, covered = end - start, union(start, end).total
        if len(start) > _STEADY_CALLS and times[name] <= _ONE_BY_ONE * covered:
            took = np.diff(start)
            covered = int(took.sum())
        least, usual = np.percentile(took, (5, 50))
        if len(took) >= _STEADY_CALLS and usual - least <= _SLICE_NS:
            most = max(most, covered * float(usual) * len(took) / float(took.sum()) / spans.total)
    return min(most, 1.0)


def taken(cpus: JobCpus) -> float:
    """Upper bound of the share of the host's time that goes to other processes: 0 if the job had their CPUs as well."""
    programs, used = cpus.programs or 0.0, cpus.used or 0.0
    return programs / (programs + used) if programs else 0.0


def may_be_others(facts: TraceFacts, share: float, *, silent: bool, least: float | None = None) -> str | None:
    """Reason why other processes may have taken this share of the time, where only its length speaks for the job's own
    Python; None where they do not take so much.

    ``silent``: the main thread shows no event in most of it, so it ran Python or waited for a CPU, which was measured.
    In an event it may also have waited for another thread, which had no CPU. A few stretches may hold most of these
    waits. What comes in every step (``least``: the share from which it counts) holds its part of them: without them it
    is shorter by the factor by which the thread's whole work is, and so is the step.
    """
    cpus = facts.trace.job_cpus
    if cpus is None:
        return None
    others = others_take(cpus)
    seen = cpus.held_up if silent or not others else None
    if not others and not (seen and (cpus.busy or 0.0) >= limit("cpu_contention.full") * cpus.allowed):
        return None
    lost = taken(cpus) if seen is None else seen
    if share > lost:
        return None
    if least is not None:
        ran = 1 - lost if seen is None or not cpus.main else cpus.main
        left = ran / (ran + lost)
        if share * left / max(1 - lost_share(facts, cpus), left) >= least:
            return None
    if not others:
        return f"a CPU for the main thread: it had none for {percent(lost)} of the time, as the job's other threads ran"
    return (f"CPUs for the job: other processes kept {cpus.programs:.2g} of {cpus.allowed:.3g} CPUs busy and no CPU "
            "was idle, which also makes steps longer; capture again when those processes are not running")
