"""Synthetic jobs for the rules on traces: each has one thing wrong, or nothing."""

from __future__ import annotations

from typing import Any

from gputop.advice.registry import rule_of
from gputop.analysis.results import Analysis
from gputop.core.findings import Finding
from gputop.diagnosis.diagnose import analyze_to_facts, analyze_trace
from gputop.trace.model import Kind, MemoryKind, Trace
from tests.trace.build import Builder, keras_steps

STEP = 20_000.0  # µs
STEPS = 6
KERNEL = "loop_add_fusion_3"  # tells neither its number type nor what cores it needs


def analyzed(job: Builder | Trace | Analysis, params: int | None = None) -> Analysis:
    if isinstance(job, Analysis):
        return job
    return analyze_trace(job.build() if isinstance(job, Builder) else job, params)


def findings(job: Builder | Trace | Analysis, params: int | None = None) -> dict[str, Finding]:
    return {f.id: f for f in analyzed(job, params).findings}


def abstained(job: Builder | Trace | Analysis, params: int | None = None) -> dict[str, str]:
    return {a.id: a.missing for a in analyzed(job, params).abstained}


def verdict(job: Builder | Trace, id_: str) -> Any:
    """What a rule computes, before it is put into words."""
    rule = rule_of(id_, "trace")
    assert rule is not None
    return rule.function("judge")(analyze_to_facts(job.build() if isinstance(job, Builder) else job))


def job(gpus: int = 1, steps: int = STEPS) -> Builder:
    """Steps of 20 ms whose function call takes all of it."""
    return keras_steps(Builder(gpus=gpus), steps, STEP, STEP - 50)


def fill(b: Builder, gpu: int, begin: float, end: float, kernel: float, gap: float,
         queued: float | None = None, steps: int = STEPS) -> None:
    """Kernels from ``begin`` to ``end`` of each step, launched as the one before ends or ``queued`` µs ahead."""
    for i in range(steps):
        t = i * STEP + begin
        while t + kernel <= i * STEP + end:
            ahead = min(gap * 0.8, 8.0) if queued is None else queued
            b.run(gpu, t, kernel, KERNEL, launch=max(t - ahead, 0.0), launch_length=min(5.0, ahead))
            t += kernel + gap


def launched_ahead(b: Builder, thread: str | None = None) -> Builder:
    """The same work, all of each step launched at its begin, by one ``thread`` or those of before, which then wait for
    the GPUs: these pace the job."""
    ends: dict[tuple[str, int], float] = {}
    launches: dict[tuple[str, int], int] = {}
    for event in b._device:
        if event["launch"] is not None:
            event["thread"] = thread or event["thread"]
            own = event["thread"], int(event["start"] // STEP)
            launches[own] = launches.get(own, 0) + 1
            event["launch"] = min(own[1] * STEP + 1 + 0.02 * launches[own], event["start"])
            event["launch_length"] = 0.02
            ends[own] = max(ends.get(own, 0.0), event["start"] + event["length"])
    for (line, step), end in ends.items():
        begin = step * STEP + 2 + 0.02 * launches[line, step]
        b.host("cuStreamSynchronize", begin, end + 0.5 - begin, line=line)
    return b


def healthy(gpus: int = 1, steps: int = STEPS) -> Builder:
    b = job(gpus, steps)
    for gpu in range(gpus):
        fill(b, gpu, 100, STEP, 196, 4, queued=90, steps=steps)
    return b


def launch_bound(gpus: int = 1) -> Builder:
    b = job(gpus)
    for gpu in range(gpus):
        fill(b, gpu, 50 + gpu * 7, STEP, 10, 30)
    return b


def input_bound(wait: float = 8_000.0, stage: str = "Map") -> Builder:
    """The batch arrives ``wait`` µs into the step; the GPU works through the rest of it."""
    b = job()
    for i in range(STEPS):
        b.host("IteratorGetNextOp::DoCompute", i * STEP + 20, wait, line="tf_data_iterator_get_next/1")
        b.host(f"Iterator::Root::Prefetch::{stage}", i * STEP, 15_000, line="tf_data_private_threadpool/1")
    fill(b, 0, wait + 50, STEP, 196, 4, queued=20)
    return b


def copying(way: Kind, length: float, memory: MemoryKind = MemoryKind.PINNED, size: int = 200_000_000) -> Builder:
    """Each step begins with one copy of ``length`` µs, then computes."""
    b = job()
    for i in range(STEPS):
        b.run(0, i * STEP + 50, length, f"Memcpy{way.name}", kind=way, launch=i * STEP + 10, size=size,
              src=memory if way == Kind.H2D else MemoryKind.DEVICE,
              dst=memory if way == Kind.D2H else MemoryKind.DEVICE)
    fill(b, 0, length + 60, STEP, 196, 4, queued=20)
    return b


def uneven(heavy: int, factor: float, gpus: int = 4, light: float = 6_000.0, longer: bool = False) -> Builder:
    """One GPU computes ``factor`` times as long as the others, who then wait: with more kernels, or ``longer`` ones."""
    b = job(gpus)
    for gpu in range(gpus):
        more = factor if gpu == heavy else 1
        length = 100 * (more if longer else 1)
        fill(b, gpu, 100, 100 + light * more, length - 4, 4, queued=20)
    return b
