"""Programs that learn nothing: findings like those of others, in words without batches, models, and epochs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest
from msgspec.structs import replace

from gputop.advice.trace.general_programs import for_general
from gputop.advice.trace.job import Job
from gputop.advice.trace_rules import TRACE_RULES
from gputop.advice.verdict import finding
from gputop.analysis.results import Analysis
from gputop.core.findings import Finding
from gputop.diagnosis.diagnose import analyze
from gputop.diagnosis.report import text_report
from tests.advice.golden_words import example, verdicts_of
from tests.trace.readers.nsys_report import PROCESS, write_tables

OF_LEARNING = re.compile(
    r"\b(?:optimi[sz]ers?|(?:micro-)?batch(?:es)?|epochs?|train(?:s|ing|er)?|gradients?|DataLoader|layers?|models?|"
    r"loss(?:es)?|validation|samples? together|learning rate|activations?|tf\.\w+|torch\S*|jax\S*|datasets?|XLA|Keras|"
    r"logits|vocabulary|steps? later|TensorFlow|PyTorch|callbacks?|Python)\b", re.IGNORECASE)
_THREAD = PROCESS[0] + 500
_US, _APART_US = 1000, 30


def program(path: Path, kernels: Sequence[tuple[str, int]], copies: Sequence[tuple[int, int]] = (),
            gap_us: int = 0, turns: int = 60, calls: Sequence[str] = ("cudaLaunchKernel",)) -> Analysis:
    """A loop of these kernels (name, µs) and copies (CUPTI's kind, µs) before them, for which the host waits."""
    names = ["cudaMemcpy", "cudaDeviceSynchronize", *calls, *(name for name, _ in kernels), "a.out"]
    number = {name: i for i, name in enumerate(names, 1)}
    runtime, ran, copied = [], [], []
    now, correlation = 1_000_000, 0

    def call(name: str, length: int) -> None:
        nonlocal now
        runtime.append((now, now + length, _THREAD, correlation, number[name]))
        now += length

    for _ in range(turns):
        for kind, time_us in copies:
            correlation += 1
            copied.append((now + 5 * _US, now + (5 + time_us) * _US, 0, 7, correlation, PROCESS[0], time_us * 6000,
                           kind, *((0, 2) if kind == 1 else (2, 0))))
            call("cudaMemcpy", (time_us + 8) * _US)
        free = now
        for i, (name, time_us) in enumerate(kernels):
            correlation += 1
            start = max(now + 6 * _US, free)
            free = start + time_us * _US
            ran.append((start, free, 0, 7, correlation, PROCESS[0], number[name], number[name]))
            call(calls[i % len(calls)], 4 * _US)
            now += _APART_US * _US
        correlation += 1
        call("cudaDeviceSynchronize", max(free - now, 0) + 2 * _US)
        now += gap_us * _US
    write_tables(path, {
        "StringIds": [(i, name) for name, i in number.items()], "CUPTI_ACTIVITY_KIND_KERNEL": ran,
        "CUPTI_ACTIVITY_KIND_MEMCPY": copied, "CUPTI_ACTIVITY_KIND_RUNTIME": runtime, "NVTX_EVENTS": [],
        "TARGET_INFO_GPU": [(2, "A100", 40 << 30, 8, 0, 108)], "TARGET_INFO_CUDA_DEVICE": [(2, 0, 500)],
        "ThreadNames": [(number["a.out"], _THREAD)]})
    return analyze(path)


PROGRAMS = {
    "CUDA C stencil": ([("stencil(float*, float*, int)", 9), ("momentum_update(float*)", 7), ("halo(float*)", 6)],),
    "OpenACC": ([("main_37_gpu", 12), ("main_51_gpu", 15), ("main_51_gpu__red", 5)], [(1, 400), (2, 300)]),
    "OpenMP offload": ([("__omp_offloading_34_1a2b_solve_l88", 900)], [(2, 30)], 1500),
    "Julia": ([("julia_broadcast_kernel_2231", 300), ("julia_partial_mapreduce_grid_4455", 80)], [], 2500),
    "cuBLAS": ([("ampere_sgemm_128x64_tn", 4000)], [(1, 900)]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_of_learning_is_advised_to_a_program_that_does_not(name: str, tmp_path: Path) -> None:
    analysis = program(tmp_path / "report.sqlite", *PROGRAMS[name])
    assert analysis.findings, "nothing to read"
    for text in (text_report(analysis, findings=True), *(a.missing for a in analysis.abstained)):
        assert OF_LEARNING.findall(text) == [], text


def test_the_same_kernels_beside_those_of_a_model_keep_their_words(tmp_path: Path) -> None:
    kernels = [("softmax_forward(float*)", 9), ("adamw_kernel(float*)", 7)]
    learned, other = (program(tmp_path / f"{i}.sqlite", kernels[i:], [(1, 400)]) for i in range(2))
    assert "next batch" in learned.findings[0].action and "next part of the data" in other.findings[0].action


# What they judge is an event of a framework's, or a kernel of a model's.
_NEVER = {"memory_pressure", "anomaly_mode", "onednn_off", "memory_growth", "evaluation_share", "thread_contention",
          "input_bound", "double_precision", "eager_execution", "retracing", "xla_off", "attention_unfused",
          "layout_conversions", "elementwise_unfused", "threads_unused", "thread_oversubscription", "host_placement"}

_WITHOUT: dict[str, dict[str, object]] = {
    "communication_exposed": {"logits": False}, "step_gap_host": {"inside": (), "input_s": None, "new_workers": False}}


def test_words_of_each_rule() -> None:
    for rule in TRACE_RULES:
        if rule.needs_training or rule.id in _NEVER:
            continue
        for kind, style, basis in product(verdicts_of(rule), ("rich", "poor"), ("window", "step")):
            job = Job(basis, 0.1, "unknown", "unknown", (0, 1), general=True)
            verdict = replace(example(kind, style), claim=None)
            if rule.id in _WITHOUT:
                verdict = replace(verdict, **_WITHOUT[rule.id])
            made = for_general(finding(rule, verdict, rule.function("describe")(verdict, job)))
            assert isinstance(made, Finding)
            for text in (made.title, made.why, made.action, made.snippet or "", made.gain.how):
                assert OF_LEARNING.findall(text) == [], (rule.id, text)


def test_a_program_whose_host_works_between_its_kernels_is_told_so_first(tmp_path: Path) -> None:
    """k-means in OpenACC: the host computes the new centers, 27 ms in each turn."""
    first = program(tmp_path / "a.sqlite", [("kmeans_235_gpu", 170)], [(1, 6_000), (2, 1_300)], 27_000).findings[0]
    assert first.id == "time_outside_steps" and first.gain.claim == "at most"
    assert first.evidence["share_ratio"] == pytest.approx(0.78, abs=0.03)
    assert "Move this work to the GPU" in first.action
    once = program(tmp_path / "b.sqlite", [("kmeans_235_gpu", 170)], [(1, 6_000)], 27_000, turns=1)
    assert "time_outside_steps" not in {found.id for found in once.findings}


def test_copies_before_the_first_kernel_and_after_the_last_overlap_with_none(tmp_path: Path) -> None:
    """A sort: in, 30 kernels, out. Pinned at 26 GB/s the copies take 23% as long."""
    kernels = [("exchange", 10_000)] * 30
    analysis = program(tmp_path / "a.sqlite", kernels, [(1, 100_000)], turns=1)
    found = next(found for found in analysis.findings if found.id == "copies_pageable")
    assert found.gain.step_time == pytest.approx(0.77 * 0.25, abs=0.03) and "cudaHostAlloc" in found.action
    assert "overlap" not in found.gain.how
