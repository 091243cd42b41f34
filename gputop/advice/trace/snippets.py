"""Code to paste that several rules advise, by the way the job is written."""

from __future__ import annotations

from gputop.advice.trace.job import KERAS, Job

# Keras does not compile whole steps under tf.distribute; clusters leave the collectives out.
_CLUSTERS = "# compiles clusters, leaves the collectives out\nTF_XLA_FLAGS=--tf_xla_auto_jit=2 python train.py"

# Keras 3 ignores jit_compile=True where its own choice, "auto", is against it; without a GPU "auto" never compiles.
KERAS_XLA = (
    "# Keras 3 compiles by itself on a GPU, but not with a layer without support (or op determinism):\n"
    "print([layer.name for layer in model._flatten_layers() if not layer.supports_jit])\n"
    "model.compile(optimizer, loss, jit_compile=True)  # only Keras 2 needs this")

# PyTorch: what torch.compile does not compile, and what it compiles again and again.
GRAPH_BREAKS = "TORCH_LOGS=graph_breaks,recompiles python train.py"

# PyTorch: batches made ahead, by processes of their own.
LOADER = "DataLoader(..., num_workers=8, prefetch_factor=4, persistent_workers=True, pin_memory=True)"

KEEP_WORKERS = ("Make the DataLoader once and keep its workers from one pass over the data to the next "
                "(persistent_workers=True), or make a pass longer.")

# TensorFlow: sequences of one length, or of few.
BUCKETS = (
    "ds = ds.padded_batch(batch_size, padded_shapes=[256], drop_remainder=True)\n"
    "ds = ds.bucket_by_sequence_length(  # in place of batch\n"
    "    tf.size, [65, 129, 257], [batch_size] * 4, pad_to_bucket_boundary=True, drop_remainder=True)")
# By framework: batches of one shape, or of few.
SAME_LENGTHS = {
    "tensorflow": BUCKETS,
    "jax": "batch = jnp.pad(batch, ((0, 0), (0, -batch.shape[1] % 64)))  # and mask the padding",
    "pytorch": "batch = tokenizer(texts, padding=True, pad_to_multiple_of=64, return_tensors='pt')  # few lengths\n"
               "# and a sampler that puts examples of about one length into a batch",
}


def is_keras(job: Job) -> bool:
    """Return whether Keras' fit runs the loop."""
    return job.loop in KERAS


def xla_on_step(job: Job) -> str:
    """TensorFlow: XLA for the whole step, as far as it goes."""
    if len(job.gpus) > 1:
        return _CLUSTERS
    if is_keras(job):
        return KERAS_XLA if job.gpus else "model.compile(optimizer, loss, jit_compile=True)"
    return "@tf.function(jit_compile=True)  # the whole step; shapes must stay the same\ndef train_step(x, y): ..."
