"""The input pipeline: does the step wait for its next batch?"""

from __future__ import annotations

from gputop.advice.finding import Abstained, Finding, Gain, severity_of
from gputop.advice.thresholds import limit, source
from gputop.advice.trace_facts import TraceFacts
from gputop.text import percent

_PARALLEL = "ds = ds.map(fn, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)"
_INTERLEAVE = (
    "ds = tf.data.Dataset.from_tensor_slices(files).interleave(\n"
    "    tf.data.TFRecordDataset, num_parallel_calls=tf.data.AUTOTUNE, deterministic=False)\n"
    "ds = ds.map(fn, num_parallel_calls=tf.data.AUTOTUNE).batch(batch_size).prefetch(tf.data.AUTOTUNE)"
)
_CACHE = (
    "ds = ds.map(decode, num_parallel_calls=tf.data.AUTOTUNE).cache()  # what is the same in every epoch, if it fits\n"
    "ds = ds.batch(batch_size).map(augment_batch, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)"
)
_BATCH = "ds = ds.batch(batch_size, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)"
_PREFETCH = "ds = ds.prefetch(tf.data.AUTOTUNE)  # last"

# By the beginning of the slowest stage's name: what to do about it, and the code.
_CURES = (
    ("Map", "Run the map in parallel (it uses one thread now) and prefetch.", _PARALLEL),
    ("ParallelMap", "The map is parallel already: cache what repeats, work on whole batches instead of single "
                    "elements, or move the work to the GPU.", _CACHE),
    ("Generator", "Replace from_generator, which runs Python under its lock, by TFRecord files and TensorFlow ops.",
     _INTERLEAVE),
    ("FlatMap", "Read several files at once.", _INTERLEAVE),
    ("Interleave", "Read several files at once.", _INTERLEAVE),
    ("TFRecord", "Read several files at once.", _INTERLEAVE),
    ("TextLine", "Read several files at once.", _INTERLEAVE),
    ("Batch", "Assemble batches in parallel.", _BATCH),
)


def input_bound(facts: TraceFacts) -> Finding | Abstained | None:
    """The GPUs stand still while the training loop waits for a batch."""
    waited = facts.analysis.input
    if waited is None:
        return Abstained("input_bound", (
            "the training loop's calls for a batch (tf.data's IteratorGetNext); capture with host_tracer_level 2, "
            "as gputop does"))
    if facts.shares is None:
        return Abstained("input_bound", (
            "GPU activity: whether the GPUs stand still while the loop waits for a batch; see `gputop doctor` for the "
            "right to profile"))
    steps = facts.analysis.steps
    if steps is not None and steps.count < limit("input_bound.steps"):
        return Abstained("input_bound", "a second whole step: one wait can be an accident; capture longer")
    share = facts.shares["input"]
    if share < limit("input_bound.share"):
        return None
    evidence = {"wait_s": share * facts.period_s, "share_ratio": share, "get_next_ratio": waited.wait_ratio}
    stage = next(iter(waited.stages), None)
    action, snippet = _cure(stage, facts.framework)
    why = f"For {percent(share)} of the {facts.basis} the training loop waits for its next batch"
    why += " and no GPU has work." if facts.active else "; the trace has no GPU."
    if stage is not None:
        evidence["slowest_stage_s"] = waited.stages[stage]
        why += f" Most of tf.data's time goes into its stage {stage}."
    return Finding(
        id="input_bound", severity=severity_of(share), title=f"Waits for input {percent(share)} of the {facts.basis}",
        why=why, evidence=evidence, action=action, snippet=snippet,
        gain=Gain(share, "all waiting for input while no GPU works, if every batch were ready when asked for"),
        gpus=tuple(gpu.gpu for gpu in facts.active), source=source("input_bound.share"),
    )


def _cure(stage: str | None, framework: str) -> tuple[str, str | None]:
    if framework == "pytorch":
        return ("Give the DataLoader more workers and let them run ahead.",
                "DataLoader(..., num_workers=8, prefetch_factor=4, persistent_workers=True, pin_memory=True)")
    for beginning, action, snippet in _CURES:
        if stage is not None and stage.startswith(beginning):
            return action, snippet
    return "Overlap the input pipeline with the step: prefetch, and run its slow stages in parallel.", _PREFETCH
