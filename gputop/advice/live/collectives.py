"""The live rule about a collective that some ranks never join, by what NCCL's RAS tells of the job."""

from __future__ import annotations

from collections.abc import Sequence

from gputop.advice.live.node_view import NodeView, gpus_text, same_job
from gputop.advice.registry import limit, source
from gputop.advice.verdict import Explanation, Missing, Verdict
from gputop.core.samples import ProcessSample
from gputop.ranks.model import Absence, Rank, find_absence
from gputop.text.units import ranges, seconds

_NAMED = 4  # ranks; of more the first ones stand for all


class CollectiveHang(Verdict, frozen=True, kw_only=True):
    unchanged_s: float  # from the first answer with these counts to the last
    absence: Absence
    nccl: str  # version
    pids: tuple[int, ...]  # of the absent ranks on this node, as gputop sees them


def judge_collective_hang(view: NodeView) -> CollectiveHang | Missing | None:
    """No rank launches a collective any more, and some have launched fewer than others."""
    report = view.ranks
    if report is None:  # nothing looks like a hang: NCCL is not asked
        return None
    if report.first is None or report.last is None:
        return Missing(report.problem)
    absence = find_absence(report.first, report.last)
    unchanged_s = report.last.time_s - report.first.time_s
    if absence is None or unchanged_s < limit("collective_hang.unchanged_s"):
        return None
    absent = _processes(view, absence.absent, report.hosts)
    here = absent + _processes(view, absence.waiting, report.hosts)
    job = [p for p in view.processes if not here or any(p is q or same_job(p, q) for q in here)]
    return CollectiveHang(
        gpus=tuple(sorted({gpu.info.index for p in job for gpu in view.compute_gpus(p)})),
        severity="high", unchanged_s=unchanged_s, absence=absence, nccl=report.last.nccl,
        pids=tuple(p.local_pid or p.pid for p in absent),
    )


def _processes(view: NodeView, ranks: Sequence[Rank], hosts: frozenset[str]) -> list[ProcessSample]:
    """The processes of these ranks that run on this node. NCCL gives the PID that a process has in its container."""
    pids = {rank.pid for rank in ranks if rank.pid is not None and rank.host in hosts}
    return [p for p in view.processes if pids & {p.pid, p.local_pid, p.container_pid}]


def describe_collective_hang(v: CollectiveHang) -> Explanation:
    a = v.absence
    who, where = ranks_text(a), "; ".join(map(place_text, a.absent[:_NAMED]))
    evidence = {"unchanged_s": v.unchanged_s, "absent_ranks_count": float(a.absent_count),
                "waiting_ranks_count": float(a.waiting_count)}
    return Explanation(
        title=title(a), why=f"{counts_text(a)} No rank has launched a collective for {seconds(v.unchanged_s)}. "
                            + (f"{where}." if where else f"NCCL does not name {who}."),
        evidence=evidence, brief=counts_text(a),
        unknown="" if a.silent else f"the line that {who} {'is' if a.absent_count == 1 else 'are'} executing",
        action="Compare the stack of the absent rank with those of the others: its line of code shows why they wait."
               if not a.silent else
               "Look at the process on its node: the process has exited or is stopped, or the node is lost. The job "
               "cannot continue without this rank.",
        snippet="\n".join(_commands(v)) or "gputop stacks", gain="no step completes while the ranks are waiting",
        source=f"RAS service of NCCL {v.nccl}; " + source("collective_hang.unchanged_s"),
    )


def title(a: Absence) -> str:
    """ "Rank 5 did not reach AllReduce 6650"."""
    who = ranks_text(a)
    who = who[:1].upper() + who[1:]
    if a.silent:
        return f"{who} {'does' if a.absent_count == 1 else 'do'} not answer NCCL: the others may wait forever"
    if a.circle:
        return f"Ranks wait for each other: {who} did not reach {_operation(a)}"
    return f"{who} did not reach {_operation(a)}"


def counts_text(a: Absence) -> str:
    """Counts of collectives, in a sentence or two."""
    if a.silent:
        return f"{a.absent_count} of {a.absent_count + a.waiting_count} ranks did not answer NCCL."
    waiting = f"{a.waiting_count} rank{'s' if a.waiting_count != 1 else ''}"
    of = f"{a.operation}s" if a.operation else "collectives"
    text = (f"{waiting} launched {a.waiting_at:,} {of}, but {ranks_text(a)} launched only {a.absent_at:,}.")
    if a.crossed:
        text += " The other ranks are behind in another collective, so the ranks run different code."
    if a.circle:
        text += (" Every rank waits in one collective and is missing from another, so the order of the collectives "
                 "differs by rank.")
    if a.also:
        text += f" Ranks also wait in {a.also} other communicator{'s' if a.also != 1 else ''}."
    return text


def ranks_text(a: Absence) -> str:
    """ "rank 5", "ranks 4-7", "3 of 8 ranks" where NCCL does not name them."""
    if a.absent and len(a.absent) == a.absent_count <= 16:
        numbers = ranges([rank.number for rank in a.absent], ", ")
        return f"rank {numbers}" if a.absent_count == 1 else f"ranks {numbers}"
    return f"{a.absent_count} of {a.absent_count + a.waiting_count} ranks"


def _operation(a: Absence) -> str:
    return f"{a.operation or 'collective'} {a.absent_at + 1}"


def place_text(rank: Rank) -> str:
    """ "Rank 5 is process 4711 with GPU 5 on 10.0.0.7"."""
    if rank.pid is None:
        return f"Rank {rank.number}: NCCL does not know its process"
    gpu = "" if rank.gpu is None else f" with {gpus_text([rank.gpu])}"
    return f"Rank {rank.number} is process {rank.pid}{gpu} on {rank.host}" + (f"; {rank.trouble}" * bool(rank.trouble))


def _commands(v: CollectiveHang) -> list[str]:
    if v.pids:
        return [f"gputop stacks {' '.join(map(str, v.pids[:_NAMED]))}"]
    hosts = dict.fromkeys(rank.host for rank in v.absence.absent if rank.pid is not None)
    return [f"ssh {host} gputop stacks" for host in list(hosts)[:_NAMED]]
