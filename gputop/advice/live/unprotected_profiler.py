"""The live rule about PyTorch jobs that any user of the node can command."""

from __future__ import annotations

from gputop.advice.fix_code import code
from gputop.advice.live.node_view import NodeView
from gputop.advice.registry import limit
from gputop.advice.verdict import Explanation, Missing, Verdict

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
        snippet=code("unprotected_profiler", "folder"),
        gain="none: this finding is about security, not speed",
        source="libkineto: DaemonConfigLoader; unix(7): an abstract socket name has no owner and no access mode",
    )

