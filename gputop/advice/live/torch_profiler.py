"""Live rules about the profilers of PyTorch jobs: one that the job leaves on, and those that any user of the node can
command."""

from __future__ import annotations

from collections.abc import Mapping

from gputop.advice.fix_code import code
from gputop.advice.live.node_view import NodeView
from gputop.advice.live_rules import LIVE_RULES
from gputop.advice.registry import limit, source
from gputop.advice.verdict import Explanation, Missing, Verdict, finding
from gputop.core.findings import Finding
from gputop.text.units import percent


class ProfilerLeftOn(Verdict, frozen=True, kw_only=True):
    pid: int
    recorded: float  # share of its steps


def judge_profiler_left_on(view: NodeView) -> ProfilerLeftOn | Missing | None:
    """The process that records most of its steps, of those that captures have found to record themselves."""
    if view.profiled is None:
        return Missing("a capture of a PyTorch job, which shows whether the job's own profiler is on")
    gpus = {pid: gpu for process in view.sample.processes for pid in (process.pid, process.local_pid)
            for gpu in [tuple(sorted(process.gpus))]}
    return _judged(view.profiled, gpus)


def refused_capture(pid: int, recorded: float) -> Finding | None:
    """The finding about a process that was not captured, as it records this share of its steps itself; None where that
    is too little."""
    verdict = _judged({pid: recorded}, {})
    (rule,) = [rule for rule in LIVE_RULES if rule.id == "profiler_left_on"]
    return finding(rule, verdict, describe_profiler_left_on(verdict)) if verdict is not None else None


def _judged(profiled: Mapping[int, float], gpus: Mapping[int | None, tuple[int, ...]]) -> ProfilerLeftOn | None:
    pid = max(profiled, key=lambda pid: profiled[pid], default=None)
    if pid is None or profiled[pid] < limit("profiler_left_on.recorded"):
        return None
    return ProfilerLeftOn(gpus=gpus.get(pid, ()), pid=pid, recorded=profiled[pid],
                          severity="high" if profiled[pid] >= limit("profiler_left_on.high") else "medium")


def describe_profiler_left_on(v: ProfilerLeftOn) -> Explanation:
    always, share = v.recorded == 1.0, percent(v.recorded)
    what = f"everything in process {v.pid}" if always else f"{share} of the steps of process {v.pid}"
    return Explanation(
        title=f"torch.profiler is recording {what}",
        why="When gputop was about to record the job, the job's own profiler "
            f"{'was on' if always else 'was running in cycles'}. Steps that torch.profiler records often take two to "
            "three times as long. Two recordings at the same time would terminate the job, so gputop did not record.",
        evidence={"recorded_ratio": v.recorded},
        action="Remove the profiler from the script, or let it record a few steps only once.",
        snippet=code("profiler_left_on", "once"), gain="depends on how many of its steps the job records",
        brief=f"The job's torch.profiler records {share} of its steps, which often take two to three times as long.",
        source=source("profiler_left_on.recorded"))


_NAMED = 8  # PIDs in a sentence


class UnprotectedProfiler(Verdict, frozen=True, kw_only=True):
    pids: tuple[int, ...]


def judge_unprotected_profiler(view: NodeView) -> UnprotectedProfiler | Missing | None:
    """Processes whose profiler listens at an abstract socket, which has no owner."""
    if view.unprotected is None:
        return Missing("a search for PyTorch's profilers in the processes of this node")
    if len(view.unprotected) < limit("unprotected_profiler.processes"):
        return None
    pids = set(view.unprotected)
    gpus = {gpu for process in view.sample.processes if pids & {process.pid, process.local_pid} for gpu in process.gpus}
    return UnprotectedProfiler(gpus=tuple(sorted(gpus)), severity="medium", pids=tuple(sorted(pids)))


def describe_unprotected_profiler(v: UnprotectedProfiler) -> Explanation:
    one = len(v.pids) == 1
    processes = f"process {v.pids[0]}" if one else f"{len(v.pids)} processes"
    listed = "" if one else f" ({', '.join(map(str, v.pids[:_NAMED]))}{', …' if len(v.pids) > _NAMED else ''})"
    return Explanation(
        title=f"Any local user can control the profiler of {processes}",
        why=f"{processes[:1].upper()}{processes[1:]}{listed} {'runs' if one else 'run'} with KINETO_USE_DAEMON but "
            "without KINETO_IPC_SOCKET_DIR. PyTorch's profiler then takes commands from whoever binds an abstract "
            "socket name first. That user can then end the job or overwrite files of the job's user.",
        evidence={"processes_count": float(len(v.pids))},
        action="Start the job without KINETO_USE_DAEMON, which gputop does not need. If another daemon such as dynolog "
               "needs it, set KINETO_IPC_SOCKET_DIR for both to a folder with mode 0700.",
        snippet=code("unprotected_profiler", "folder"), gain="none: this finding is about security, not speed",
        source="libkineto: DaemonConfigLoader; unix(7): an abstract socket name has no owner and no access mode")
