"""GPUs one after the other: working by turns, or begun by turns."""

from __future__ import annotations

from itertools import pairwise

from gputop.advice import savings
from gputop.advice.registry import limit, source
from gputop.advice.trace.facts import TraceFacts
from gputop.analysis.results_device import LaunchOrder, Replicas, ReplicaWork
from gputop.core.findings import Abstained, Finding, Gain
from gputop.text.units import percent, ranges

_PARALLEL = (
    "strategy = tf.distribute.MirroredStrategy()  # every GPU has the whole model and its part of the batch\n"
    "with strategy.scope():\n"
    "    model = build_model()"
)
_THREADS = (
    "strategy = tf.distribute.MirroredStrategy()  # one thread per replica inside a tf.function\n"
    "@tf.function\n"
    "def train_step(batch):\n"
    "    strategy.run(replica_step, args=(batch,))  # not a Python loop over tf.device('/GPU:i')"
)


def _taking_part(replicas: Replicas | None) -> list[ReplicaWork]:
    """GPUs with a tenth of the heaviest one's work and more."""
    work = list(replicas.work or ()) if replicas is not None else []
    most = max((w.compute_s for w in work), default=0.0)
    return [w for w in work if most and w.compute_s >= limit("replica_imbalance.took_part") * most]


def serial_gpus(facts: TraceFacts) -> Finding | Abstained | None:
    """The GPUs work by turns: hardly ever two of them at once, far less than by chance."""
    if not facts.active or facts.shares is None:
        return Abstained("serial_gpus", "GPU activity in the trace")
    replicas = facts.analysis.replicas
    work = _taking_part(replicas)
    if replicas is None or len(work) < 2:
        return None
    found = replicas.compute
    if found is None:
        return Abstained("serial_gpus", f"the GPUs' work on one clock: {replicas.missing.get('compute', 'not known')}")
    if found.serial is None or found.serial_by_chance is None or found.serial_by_chance >= 1:
        return None
    overlap = (1 - found.serial) / (1 - found.serial_by_chance)
    period = facts.period_s
    share = savings.side_by_side((1 - found.exactly[0]) * period, [w.compute_s for w in work], period)
    if overlap > limit("serial_gpus.overlap") or share < limit("serial_gpus.share"):
        return None
    gpus = tuple(w.gpu for w in work)
    return Finding(
        id="serial_gpus", severity=facts.capped_severity(share),
        title=f"GPUs {ranges(gpus)} work one after the other",
        why=facts.with_caveat(
            f"For {percent(found.serial)} of the time in which any GPU computes only one does; were they "
            f"independent it would be {percent(found.serial_by_chance)}. Each waits for the one before it."),
        evidence={"one_alone_ratio": found.serial, "one_alone_by_chance_ratio": found.serial_by_chance,
                  "any_active_ratio": 1 - found.exactly[0], "share_ratio": share,
                  "most_work_s": max(w.compute_s for w in work)},
        action="Give every GPU the whole model and a part of each batch; where the model does not fit one GPU, "
               "pipeline micro-batches through its parts.",
        snippet=_PARALLEL if facts.framework == "tensorflow" else None,
        gain=Gain(share, "if the same work ran side by side and the step followed the GPU with most of it"),
        gpus=gpus, source=source("serial_gpus.overlap", "serial_gpus.share"),
    )


def staggered_launch(facts: TraceFacts) -> Finding | Abstained | None:
    """The host launches to the GPUs one after the other, so the last one begins its step late."""
    if not facts.active or facts.shares is None:
        return Abstained("staggered_launch", "GPU activity in the trace")
    replicas = facts.analysis.replicas
    work = _taking_part(replicas)
    if replicas is None or len(work) < 2:
        return None
    launches = replicas.launches
    if launches is None or launches.delay_median_s is None or launches.span_median_s is None:
        reason = (replicas.missing.get("launches") or replicas.missing.get("first_kernel")
                  or "launches by step are not known")
        return Abstained("staggered_launch", f"when each GPU's work was launched in each step: {reason}")
    delay = {w.gpu: launches.delay_median_s[w.gpu] for w in work if w.gpu in launches.delay_median_s}
    ordered = sorted(delay, key=lambda gpu: delay[gpu])
    if len(ordered) < 2:
        return None
    last = ordered[-1]
    first_kernel = replicas.first_kernel.behind_median_s.get(last, 0.0) if replicas.first_kernel else 0.0
    worst = min(delay[last], first_kernel)
    # In the end the last GPU may catch up: what it stands still for bounds what an earlier begin would save.
    busy = {gpu.gpu: gpu.busy for gpu in facts.active}
    share = savings.started_together(worst, (1 - busy[last]) * facts.period_s, facts.period_s)
    in_turns = _one_by_one(launches, work)
    if share < limit("staggered_launch.share") or not (in_turns or _even(delay, launches)):
        return None
    per_gpu = worst / (len(ordered) - 1)
    why = (f"GPU {last}'s first kernel of a step is launched {delay[last] * 1e3:.3g} ms after GPU {ordered[0]}'s "
           f"(median), each GPU about {per_gpu * 1e3:.3g} ms after the one before.")
    if in_turns:
        why += " One thread launches a GPU's step before it turns to the next GPU."
    evidence = {"last_begins_late_s": worst, "share_ratio": share, "per_gpu_s": per_gpu,
                "shared_launches_ratio": launches.shared_launches, "steps": float(launches.steps)}
    if launches.launches_per_turn is not None:
        evidence["launches_per_turn"] = float(launches.launches_per_turn)
    return Finding(
        id="staggered_launch", severity=facts.capped_severity(share),
        title=f"GPU {last} begins its step {worst * 1e3:.3g} ms after GPU {ordered[0]}", why=facts.with_caveat(why),
        evidence=evidence,
        action="Launch to all GPUs at once, from a thread or a process of each, instead of looping over them.",
        snippet=_THREADS if facts.framework == "tensorflow" else None,
        gain=Gain(share, "if the last GPU began when the first one does, as far as it stands still"),
        gpus=tuple(ordered[1:]),
        source=source("staggered_launch.share", "staggered_launch.turn", "staggered_launch.jump"),
    )


def _one_by_one(launches: LaunchOrder, work: list[ReplicaWork]) -> bool:
    """One thread serves several GPUs, with most of a step's launches to one before it turns to another."""
    kernels = sorted(w.kernels for w in work)[len(work) // 2]
    return (launches.shared_launches >= 0.5 and launches.launches_per_turn is not None
            and launches.launches_per_turn >= limit("staggered_launch.turn") * kernels)


def _even(delay: dict[int, float], launches: LaunchOrder) -> bool:
    """Three GPUs and more begin at equal distances, always in the same order: their threads wait for each other."""
    if len(delay) < 3 or launches.order_share is None or launches.order_share < 0.8:
        return False
    values = sorted(delay.values())
    return max(b - a for a, b in pairwise(values)) <= limit("staggered_launch.jump") * values[-1]
