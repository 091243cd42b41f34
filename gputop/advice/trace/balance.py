"""Balance: does one GPU do more work than the others?"""

from __future__ import annotations

from statistics import median

from gputop.advice import savings
from gputop.advice.registry import limit, source
from gputop.advice.trace.facts import TraceFacts
from gputop.core.findings import Abstained, Finding, Gain, severity_of

_GPU0 = (
    "Keep metrics, evaluation and variables off it and give every replica the same share of the batch "
    "(a global batch divisible by the number of GPUs)."
)
_OTHER = "Give every replica the same share of the work: equal batches, and equally long sequences or graphs in them."
_SNIPPET = (
    "strategy = tf.distribute.MirroredStrategy()\n"
    "with strategy.scope():  # model, optimizer and metrics\n"
    "    model = build_model()\n"
    "ds = ds.batch(per_gpu_batch * strategy.num_replicas_in_sync, drop_remainder=True)"
)


def replica_imbalance(facts: TraceFacts) -> Finding | Abstained | None:
    """One GPU computes longer per step than the others, who wait for it.

    The finding is ``gpu0_oversubscribed`` where that GPU is 0. Only compute counts: a GPU
    that waits inside a collective is busy without doing work.
    """
    gpus = facts.active
    if not gpus or facts.shares is None:
        return Abstained("replica_imbalance", "GPU activity in the trace")
    work = {gpu.gpu: gpu.compute * gpu.window_s if gpu.compute_s_per_step is None else gpu.compute_s_per_step
            for gpu in gpus}
    heavy = max(work, key=lambda gpu: work[gpu])
    if not work[heavy]:
        return None  # collectives and copies only
    work = {gpu: s for gpu, s in work.items() if s >= limit("replica_imbalance.took_part") * work[heavy]}
    if len(work) < 2:
        return None
    others = median(s for gpu, s in work.items() if gpu != heavy)
    ratio = work[heavy] / others
    launches = {gpu.gpu: gpu.kernels for gpu in gpus if gpu.gpu in work}
    more = launches[heavy] / median(n for gpu, n in launches.items() if gpu != heavy)
    # Longer kernels are a larger share of the batch, which can be dealt out; more of them are work of its own.
    own = more - 1 >= limit("replica_imbalance.own_kernels") * (ratio - 1)
    share = (savings.removed(work[heavy] - others, facts.period_s) if own else
             savings.equalised(work, facts.period_s))
    if ratio < limit("replica_imbalance.ratio") or share < limit("replica_imbalance.share"):
        return None
    why = (f"GPU {heavy}, as the job numbers them, computes {work[heavy] * 1e3:.3g} ms per {facts.basis}, the others "
           f"{others * 1e3:.3g} ms (median); they wait for it at every synchronisation.")
    if own:
        why += f" It runs {more:.2g}× as many kernels: work that the others do not have."
    return Finding(
        id="gpu0_oversubscribed" if heavy == 0 else "replica_imbalance", severity=severity_of(share),
        title=f"GPU {heavy} of the job does {ratio:.1f}× the others' work",
        why=why,
        evidence={"compute_s": work[heavy], "others_compute_s": others, "ratio": ratio, "kernels_count_ratio": more,
                  "share_ratio": share, f"{facts.basis}_s": facts.period_s},
        action=_GPU0 if heavy == 0 else _OTHER,
        snippet=_SNIPPET if facts.framework == "tensorflow" else None,
        gain=Gain(share, "at most: if it had as little to do as the others, and the step follows its slowest GPU" if own
                  else "if the same work were spread evenly and the step follows its slowest GPU"),
        gpus=(heavy,), source=source("replica_imbalance.ratio", "replica_imbalance.share"),
    )
