"""The live rule about the rank that is always last: the other ranks of its job wait for it in each step."""

from __future__ import annotations

from gputop.advice.live.node_view import NodeView, gpus_text, is_inference_server, name_of, same_job
from gputop.advice.registry import limit, source
from gputop.advice.verdict import Explanation, Missing, Verdict
from gputop.core.samples import GpuSample, ProcessSample
from gputop.telemetry.slow_rank import SLICE_S, DelayLimits, RankActivity, slow_rank
from gputop.telemetry.slow_rank import RankDelay as Rank
from gputop.text.units import percent

_SLOWER = 0.97  # of the others' SM clock: below it the clock is named


class SlowRank(Verdict, frozen=True, kw_only=True):
    window_s: float
    rank: Rank
    peers: tuple[int, ...]  # the job's other GPUs on this node
    host: str
    process: ProcessSample | None  # the rank's own, where it has one


def judge_slow_rank(view: NodeView) -> SlowRank | Missing | None:
    """The same GPU of a job is the last one in nearly all slices of some minutes, as the others wait in collectives."""
    jobs = _jobs(view)
    if not jobs:
        return Missing(f"a training job with at least {round(limit('slow_rank.ranks'))} GPUs on this node, which no "
                       "other job uses")
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
            if len(gpus) >= limit("slow_rank.ranks") and not any(map(is_inference_server, job))
            and not any(other is not gpus and gpus.keys() & other.keys() for other in held)]


def _slow(view: NodeView, gpus: list[GpuSample], window_s: float) -> Rank | str | None:
    slices = round(window_s / SLICE_S)
    means = {metric: view.history.slice_means(metric, SLICE_S, slices)[1]
             for metric in ("gpu_util", "sm_active", "tensor_active", "sm_clock_hz")}
    ranks = [RankActivity(*(means[metric][view.column(gpu)] for metric in means)) for gpu in gpus]
    shown = view.shown("slow_rank") & {gpu.info.index for gpu in gpus}
    edge = "leave" if shown else "enter"
    return slow_rank(ranks, DelayLimits(*(limit(f"slow_rank.{name}_{edge}") for name in ("gap", "slices", "alike"))))


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
        snippet=f"gputop stacks {v.process.pid}" if v.process is not None else "gputop stacks", gain=gain,
        source="comparison of utilization, SM and tensor activity, and SM clocks across the job's GPUs; "
               + source("slow_rank.gap_enter", "slow_rank.alike_enter"),
    )
