from __future__ import annotations

import re

import msgspec
import pytest

from gputop.advice.trace.advise import Cures
from gputop.analysis.results import HostWork
from gputop.diagnosis.diagnose import analyze_trace
from gputop.diagnosis.report import limit_of, short_report, text_report, unexplained_text
from gputop.diagnosis.wall_text import host_words, wall_rows
from gputop.diagnosis.worker import REPORT_WIDTH
from gputop.render.step_bar import plain_step_lines
from gputop.render.step_parts import PART_BY_ID
from gputop.trace.model import Kind, MemoryKind
from tests.advice.trace.traces import STEP, STEPS, fill, healthy, input_bound, job, launch_bound, uneven
from tests.analysis.host.traces_of_epochs import TRAIN, train
from tests.records import replace
from tests.trace.build import Builder, keras_steps
from tests.tui.scenes import capture_of


def flat(text):
    return " ".join(text.split())


def test_report_names_the_cause_and_the_cure():
    text = text_report(analyze_trace(input_bound().build()))
    assert "1. HIGH Input wait takes" in text and PART_BY_ID["input"].name in text and "█" in text
    assert "fix: 20.0 → " in text and "  From  wait" in text and "prefetch" in text


def test_the_findings_come_before_the_figures_and_what_could_not_be_judged_is_said():
    analysis = analyze_trace(launch_bound().build())
    text = text_report(analysis)
    assert text.index("\nStep ") < text.index("1. HIGH") < text.index("Where the mean step") < text.index("GPU  busy")
    assert text.count("[launch_bound]") == 1 and "1. HIGH" not in text_report(analysis, findings=False)
    assert "causes could not be checked in this trace. To see which ones and why, run gputop" in flat(text)
    assert "input_bound" not in text
    text = text_report(analysis, verbose=True)
    assert "Not checked" in text and "input_bound" in text and "batch_size_headroom" in text


def test_report_of_a_healthy_run_names_the_limit():
    text = flat(text_report(analyze_trace(healthy().build())))
    assert "bound by compute" in text and "1. " not in text
    # A few steps show nothing wrong, and are no clean bill.
    assert f"NO VERDICT {STEPS - 1} steps seen, 20 needed Do gputop capture PID" in text
    assert "NO PROBLEM FOUND" not in text
    many = text_report(analyze_trace(healthy(steps=24).build()))
    assert "NO PROBLEM FOUND  the GPUs are busy" in many and "NO VERDICT" not in many


def test_idle_gpus_are_not_called_free_of_problems():
    b = Builder()
    for at in (*range(0, 5_400, 300), 7_300, 9_000):
        b.run(0, at, 10, launch=max(at - 20, 0))
    limit = limit_of(analyze_trace(b.build()))
    assert "the GPUs are idle for 9" in limit and "--idle-gaps" in limit and "NO PROBLEM" not in limit


def test_a_larger_batch_saves_time_per_sample():
    b = launch_bound()
    b.memory(5, "GPU_0_bfc", 2**29, 39 * 2**30, 2**30)
    text = " ".join(text_report(analyze_trace(b.build())).split())
    assert "Increase the batch size per GPU, up to 8×." in text and "fix: 20.0 → " in text and (
        "8× the batch size fits in memory [batch_size_headroom]" in text)


def test_waiting_that_could_not_be_judged_is_not_denied():
    one = Builder(gpus=0).host("train", 0, 100, step_num=1).host("IteratorGetNextOp::DoCompute", 0, 90)
    limit = limit_of(analyze_trace(one.build()))
    assert "waits for its input is unknown" in limit and "90% of the step" in limit and "not wait" not in limit


def test_copies_beside_compute_are_not_what_limits():
    b = job()
    fill(b, 0, 100, 9_000, 96, 4, queued=20)
    for i in range(STEPS):
        b.run(0, i * STEP + 100, 8_500, "MemcpyH2D", kind=Kind.H2D, stream=2, launch=i * STEP + 10)
    a = analyze_trace(b.build())
    use = msgspec.structs.replace(a.gpus[0], busy=0.8, compute=0.3, copies=0.7, copies_exposed=0.1,
                                  collectives_exposed=0.4)
    assert limit_of(msgspec.structs.replace(a, gpus=(use,), breakdown=None, wall_time=None)) == (
        "NO CAUSE FOUND: exposed communication takes 40% of the time")
    assert "idle for 56% of the step" in limit_of(a) and "opies" not in limit_of(a)


def test_a_gpu_that_is_busy_from_its_first_event_to_its_last_may_idle_for_most_of_the_step():
    b = Builder().run(0, 5_000, 40, launch=4_990).host("train", 0, 90_000, step_num=1)
    a = analyze_trace(b.build())
    assert a.gpus[0].busy == 1 and a.breakdown is not None
    assert "idle for 100% of the step" in limit_of(a) and "NO PROBLEM" not in text_report(a)


def test_much_exposed_communication_is_no_small_problem_where_its_saving_is_not_known():
    b = job()
    for i in range(STEPS):
        b.run(0, i * STEP + 100, 5_000, launch=i * STEP + 20)
        b.run(0, i * STEP + 5_100, 14_000, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", kind=Kind.COLLECTIVE,
              launch=i * STEP + 40)
    a = analyze_trace(b.build())
    assert [f.severity for f in a.findings if f.id == "communication_exposed"] == ["medium"]
    assert limit_of(a)== "NO CAUSE FOUND: exposed communication takes 70% of the step"


def test_a_large_cause_of_a_single_step_is_not_denied():
    b = Builder().host("ProfilerStep#1", 0, 65_000)
    b.run(0, 40, 41_000, "MemcpyH2D", kind=Kind.H2D, launch=20, size=150 << 20)
    for i in range(12):
        b.run(0, 41_050 + 1_990 * i, 1_980, f"add {i}", launch=60 + 20 * i)
    a, cause = analyze_trace(b.build()), analyze_trace(launch_bound().build()).findings[0]
    cause = replace(cause, severity="low", evidence={})
    copies = "copies without overlapping compute take 63% of the step"
    assert limit_of(a) == f"NO CAUSE FOUND: {copies}"
    caused = limit_of(replace(a, findings=[cause]))
    assert caused.startswith("NO VERDICT: 1 step seen, 20 needed") and copies in caused


def test_simulated_traces_are_marked():
    trace = healthy().build()
    assert "SIMULATED" not in text_report(analyze_trace(trace))
    trace.simulated = True
    assert text_report(analyze_trace(trace)).startswith("SIMULATED")
    sentence = "TensorFlow takes 20-40 µs to launch"  # said of its traces alone
    assert sentence in flat(text_report(analyze_trace(launch_bound().build())))
    assert sentence not in flat(text_report(analyze_trace(replace(launch_bound().build(), format="chrome"))))


def test_control_characters_of_a_trace_do_not_reach_the_terminal():
    b = keras_steps(Builder(gpus=0, hosts=("evil\x1b]0;x\x07host",)), 4, 100, 50)
    b.host("EagerExecute", 500, 60, is_func=1, eager_op="__inference_\x1b[31mx_1")
    trace = b.build()
    trace.paths = ["a\x1b[2Jb\r\n"]
    text = text_report(analyze_trace(trace))
    assert "\x1b" not in text and "\r" not in text and "\x07" not in text and "evil" in text


def test_imbalance_explains_the_waiting_of_the_others(monkeypatch):
    monkeypatch.setattr(Cures, "saved", lambda self, verdict: (None, ""))  # nothing there waits for the GPUs
    assert "Unexplained" not in text_report(analyze_trace(uneven(0, 3.0, light=6_300).build()))


def test_large_parts_without_a_finding_are_called_unexplained():
    b = keras_steps(Builder(), 6, 10_000, 9_990)  # inside of the call: no gap between steps
    for i in range(6):
        for j in range(60):
            b.run(0, i * 10_000 + 40 + j * 45, 44, launch=i * 10_000 + j * 40)
    analysis = analyze_trace(b.build())
    left = analysis.wall_time.unexplained
    assert left is not None and left.parts["host"] == pytest.approx(analysis.breakdown.host)
    assert left.time_s == pytest.approx(sum(left.parts.values())) and left.of_s == pytest.approx(
        analysis.breakdown.total)
    text = flat(text_report(analysis))
    assert "7.4 ms of the 10.0 ms step (74%) is unexplained: host work. Host activity during this time:" in text
    # More than fits into the time is work on several threads, or of time that a finding claims.
    left = replace(left, work=(HostWork("aten::conv2d", 0.6 * left.time_s, 1), HostWork("call", 0.5 * left.time_s, 1)))
    several = replace(analysis, wall_time=replace(analysis.wall_time, unexplained=left))
    assert unexplained_text(several).endswith("is unexplained: host work.")


def test_ops_without_a_backward_pass_have_no_shares_of_phases():
    b = Builder(gpus=0, format="chrome")
    for i in range(12):
        b.host("aten::rand", i * 5_000, 3_000).host("aten::square", i * 5_000 + 3_010, 900)
    report = short_report(analyze_trace(b.build()), REPORT_WIDTH)
    assert report.startswith("NO VERDICT") and "forward" not in report


def test_launches_do_not_explain_what_else_the_host_was_at():
    b = keras_steps(Builder(), 6, 20_000, 19_990)
    for i in range(6):
        for j in range(60):
            at = i * 20_000 + 20 + j * 100
            b.run(0, at + 10, 20, launch=at)
    text = flat(text_report(analyze_trace(b.build())))
    assert "[launch_bound]" in text
    assert re.search(r"1\d\.\d ms of the 20.0 ms step \(7\d%\) is unexplained: host work", text)


@pytest.mark.parametrize(("event", "format_", "how"), [
    ("EagerExecute", "xspace", "tf.profiler.experimental.Trace('train'"), ("aten::mm", "chrome", "prof.step()"),
    ("aten::mm", "nsys", "torch.cuda.nvtx.range(f'ProfilerStep#{step}')"), ("main", "nsys", "NVTX ranges named"),
    ("PjitFunction(f)", "xspace", "jax.profiler.StepTraceAnnotation"),
    ("ThunkExecutor::Execute", "xspace", "step_num=step, _r=1) or jax.profiler.StepTraceAnnotation"),
])
def test_how_to_mark_steps_fits_the_framework(event, format_, how):
    trace = Builder().host(event, 0, 10).run(0, 20, 5, launch=5).build()
    trace.format = format_
    assert how in next(note.message for note in analyze_trace(trace).trace.quality if note.id == "no_steps")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_wrapping_keeps_to_the_width(width):
    trace = launch_bound().build()
    trace.paths = ["t"]
    text = text_report(analyze_trace(trace), width)
    prose = [line for line in text.splitlines() if not line.startswith(("GPU ", "    ", "  0"))]
    assert max(len(line) for line in prose if "%" not in line) <= width


def test_the_table_of_gpus_fits_what_the_monitor_shows():
    """REPORT_WIDTH is what is left of 80 columns there."""
    a = analyze_trace(launch_bound(2).build())
    most = msgspec.structs.replace(
        a.gpus[0], gpu=100, busy=1.0, compute=1.0, collectives=0.99, collectives_exposed=0.99, copies=1.0,
        idle_host_fault=1.0, launch_delay_median_s=0.0995, kernels_per_s=1_234_567.0)
    table = text_report(msgspec.structs.replace(a, gpus=(most,)), REPORT_WIDTH).split("\nGPUs ")[1].split("\n\n")[0]
    assert "1,234,567\n" in f"{table}\n" and all(len(line) <= REPORT_WIDTH for line in ("GPUs " + table).splitlines())


def test_evidence_has_its_units_and_small_memory_is_not_nothing():
    b = launch_bound()
    b.memory(5, "GPU_0_bfc", 2**22, 39 * 2**30, 2**22)
    b.memory(5, "GPU_1_bfc", 2**22, 39 * 2**30, 2**22)
    text = text_report(analyze_trace(b.build()), 120)
    assert re.search(r"From wait for launches [\d.]+ ms; share of the step \d+%", " ".join(text.split()))
    memory = [line.split() for line in text.splitlines() if "total, highest ever" in line]
    assert [row[:4] for row in memory] == [[f"GPU_{gpu}_bfc", "4.0M", "100%", "<1%"] for gpu in range(2)]


def test_the_table_of_the_recorded_time_leaves_no_part_out():
    b = Builder(gpus=0).host("EagerExecute", 0, 990_000, is_func=1, eager_op=TRAIN)  # a start
    train(b, 1_000_000, 20)
    text = text_report(analyze_trace(b.build()))
    table = re.search(r"^Time     Where the .* recorded went.\n((?:  .*\n)+)", text, re.MULTILINE)
    assert table is not None and re.search(r" 1\.00 s +start", table[1])
    assert sum(map(int, re.findall(r"^ +(\d+)% ", table[1], re.MULTILINE))) == pytest.approx(100, abs=1)


def test_periods_that_may_be_layers_are_not_called_training_steps():
    b = Builder(format="nsys")
    for period in range(30):
        for i in range(12):
            b.run(0, period * 130 + i * 10, 9.9, f"layer{i}")
    found = analyze_trace(b.build())
    assert found.steps is not None and found.steps.unit == "period"
    assert found.wall_time is not None
    rows = {row.name: row.often for row in wall_rows(found.wall_time)}
    assert rows["repeated sequence"] == f"{found.steps.count} periods" and "whole steps" not in rows
    assert "no steps are marked" in limit_of(found)


@pytest.mark.parametrize("scenario", ["gpu0-oversubscribed", "input-bound", "healthy"])
@pytest.mark.parametrize("width", [60, 100, 120])
def test_the_short_report_is_the_verdict_on_one_screen(scenario: str, width: int) -> None:
    analysis = capture_of(scenario).analysis
    assert analysis is not None
    text = short_report(analysis, width)
    lines = text.splitlines()
    code = analysis.findings[0].snippet.splitlines() if analysis.findings else []
    assert len(lines) <= 25 + (width < 100) * 8 and all(
        len(line) <= width or "/" in line or line.strip() in map(str.strip, code) for line in lines)
    assert lines[0].startswith("SIMULATED") and "Step time" in text and "█" in text
    assert "--full" in "".join(lines[-3:]) and set(map(str.strip, code)) <= set(map(str.strip, lines))
    for finding in analysis.findings:
        assert finding.id in text
    assert "Kernels" not in text and "Memory" not in text
    if scenario == "healthy":
        assert "NO VERDICT  5 steps seen, 20 needed" in text
    else:
        head, do, _ = text.partition("  Why ")[0].partition("\n  Do    ")
        assert analysis.findings[0].title[:8].upper() in head and "    fix: " in head.replace("\n  fix", "    fix")
        assert do and " …" not in text.partition("  Why ")[0], "what to do is never cut"


def test_the_bar_has_a_sign_for_each_part() -> None:
    bar, legend = plain_step_lines({"compute": 0.6, "input": 0.3, "host": 0.1}, 76, 1.0)
    counts = [bar.count(sign) for sign in "█▓▒"]
    assert counts == sorted(counts, reverse=True) and sum(counts) == len(bar) - len(" Step time 1.00 s ")
    assert legend.split() == ["█", "compute", "60%", "▓", "input", "wait", "30%", "▒", "host", "10%"]
    assert plain_step_lines({}, 60) == []


def test_a_trace_of_the_host_alone_says_what_its_profiler_missed() -> None:
    def note(b: Builder) -> str:
        notes = analyze_trace(b.build()).trace.quality
        (message,) = (note.message for note in notes if note.id in ("no_gpu", "lost_kernels"))
        return message

    launching = Builder(gpus=0, format="chrome").host("aten::mm", 0, 100)
    for i in range(3):
        launching.host("cudaLaunchKernel", 10 * i, 5)
    assert "3 kernel launches" in note(launching) and "synchronize" not in note(launching)  # the profiler does so
    assert "ProfilerActivity" not in note(launching)  # it was on: the launches are its events
    assert "--trace=cuda,nvtx" in note(Builder(gpus=0, format="nsys").host("forward", 0, 100))
    traced = Builder(gpus=0, format="nsys").host("cudaLaunchKernel", 0, 5).host("cudaDeviceSynchronize", 10, 90)
    assert "1 kernel launch" in note(traced) and "--trace" not in note(traced)
    assert "--trace" not in note(Builder(gpus=0, format="nsys").host("cuInit", 0, 100))  # CUDA was traced
    assert note(Builder(gpus=0).host("aten::mm", 0, 100)).startswith("The trace has no GPU. All time")
    assert "but the job used one" in note(Builder(gpus=0).host("aten::cudnn_convolution", 0, 100))
    # What an LSTM asks on a CPU, too.
    assert "but the job used one" not in note(Builder(gpus=0).host("aten::cudnn_is_acceptable", 0, 100))
    apple = Builder(gpus=0).host("aten::linear_backward", 0, 100)
    assert "Apple GPUs" in note(apple) and analyze_trace(apple.build()).cpu_layers is None
    for b in (apple, launching):
        assert limit_of(analyze_trace(b.build())).startswith("NO VERDICT: the GPU work was not recorded\nDo: record a")
    assert "3 kernel launches" in limit_of(analyze_trace(launching.build()))


@pytest.mark.parametrize("recorded", ["ops", "memory"])
def test_what_a_gpu_that_was_not_recorded_waits_for_is_unknown(recorded: str) -> None:
    """Pauses and waits of the host cost no time while a GPU works, and whether it did is not known."""
    b = Builder(gpus=0, format="chrome")
    if recorded == "memory":
        b.memory(0, "rank 0: memory of GPU 0", 1 << 20, -1, 1 << 20)
    for i in range(30):
        at = i * 10_000
        b.host("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", at, 4_000)
        b.host("aten::cudnn_convolution" if recorded == "ops" else "aten::linear", at + 4_100, 2_000)
        b.host("autograd::engine::evaluate_function: AddmmBackward0", at + 6_200, 1_000)
        b.host("Optimizer.step#SGD.step", at + 7_300, 700, annotation=1)
    a = analyze_trace(b.build())
    assert not a.findings and a.breakdown is None
    assert limit_of(a).startswith("NO VERDICT: the GPU work was not recorded")
    assert not any("counts as host time" in note.message for note in a.trace.quality)


@pytest.mark.parametrize("executes", [True, False])
def test_time_in_which_an_executor_runs_ops_that_are_not_recorded_is_none_of_python(executes: bool) -> None:
    b = keras_steps(Builder(gpus=0), 30, 1000, 990)
    for i in range(30):
        b.host("net/a/MatMul:MatMul", 1000 * i, 700, line="tf_Compute/1")
        b.host("ExecutorState::Process", 1000 * i, 980 if executes else 710, line="tf_Compute/1")
    analysis = analyze_trace(b.build())
    assert ("no op of the model is running" in unexplained_text(analysis)) != executes
    assert ("runs no op of the model for 2" in limit_of(analysis)) != executes
    assert ("executor without an op 28%" in limit_of(analysis)) == executes


def test_no_cause_found_is_not_said_above_a_cause() -> None:
    b = Builder(format="nsys")
    for i in range(4):
        b.run(0, 1_000 + 100_000 * i, 90_000, kind=Kind.D2H, size=270_000_000, src=MemoryKind.DEVICE,
              dst=MemoryKind.PAGEABLE, launch=990 + 100_000 * i, launch_length=90_020, thread="gemm/17")
        b.run(0, 91_100 + 100_000 * i, 9_000, launch=91_050 + 100_000 * i, thread="gemm/17")
    analysis = analyze_trace(b.build())
    assert [f.id for f in analysis.findings] == ["copies_pageable"] and analysis.findings[0].severity == "low"
    assert limit_of(analysis).startswith("NO VERDICT: only 4 kernels in the")


def test_what_fills_less_than_half_is_named_with_its_share() -> None:
    b = Builder(gpus=0, format="nsys")
    for i in range(3):
        b.host("backbone", 1000 * i, 400).host("heads", 1000 * i + 400, 300).host("decode", 1000 * i + 700, 290)
    told = limit_of(analyze_trace(b.build()))
    assert "time without steps 100% (40% in backbone)" in told
    b = Builder(gpus=0, format="nsys").host("backbone", 0, 800).host("heads", 800, 200)
    assert "time without steps 100% (backbone)" in limit_of(analyze_trace(b.build()))


@pytest.mark.parametrize(("thread", "framework", "words"), [
    ("train_gpt2cu/17", "cudaMalloc", "host without events"), ("python3/17", "cudaMalloc", "Python without events"),
    ("train/17", "aten::empty", "Python without events")])
def test_nsight_records_programs_that_are_not_python(thread: str, framework: str, words: str) -> None:
    b = Builder(format="nsys").host(framework, 0, 5, line=thread)
    for i in range(4):
        at = 200_000 * i + 10
        b.run(0, at + 10, 30, launch=at, thread=thread)
    assert {part.id: host_words(part) for part in analyze_trace(b.build()).wall_time.parts}["no_steps"] == words


def test_a_loader_beside_a_repeated_sequence_of_ops_is_named() -> None:
    b = Builder(gpus=0, format="chrome").host("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 5_000)
    for i in range(12):
        for k in range(20):
            b.host(f"aten::op{k}", 6_000 + i * 1_000 + k * 50, 45)
    text = limit_of(analyze_trace(b.build()))
    assert "hardly waits" not in text and "(waiting for a batch)" in text


@pytest.mark.parametrize(("pause", "words"), [(3_000, "62% waiting for a batch"), (0, "waiting for a batch")])
def test_of_a_wait_that_is_not_all_the_share_is_given(pause: int, words: str) -> None:
    b = Builder(format="chrome").host("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 0, 5_000,
                                      "launch 0")
    for i in range(4):
        b.run(0, 5_020 + pause + 40 * i, 30, f"k{i}", launch=5_010 + pause + 10 * i, launch_length=5)
    assert {part.id: host_words(part) for part in analyze_trace(b.build()).wall_time.parts}["no_steps"] == words
