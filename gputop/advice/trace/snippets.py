"""Code to paste that several rules advise, by the way the job is written."""

from __future__ import annotations

from gputop.advice.trace.job import Job
from gputop.advice.trace.training_loop import KERAS2, KERAS3

# Keras does not compile whole steps under tf.distribute; clusters leave the collectives out.
_CLUSTERS = "# compiles clusters, leaves the collectives out\nTF_XLA_FLAGS=--tf_xla_auto_jit=2 python train.py"

# PyTorch: what torch.compile does not compile, and what it compiles again and again.
GRAPH_BREAKS = "TORCH_LOGS=graph_breaks,recompiles python train.py"

# PyTorch: batches made ahead, by processes of their own.
LOADER = "DataLoader(..., num_workers=8, prefetch_factor=4, persistent_workers=True, pin_memory=True)"


def is_keras(job: Job) -> bool:
    """Whether Keras' fit runs the loop."""
    return job.loop in (KERAS2, KERAS3)


def xla_on_step(job: Job) -> str:
    """TensorFlow: XLA for the whole step, as far as it goes."""
    if len(job.gpus) > 1:
        return _CLUSTERS
    if is_keras(job):
        return "model.compile(optimizer, loss, jit_compile=True)"
    return "@tf.function(jit_compile=True)  # the whole step; shapes must stay the same\ndef train_step(x, y): ..."
