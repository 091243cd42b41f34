"""Which finding ids have a rule today, as the registry tells."""

from __future__ import annotations

from gputop.advice.trace_rules import TRACE_RULES

# The suite's jobs are TensorFlow's and JAX's: no PyTorch kernels, ops and settings, no managed memory, no work on a
# default stream, no CUDA graph recorded at each step, no attention in FP32 (TF32 alone is a remark), no tables of
# embeddings. Their steps follow one another: nothing lies around them. And their traces have no file of a
# capture next to them, which has the CPU time of other programs and of the job's threads.
NOT_SIMULATED = frozenset(("elementwise_unfused", "managed_memory", "default_stream", "cpu_contention",
                           "time_outside_steps", "evaluation_share", "unfinished_step", "sixteen_bit_unused",
                           "graph_recapture", "threads_unused", "thread_oversubscription", "anomaly_mode",
                           "double_precision", "onednn_off", "memory_growth", "embedding_dense", "accumulation_sync",
                           "gradients_zeroed", "ops_without_gradient", "shuffle_refill"))


def ids_with_rules() -> frozenset[str]:
    return frozenset(id_ for rule in TRACE_RULES for id_ in rule.ids) - NOT_SIMULATED
