"""Traces of a training loop that is fed by tf.data."""

from __future__ import annotations

from tests.trace.build import Builder

CALLER, PRODUCER, RUNNER = "tf_data_iterator_get_next/1", "tf_data_iterator_resource/2", "tf_data_iterator/3"
WORKERS = ("tf_data_private_threadpool/4", "tf_data_private_threadpool/5")
ROOT = {"id": 1, "name": "PrefetchDataset:4", "shapes": "[8,2]"}


def training(batches: int = 10, length: float = 100) -> Builder:
    """Root → Prefetch | Batch → ParallelMap (2 workers, 60 µs an element) | Range; a batch every ``length``."""
    b = Builder(gpus=0)
    for i in range(batches):
        at = i * length
        full = {"buffered_elements": 1} if i % 2 else {}
        b.host("Iterator::Root", at, 10, CALLER, **ROOT)
        b.host("Iterator::Root::Prefetch", at + 1, 8, CALLER, id=2, parent_id=1, buffer_limit=2, **full)
        b.host("Iterator::Root::Prefetch::BatchV2", at, 80, PRODUCER, id=3, parent_id=2)
        b.host("Iterator::Root::Prefetch::BatchV2::ParallelMapV2", at + 5, 70, PRODUCER, id=4, parent_id=3,
               parallelism=2)
        b.host("ParallelMapProduce", at, 20, RUNNER)
        b.host("Iterator::Root::Prefetch::BatchV2::ParallelMapV2::Range", at + 1, 5, RUNNER, id=5, parent_id=4)
        b.host("InstantiatedCapturedFunction::RunAsync", at + 10, 5, RUNNER, id=100 + i)
        b.host("ExecutorState::Process", at + 15, 60, WORKERS[i % 2], id=100 + i)
        b.host("ExecutorState::Process", at, 90, "tf_Compute/1", id=7)  # the step's own
    return b
