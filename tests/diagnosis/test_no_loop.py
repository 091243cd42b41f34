"""Recordings of programs that are no loop: their start, their end, and GPU events alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gputop.analysis.results import Analysis
from gputop.diagnosis.diagnose import analyze_trace
from gputop.diagnosis.report import short_report
from gputop.trace.model import Kind, LaunchShape, MemoryKind, TraceGpu
from gputop.trace.readers.load import load
from tests.trace.build import Builder
from tests.trace.readers.chrome.kineto_file import event, kineto


def program(kernels: int, *, name: str = "add(float*)", pause_at: int = -1, launch: bool = True) -> Builder:
    """Kernels one behind the other; after one of them a second without any."""
    b, at = Builder(format="nsys"), 1000.0
    for i in range(kernels):
        b.run(0, at, 170 + 7 * (i * i % 11), f"{name} {i * i % 7}", launch=at - 40 if launch else None)
        at += 300 + (1e6 if i == pause_at else 0)
    return b


def judged(b: Builder) -> tuple[Analysis, str]:
    analysis = analyze_trace(b.build())
    return analysis, short_report(analysis, 1000)


@pytest.mark.parametrize("call", ["cuModuleUnload", "cudaFree", "cuCtxDestroy_v2", "cudaDeviceReset", "cublasDestroy"])
@pytest.mark.parametrize("kernels", [36, 400])
def test_tear_down_is_the_end(call, kernels):
    b = program(kernels).host(call, 1000 + 300 * kernels, 528_000, "launch 0")
    analysis, report = judged(b)
    assert "time_outside_steps" not in {f.id for f in analysis.findings} and "training loop" not in report
    assert "In the last 528 ms of the recording, the program" in report and analysis.wall_time is not None
    assert {part.id: round(part.time_s, 2) for part in analysis.wall_time.parts}["end"] == 0.53
    assert "gputop capture" not in report  # nothing is left to capture


def test_a_recording_without_any_length_has_no_end():
    analysis, _ = judged(Builder(format="nsys").run(0, 0, 0))
    assert not [note for note in analysis.trace.quality if note.id == "end"]


def test_memory_that_is_freed_between_kernels_is_not_the_end():
    b = program(400, name="void at::native::vectorized_elementwise_kernel", pause_at=200)
    analysis, _ = judged(b.host("cudaFree", 1000 + 300 * 201, 900_000, "launch 0"))
    assert analysis.wall_time is not None and "end" not in {part.id for part in analysis.wall_time.parts}


def test_the_first_use_of_a_library_is_the_start():
    b = Builder(format="nsys").host("cudaFree", 0, 3_980_000, "launch 0").host(
        "cudaStreamCreate", 3_990_000, 560_000, "launch 0")
    for i in range(60):
        b.run(0, 4_560_000 + 300 * i, 170, f"add {i % 7}", launch=4_560_000 + 300 * i - 40)
    analysis, report = judged(b)
    assert "time_outside_steps" not in {f.id for f in analysis.findings} and "training loop" not in report
    assert "The first 4.55 s of the recording are job startup, with loading" in report
    assert "Do    record a longer run" in report


@pytest.mark.parametrize(("kernels", "launch"), [(22, True), (22, False), (900, False)])
def test_what_is_no_training_has_nothing_moved_out_of_its_loop(kernels, launch):
    """A tool that runs a few kernels once, and GPU events alone."""
    analysis, report = judged(program(kernels, pause_at=kernels // 2, launch=launch))
    assert "time_outside_steps" not in {f.id for f in analysis.findings} and "training loop" not in report


def test_a_framework_whose_gpus_pause_again_and_again_is_still_told():
    b, at = Builder(format="nsys"), 1000.0
    for i in range(900):
        b.run(0, at, 170 + 7 * (i * i % 11), f"void at::native::softmax_backward_{i * i % 7}", launch=at - 40)
        at += 300
        if i % 150 == 70:
            b.host("save_model", at, 900_000, "launch 0")
            at += 900_100
    analysis, _ = judged(b)
    assert "time_outside_steps" in {f.id for f in analysis.findings}


def test_what_follows_a_start_for_a_moment_has_no_causes_of_its_own():
    """A share of a window that is a thousandth of the recording saves nothing."""
    b = Builder(format="nsys").host("cudaHostAlloc", 0, 275_000, "launch 0")
    for i in range(12):
        b.run(0, 275_100 + 40 * i, 4, "add", launch=275_090 + 40 * i)
    analysis, report = judged(b)
    assert not analysis.findings and report.startswith("NO VERDICT  the 276 ms recorded are mostly job startup")
    assert [gap.missing for gap in analysis.abstained if gap.id == "launch_bound"] == [
        "more GPU work: it takes only 444 µs of this recording"]


@pytest.mark.parametrize("many", [True, False])
def test_narrow_kernels_that_follow_a_start_for_a_moment_are_no_verdict(many):
    b, recorded = Builder(format="nsys"), "67.8" if many else "156"
    if many:
        b.host("cudaMalloc", 0, 65_000, "launch 0")
        for i in range(90):
            b.run(0, 65_100 + 30 * i, 28, "spread", launch=65_090 + 30 * i, shape=LaunchShape((1, 1, 1), (32, 1, 1)))
    else:
        b.host("cudaMalloc", 0, 127_000, "launch 0")
        b.run(0, 137_000, 6_000, "add", launch=136_990, shape=LaunchShape((1, 1, 1), (256, 1, 1)))
        b.run(0, 156_000, 100, "MemcpyD2H", kind=Kind.D2H, launch=155_990, size=1_000)
    trace = b.build()
    trace.gpus = [TraceGpu("node", 0, compute_capability=(9, 0), sms=132)]
    analysis = analyze_trace(trace)
    assert {f.id: f.severity for f in analysis.findings} == {"small_grids": "low"}
    assert short_report(analysis, 1000).startswith(f"NO VERDICT  the {recorded} ms recorded are mostly job startup")


def test_collectives_in_a_start_are_collectives():
    """What is left out with the start is no GPU that works for itself."""
    b = Builder(gpus=2, format="nsys").host("cuModuleLoadData", 0, 400_000, "launch 0")
    for gpu in range(2):
        b.run(gpu, 100, 50, "ncclDevKernel_SendRecv", kind=Kind.COLLECTIVE, launch=50)
        for i in range(90):
            b.run(gpu, 400_100 + 300 * i, 200, f"add {i * i % 7}", launch=400_050 + 300 * i)
    analysis, _ = judged(b)
    notes = {note.id for note in analysis.trace.quality}
    assert "start" in notes and "no_collectives" not in notes


def test_a_program_that_starts_cuda_and_launches_nothing_is_told_so():
    _, report = judged(Builder(gpus=0, format="nsys").host("cuInit", 0, 8, "python3/17").host(
        "cuMemGetInfo", 2_000_000, 30, "python3/17"))
    assert report.startswith("NO VERDICT  no GPU work in the 2.00 s recorded")
    assert "check that the program runs on a GPU" in report and "--seconds 60" not in report


def test_time_without_events_is_to_be_sampled():
    b = Builder(format="nsys").run(0, 10, 20_000, launch=0, thread="tool/17").host("cudaFree", 920_000, 500, "tool/17")
    for i in range(30):
        b.run(0, 20_020 + 300 * i, 280, f"add {i * i % 7}", launch=20_015 + 300 * i, thread="tool/17")
    _, report = judged(b)
    assert report.startswith("NO VERDICT  no steps found in the 920 ms recorded") and "perf record" in report


def test_what_runs_on_any_thread_of_an_unknown_program_is_no_time_without_events():
    b = Builder(gpus=0, format="chrome")
    for i in range(4):  # the passes of a network, each on a thread of its own
        b.host("Linear", 10_000 * i, 3_000, "forward").host("Linear", 10_000 * i + 3_000, 6_000, "backward")
        b.host("Conv", 10_000 * i + 9_500, 100, "forward")
    _, report = judged(b)
    assert report.startswith("NO VERDICT  no steps found in the 39.6 ms recorded")
    assert "(Linear)" in report and "without events" not in report and "py-spy" not in report


@pytest.mark.parametrize(("kernels", "apart", "reason"), [
    (14, 30_000, "only 14 kernels in the 400 ms"), (72, 20_000, "GPU work of only 288 µs in the 1.43 s")])
def test_hardly_any_work_is_no_job_in_which_no_cause_is_found(kernels, apart, reason):
    b = Builder(format="nsys").host("cudaFree", 0, 9_000, "python3/17")
    for i in range(kernels):
        b.run(0, 10_000 + apart * i, 4, f"add {i}", launch=9_990 + apart * i, thread="python3/17")
    _, report = judged(b)
    assert report.startswith(f"NO VERDICT  {reason} recorded") and "bound by" not in report


@pytest.mark.parametrize(("launch", "longer"), [(3_500, True), (10, False)])
def test_a_script_of_first_launches_is_to_run_longer(launch, longer):
    b = Builder(format="nsys").host("cudaFree", 0, 900, "python3/17")
    for i in range(14):
        b.run(0, 10_005 + 25_000 * i + launch, 4, f"add {i}", launch=10_000 + 25_000 * i, launch_length=launch,
              thread="python3/17")
    _, report = judged(b)
    assert report.startswith("NO VERDICT  only 14 kernels in the ") and "py-spy" in report
    assert ("Do    record a longer run of the program, as most" in report) == longer


def test_a_program_whose_host_works_for_long_is_to_be_sampled_and_its_gpu_is_not_judged_by_a_moment():
    b = Builder(format="nsys").host("cudaMalloc", 0, 70_000, "tool/17").host("cudaFree", 1_170_000, 50, "tool/17")
    for i in range(90):
        b.run(0, 80_000 + 1_000 * i, 300 + i * i % 7, f"add {i * i % 7}", launch=79_990 + 1_000 * i, thread="tool/17")
    _, report = judged(b)
    assert report.startswith("NO VERDICT  no steps found in the 1.17 s recorded")
    assert "Do    find out what the host does" in report and "the GPUs are idle for" not in report


def test_a_lone_collective_is_named():
    _, report = judged(Builder(format="nsys").host("cudaDeviceSynchronize", 20, 186_000, "python3/17").run(
        0, 30, 185_900, "ncclDevKernel_AllGather_RING_LL", kind=Kind.COLLECTIVE, launch=10, thread="python3/17"))
    assert report.startswith("NO VERDICT  only 1 collective in the 186 ms recorded")


@pytest.mark.parametrize(("length", "named"), [(50_000_000, True), (20_000_000, False)])
def test_a_kernel_that_is_the_whole_program_is_named_and_no_loop_is_marked(length, named):
    b = Builder(format="nsys").host("cudaMalloc", 0, 30_000, "tool/17").host(
        "cudaDeviceSynchronize", 31_000, 50_000_000, "tool/17")
    b.run(0, 31_000, length, "void diverge<float>(int, double *)", launch=30_900, thread="tool/17")
    _, report = judged(b)
    assert report.startswith("NO VERDICT  only 1 kernel in the 50.0 s recorded")
    assert ("Do    optimize the kernel diverge<…> (50.0 s per launch" in report) == named
    assert not named or "mark the steps in the loop" not in report


@pytest.mark.parametrize(("pause", "named"), [(3_000, True), (300_000, False)])
def test_a_host_that_reads_managed_memory_is_named(pause, named):
    b = Builder(format="nsys").host("cudaMallocManaged", 0, 1_000, "tool/17").run(0, 1_100, 5_000, launch=1_050,
                                                                               thread="tool/17")
    for i in range(200):
        b.run(0, 6_200 + i * (pause + 400), 400, "MemcpyD2H", kind=Kind.D2H, size=2 << 20, src=MemoryKind.MANAGED,
              dst=MemoryKind.MANAGED)
    _, report = judged(b)
    assert report.startswith("NO VERDICT  only 1 kernel in the ")
    assert ("(reading managed memory from the GPU)" in report) == named
    assert ("copy all results to the host together" in report) == named


def test_what_repeats_after_a_start_for_a_moment_is_a_start():
    b = Builder(format="nsys").host("cudaMalloc", 0, 200_000, "launch 0")
    for i in range(10):
        for k in range(24):
            at = 200_100 + 1_300 * i + 40 * k
            b.run(0, at + 10, 8, f"sort {k}", launch=at)
    analysis, report = judged(b)
    assert analysis.steps is not None and analysis.steps.unit == "period"
    assert report.startswith("NO VERDICT  the 213 ms recorded are mostly job startup")


@pytest.mark.parametrize("length", [2_400_000, 1_200_000])
def test_a_range_around_the_whole_program_names_no_work_and_a_start_shows_no_loop(length):
    b = Builder(format="nsys").host("distributed_training", 0, length, "python3/17").host(
        "cudaFree", 300_000, 220_000, "python3/17")
    for i in range(300):
        at = 600_000 + 6_000 * i
        b.run(0, at + 10, 200 + 7 * (i * i % 11), f"void at::native::mul<{i * i % 7}>", launch=at, thread="python3/17")
    analysis, report = judged(b)
    assert "time_outside_steps" not in {f.id for f in analysis.findings}
    assert report.startswith("NO VERDICT  no steps found in the 2.") and ("distributed" in report) == (length < 2e6)


@pytest.mark.parametrize("gpus", [0, 2])
def test_a_gpu_that_is_there_and_has_no_work_is_told(gpus: int, tmp_path: Path):
    document = kineto()
    document["deviceProperties"] = document["deviceProperties"][:gpus]
    document["traceEvents"] = [event("cpu_op", "aten::addmm", 1e15 + 1e6 * i, 9e5) for i in range(5)]
    (tmp_path / "a.json").write_text(json.dumps(document))
    analysis = analyze_trace(load([tmp_path / "a.json"]))
    assert ("unused_gpu" in {note.id for note in analysis.trace.quality}) == bool(gpus)
    reason = "no GPU work" if gpus else "no steps found"
    assert short_report(analysis, 1000).startswith(f"NO VERDICT  {reason} in the 4.90 s recorded")


@pytest.mark.parametrize(("pause", "verdict"), [
    (200, "NO VERDICT  no steps found in the"), (5_000, "NO CAUSE FOUND")])
def test_a_moment_of_a_program_is_not_judged_by_what_its_gpu_idles(pause: int, verdict: str):
    b, at = Builder(format="nsys"), 1000.0
    for i in range(24):
        b.run(0, at, 60 + 7 * (i * i % 11), f"add {i * i % 7}")
        at += 150 + (pause if i in (3, 11, 12) else 0)
    assert judged(b)[1].startswith(verdict)


def uploads(b: Builder, begin: float, count: int) -> float:
    """That many copies of parameters; the time after the last one."""
    for i in range(count):
        b.run(0, begin + 2_000 * i, 1_500, "MemcpyH2D", kind=Kind.H2D, launch=begin + 2_000 * i - 10, size=1 << 22,
              src=MemoryKind.PAGEABLE, dst=MemoryKind.DEVICE)
    return begin + 2_000 * count


def test_a_pause_behind_the_uploads_and_a_few_small_copies_is_no_start():
    b = Builder(format="nsys")
    at = uploads(b, 20, 30) + 4_000_000
    for i in range(60):
        b.run(0, uploads(b, at + 20_000 * i, 3), 500, f"probe {i % 3}", launch=at + 20_000 * i + 5_990)
    analysis, report = judged(b)
    assert analysis.wall_time is not None and "mostly job startup" not in report
    parts = {part.id: part.time_s for part in analysis.wall_time.parts}
    assert parts["start"] == pytest.approx(0.06, abs=0.005) and parts["no_steps"] > 4


def test_all_that_is_left_out_as_the_start_is_the_start():
    """Half of it is loading, the rest what leaves no event, and a few kernels."""
    b = Builder(format="nsys").host("cudaFree", 0, 3_000_000, "launch 0").run(0, 3_500_000, 100, "first",
                                                                              launch=3_499_000)
    b.host("cudaStreamCreate", 4_000_000, 1_000_000, "launch 0")
    for i in range(900):
        b.run(0, 5_000_100 + 500 * i, 300, f"add {pow(3, i, 1009) % 7}", launch=5_000_060 + 500 * i)
    analysis, report = judged(b)
    assert "The first 5.00 s of the recording are job startup" in report and analysis.wall_time is not None
    assert {part.id: round(part.time_s, 2) for part in analysis.wall_time.parts}["start"] == 5.0
    assert "unexplained" not in report


def test_of_a_job_without_marks_and_without_a_gpu_the_gpu_is_missed_first():
    b = Builder(gpus=0, format="chrome")
    for i in range(9):
        for k in range(20):
            b.host(f"aten::op{k}", i * 40_000 + k * 2_000, 1_900, "thread 1")
    _, report = judged(b)
    assert "no GPU work and no steps are marked" in report and "runs on a GPU" in report


def test_ops_are_named_where_all_that_a_cpu_runs_is_one_phase():
    b = Builder(gpus=0, format="chrome")
    for i in range(9):
        b.host("aten::rand", i * 40_000, 30_000, "thread 1").host("aten::sum", i * 40_000 + 39_900, 90, "thread 1")
        b.host("aten::square", i * 40_000 + 30_000, 9_900, "thread 1")
    _, report = judged(b)
    assert "shares of the period: aten::rand 75%, aten::square 25%" in report.replace("\n        ", " ")


def test_launched_work_that_does_not_begin_waits_for_work_that_is_not_recorded():
    b = Builder(format="chrome").host("ProfilerStep#7", 0, 470_000, "thread 1", step_num=7)
    b.host("cudaMemcpyAsync", 400, 463_000, "thread 1").run(0, 80, 4, "embed", launch=20, thread="thread 1")
    for i in range(60):
        b.run(0, 463_380 + i * 100, 90, f"layer{i % 6}", launch=120 + i, thread="thread 1")
    _, report = judged(b)
    assert "the GPU shows no work, although some is launched" in report and "all processes" in report


def test_launched_work_that_does_not_begin_is_told_by_the_layer_whose_own_ops_it_is():
    b = Builder(format="chrome").host("ProfilerStep#7", 0, 470_000, "thread 1", step_num=7)
    b.host("nn.Module: Decoder_0", 10, 463_350, "thread 1").host("nn.Module: Linear_0", 140, 60, "thread 1")
    for i in range(60):
        b.run(0, 463_380 + i * 100, 90, f"layer{i % 6}", launch=120 + i, thread="thread 1")
    b.run(0, 80, 4, "embed", launch=20, thread="thread 1").host("aten::mm", 150, 100, "thread 1")
    _, report = judged(b.host("cudaMemcpyAsync", 400, 463_000, "thread 1"))
    assert "mostly before kernels of Decoder_0\n" in report


@pytest.mark.parametrize(("queued", "shown"), [(True, True), (False, False)])
def test_in_a_window_too_launched_work_that_does_not_begin_is_told_from_a_late_launch(queued, shown):
    b = Builder(format="chrome")
    for i in range(30):
        at = 1_650 * i + 3 * (i * i % 7)
        b.host("aten::coalesce", at, 1_625, "thread 1").host("cudaStreamSynchronize", at + 20, 1_600, "thread 1")
        b.run(0, at + 1_596, 24, f"sort {i * i % 11}", launch=at + (10 if queued else 1_590), thread="thread 1")
    _, report = judged(b)
    assert ("the GPU shows no work, although some is launched" in report) == shown


def test_a_moment_of_gpu_work_is_no_job_in_which_no_cause_is_found():
    b = Builder(format="nsys").host("cudaFree", 0, 9_000, "python3/17")
    for i in range(72):
        b.run(0, 10_000 + 20_000 * i, 4, f"add {i}", launch=9_990 + 20_000 * i, thread="python3/17")
    _, report = judged(b)
    assert report.startswith("NO VERDICT  GPU work of only 288 µs in the 1.43 s recorded")
