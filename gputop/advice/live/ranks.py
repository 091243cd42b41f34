"""Live rules about a rank that the others of its job wait for: it never joins a collective, by what NCCL's RAS tells of
the job, or it is always last."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median, pstdev
from typing import Literal

from msgspec import Struct

from gputop.advice.live.jobs import is_inference_server, name_of, same_job, stacks_command
from gputop.advice.live.node_view import NodeView, gpus_text
from gputop.advice.registry import limit, source
from gputop.advice.verdict import Explanation, Missing, Verdict
from gputop.core.samples import GpuSample, ProcessSample
from gputop.ranks.model import Absence, Rank, find_absence
from gputop.telemetry.ring_buffers import Series
from gputop.text.units import percent, ranges, seconds

_NAMED = 4  # ranks; of more the first ones stand for all


class CollectiveHang(Verdict, frozen=True, kw_only=True):
    unchanged_s: float  # from the first answer with these counts to the last
    absence: Absence
    nccl: str  # version
    processes: tuple[ProcessSample, ...]  # of the absent ranks on this node


def judge_collective_hang(view: NodeView) -> CollectiveHang | Missing | None:
    """No rank launches a collective any more, and some have launched fewer than others."""
    report = view.ranks
    if report is None:  # nothing looks like a hang: NCCL is not asked
        return None
    if report.first is None or report.last is None:
        return Missing(f"an answer from NCCL: {report.problem}")
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
        processes=tuple(absent))


def _processes(view: NodeView, ranks: Sequence[Rank], hosts: frozenset[str]) -> list[ProcessSample]:
    """The processes of these ranks that run on this node. NCCL gives the PID that a process has in its container."""
    pids = {rank.pid for rank in ranks if rank.pid is not None and rank.host in hosts}
    return [p for p in view.processes if pids & {p.pid, p.local_pid, p.container_pid}]


def describe_collective_hang(v: CollectiveHang) -> Explanation:
    a = v.absence
    who, where = ranks_text(a), "; ".join(map(place_text, a.absent[:_NAMED]))
    hosts = [*dict.fromkeys(rank.host for rank in a.absent if rank.pid is not None)][:_NAMED]
    return Explanation(
        title=title(a), why=f"{counts_text(a)} No rank has launched a collective for {seconds(v.unchanged_s)}. "
                            + (f"{where}." if where else f"NCCL does not name {who}."),
        evidence={"unchanged_s": v.unchanged_s, "absent_ranks_count": float(a.absent_count),
                  "waiting_ranks_count": float(a.waiting_count)},
        brief=counts_text(a),
        unknown="" if a.silent else f"the line that {who} {'is' if a.absent_count == 1 else 'are'} executing",
        action="Compare the stack of the absent rank with those of the others: its line of code shows why they wait."
               if not a.silent else
               "Look at the process on its node: the process has exited or is stopped, or the node is lost. The job "
               "cannot continue without this rank.",
        snippet=stacks_command(v.processes, _NAMED) or "\n".join(f"ssh {host} gputop stacks" for host in hosts)
        or "gputop stacks", gain="no step completes while the ranks are waiting",
        source=f"RAS service of NCCL {v.nccl}; " + source("collective_hang.unchanged_s"))


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
    text = f"{waiting} launched {a.waiting_at:,} {of}, but {ranks_text(a)} launched only {a.absent_at:,}."
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


# -- slow_rank: the rank that is always last, for which the others wait in each step -------------

_SLOWER = 0.97  # of the others' SM clock: below it the clock is named


class SlowRank(Verdict, frozen=True, kw_only=True):
    window_s: float
    rank: RankDelay
    peers: tuple[int, ...]  # the job's other GPUs on this node
    host: str
    process: ProcessSample | None  # the rank's own, where it has one


def judge_slow_rank(view: NodeView) -> SlowRank | Missing | None:
    """The same GPU of a job is the last one in nearly all slices of some minutes, as the others wait in collectives."""
    jobs = _jobs(view)
    if not jobs:
        return Missing(f"a training job with at least {round(limit('slow_rank.ranks'))} GPUs of one model on this "
                       "node, which no other job uses")
    window_s = limit("slow_rank.window_s")
    left_out, reason = view.gpus_left_out("slow_rank"), ""
    judged = False
    for gpus in jobs:
        if left_out & {gpu.info.index for gpu in gpus}:
            continue
        if min(view.age_on_s(gpu) for gpu in gpus) < limit("idle_gpu.age_s") + window_s:
            reason = reason or f"a job that has run for {(limit('idle_gpu.age_s') + window_s) / 60:.0f} min"
            continue
        outcome = _slow(view, gpus, window_s)
        if isinstance(outcome, str):
            reason = reason or outcome
        elif outcome is not None:
            gpu = gpus[outcome.number]
            on_gpu = [process for process in view.processes if gpu in view.compute_gpus(process)]
            alone = [process for process in on_gpu if len(view.compute_gpus(process)) == 1]
            return SlowRank(
                gpus=(gpu.info.index,), severity="medium" if outcome.late else "low", window_s=window_s, rank=outcome,
                peers=tuple(sorted(other.info.index for other in gpus if other is not gpu)),
                host=view.sample.host.hostname, process=alone[0] if len(alone) == 1 else None)
        else:
            judged = True
    return Missing(reason) if reason and not judged else None


def _jobs(view: NodeView) -> list[list[GpuSample]]:
    """The GPUs of each job that has enough of them to itself. The ranks of an inference server wait
    for requests, which one of them receives: such jobs are left out."""
    jobs: list[list[ProcessSample]] = []
    for process in view.processes:
        job = next((members for members in jobs if any(same_job(process, other) for other in members)), None)
        if job is None:
            jobs.append([process])
        else:
            job.append(process)
    held = [{gpu.info.index: gpu for process in job for gpu in view.compute_gpus(process)} for job in jobs]
    return [list(gpus.values()) for job, gpus in zip(jobs, held, strict=True)
            if len(gpus) >= limit("slow_rank.ranks") and len({gpu.info.name for gpu in gpus.values()}) == 1
            and not any(map(is_inference_server, job))
            and not any(other is not gpus and gpus.keys() & other.keys() for other in held)]


def _slow(view: NodeView, gpus: list[GpuSample], window_s: float) -> RankDelay | str | None:
    slices = round(window_s / SLICE_S)
    means = {metric: view.history.slice_means(metric, SLICE_S, slices)[1]
             for metric in ("gpu_util", "sm_active", "tensor_active", "sm_clock_hz")}
    ranks = [RankActivity(*(means[metric][view.column(gpu)] for metric in means)) for gpu in gpus]
    return slow_rank(ranks, "leave" if view.shown("slow_rank") & {gpu.info.index for gpu in gpus} else "enter")


def describe_slow_rank(v: SlowRank) -> Explanation:
    rank, gpu, others = v.rank, gpus_text(v.gpus), gpus_text(v.peers)
    minutes, where = round(v.window_s / 60), f" on {v.host}" if v.host else ""
    who = f"{name_of(v.process)} with {gpu}" if v.process is not None else gpu
    evidence = {"window_s": v.window_s, "slices_share_ratio": rank.slices}
    same = "All these GPUs do the same amount of work on their tensor cores"
    if rank.late:
        evidence |= {"idle_ratio": rank.own, "peers_idle_ratio": rank.others}
        why = (f"{who}{where} was idle for {percent(rank.own)} of the last {minutes} min, and {others} of the same job "
               f"for {percent(rank.others)}. {same}. The other GPUs spend that time waiting for this rank.")
        action = ("Look at this rank's host: its input pipeline, work that only this rank does (logging, checkpoints), "
                  "and whether its CPUs are shared or far from the GPU. Compare its stack with those of others.")
        brief = (f"Idle for {percent(rank.own)} of the time (others: {percent(rank.others)}). The others wait for this "
                 "host.")
        gain = f"at most the {percent(rank.own)} of the time during which this rank is idle while the others wait"
    else:
        evidence |= {"sm_active_ratio": rank.own, "peers_sm_active_ratio": rank.others, "clock_of_peers_ratio":
                     rank.clock}
        clock = f" This GPU's SM clock is {percent(rank.clock)} of that of the others." * (rank.clock < _SLOWER)
        why = (f"{who}{where} had {percent(rank.own)} SM activity in the last {minutes} min, and {others} of the same "
               f"job had {percent(rank.others)}. {same}, and none of them is idle. The other GPUs spend the difference "
               f"in kernels that wait for this GPU.{clock}")
        action = ("Run nvidia-smi -q -d PERFORMANCE to see what limits this GPU's clocks. If its clocks match those of "
                  "the others, look for work that only this rank does on its GPU.")
        brief = (f"SM activity is {percent(rank.own)} (others: {percent(rank.others)}). The others wait for this GPU.")
        gain = "unknown, because live samples do not show how long a step is without this wait"
    return Explanation(
        title=f"{gpu} is always last: the other GPUs of the job wait for it",
        why=why, evidence=evidence, brief=brief, unknown="why is this rank late?" if rank.late else
        "a lower clock, or more work?", action=action,
        snippet=(stacks_command([v.process]) if v.process is not None else "") or "gputop stacks", gain=gain,
        source="comparison of utilization, SM and tensor activity, and SM clocks across the job's GPUs; "
               + source("slow_rank.gap_enter", "slow_rank.alike_enter"))


# -- finding it by minutes of live activity ------------------------------------------------------
# Ranks that train in step meet in collectives. Who comes first waits there in a kernel of NCCL: its utilization stays
# at 100%, while its tensor cores and most of its SMs stand still. So the rank that always comes last differs from all
# others, in one of two ways: its GPU alone is idle at times, as its host is late, or its GPU alone works all the time.

SLICE_S = 10.0  # of the history
_SLICES_KNOWN = 0.8  # of the window; the rest may be pauses, such as a checkpoint
_LEAST_WORK = 0.02  # tensor activity, as a share of time: below it the ranks' work cannot be compared
_PAUSE = 0.5  # of the median work of the slices: below it the job saves, evaluates or starts
_STEADY = 0.25  # standard deviation of the job's work over its mean; phases that take turns differ by more
_NEVER_IDLE = 0.03  # of the time, by utilization, which misses a reading now and then


class RankActivity(Struct, frozen=True):
    """A GPU of the job in each slice, oldest first; NaN where nothing was read. ``work``: tensor activity × SM clock,
    in cycles per second."""

    util: Series
    sm_active: Series
    tensor_active: Series
    sm_clock_hz: Series

    @property
    def work(self) -> Series:
        return [tensor * clock for tensor, clock in zip(self.tensor_active, self.sm_clock_hz, strict=True)]


class RankDelay(Struct, frozen=True):
    """``number`` of the GPU among those given. ``late``: it is idle for ``own`` of the time, the others for ``others``;
    not so: it is slow, and these are their SM activity. ``slices``: the share in which it stood out. ``clock``: its SM
    clock over the median of the others."""

    number: int
    late: bool
    own: float
    others: float
    slices: float
    clock: float


def slow_rank(ranks: Sequence[RankActivity], edge: Literal["enter", "leave"]) -> RankDelay | str | None:
    """The rank that is always last; None where none is, or the reason why that cannot be told. ``edge``: which of the
    limits count.

    1. Slices count in which all figures of all GPUs are known and the job works: its work is above half of its median.
       Where they are fewer than 80% of the window, nothing is said.
    2. The work of a GPU is its tensor activity times its SM clock. Ranks that do the same per step and meet in each
       have done the same in each slice, whatever their clocks. Where the work of one is off the median, the ranks are
       stages of a pipeline, or have shards of different size: which of them is late by nature is not known.
    3. Where the work of the whole job varies from slice to slice, phases take turns: nothing is said.
    4. Late: in nearly every slice the same GPU is idle for longer than each other one, and those are never idle. The
       others have done the same work, so that their busy time is longer by a wait.
    5. Slow: no GPU is idle, and in nearly every slice the same one has more SM activity than each other one. The others
       have done the same work in less time, and waited for the rest of it.
    """
    works = [rank.work for rank in ranks]
    of_job = [fmean(works_then) for works_then in zip(*works, strict=True)]
    slices = [n for n, work in enumerate(of_job) if work == work
              and all(rank.util[n] == rank.util[n] and rank.sm_active[n] == rank.sm_active[n] for rank in ranks)]
    usual = median([of_job[n] for n in slices]) if slices else 0.0
    slices = [n for n in slices if of_job[n] >= _PAUSE * usual]
    if len(slices) < _SLICES_KNOWN * len(of_job):
        return "minutes in which all GPUs of the job work, with utilization, SM activity, tensor activity and clocks"
    if min(fmean([rank.tensor_active[n] for n in slices]) for rank in ranks) < _LEAST_WORK:
        return "work on tensor cores, which gputop uses to compare the ranks"
    means = [fmean([work[n] for n in slices]) for work in works]
    if any(abs(mean - median(means)) > limit(f"slow_rank.alike_{edge}") * median(means) for mean in means):
        return "ranks that do the same work, unlike pipeline stages or uneven shards"
    if pstdev([of_job[n] for n in slices]) > _STEADY * fmean([of_job[n] for n in slices]):
        return "steady work, but the job alternates between phases"
    idle = [[1.0 - rank.util[n] for n in slices] for rank in ranks]
    late = _first(idle, edge)
    if late is not None and (
            max(fmean(ratios) for number, ratios in enumerate(idle) if number != late[0]) <= _NEVER_IDLE):
        return _found(True, idle, *late, ranks, slices)
    active = [[rank.sm_active[n] for n in slices] for rank in ranks]
    slow = _first(active, edge)
    if slow is not None and max(map(fmean, idle)) <= _NEVER_IDLE:
        return _found(False, active, *slow, ranks, slices)
    return None


def _first(values: Sequence[Sequence[float]], edge: str) -> tuple[int, float] | None:
    """The rank whose value is above each other's by the gap, and the share of slices in which it is; None where that
    are too few."""
    number = max(range(len(values)), key=lambda rank: fmean(values[rank]))
    others = [max(then) for then in zip(*(work for rank, work in enumerate(values) if rank != number), strict=True)]
    gap = limit(f"slow_rank.gap_{edge}")
    share = sum(work - other >= gap for work, other in zip(values[number], others, strict=True)) / len(others)
    return (number, share) if share >= limit(f"slow_rank.slices_{edge}") else None


def _found(late: bool, values: Sequence[Sequence[float]], number: int, share: float,
           ranks: Sequence[RankActivity], slices: Sequence[int]) -> RankDelay:
    clocks = [fmean([rank.sm_clock_hz[n] for n in slices]) for rank in ranks]
    others = [rank for rank in range(len(ranks)) if rank != number]
    return RankDelay(number, late, fmean(values[number]), fmean([fmean(values[rank]) for rank in others]), share,
                     clocks[number] / median([clocks[rank] for rank in others]))
