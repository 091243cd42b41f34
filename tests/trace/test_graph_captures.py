from __future__ import annotations

from gputop.analysis.steps.steps import detect_steps
from gputop.diagnosis.diagnose import analyze_trace
from gputop.diagnosis.report import short_report
from gputop.trace.complete_part import up_to_last_gpu_event
from tests.trace.build import Builder


def recording(begin: float, launches: int, *, b: Builder, ends: bool = True) -> float:
    """Record a graph of so many kernels from then on; when it is made."""
    b.host("cudaStreamBeginCapture_v10000", begin, 10, "launch 0")
    for i in range(launches):
        b.host("cudaLaunchKernel", begin + 50 * (i + 1), 8, "launch 0")
    end = begin + 50 * (launches + 1)
    if ends:
        b.host("cudaStreamEndCapture", end, 100, "launch 0").host("cudaGraphInstantiate", end + 110, 900, "launch 0")
    return end + 1010


def test_what_a_graph_records_is_not_missing_and_is_a_start():
    b = Builder(format="chrome").run(0, 120, 50, launch=100)
    end = recording(500, 400, b=b)
    trace = b.host("ProfilerStep#3", 50, end, "launch 0").build()
    assert up_to_last_gpu_event(trace) is trace
    analysis = analyze_trace(trace)
    assert analysis.steps is not None and analysis.steps.start_up.startswith("recording of CUDA graphs (2")
    report = short_report(analysis)
    assert not analysis.findings and "cut off" not in report and "are only job startup" in report


def test_launches_after_a_recording_that_have_no_event_are_missing():
    b = Builder(format="chrome").run(0, 120, 50, launch=100)
    end = recording(500, 100, b=b)
    for i in range(200):
        b.host("cudaLaunchKernel", end + 50 * i, 8, "launch 0")
    trace = up_to_last_gpu_event(b.build())
    assert [note.id for note in trace.quality] == ["clipped"] and "launches 200 more times" in trace.quality[0].message


def test_a_capture_that_began_before_the_recording():
    b = Builder(format="chrome").run(0, 20, 50, launch=0, thread="other")
    for i in range(400):
        b.host("cudaLaunchKernel", 100 + 50 * i, 8, "launch 0")
    trace = b.host("cudaStreamEndCapture", 21_000, 100, "launch 0").build()
    assert up_to_last_gpu_event(trace) is trace


def test_launches_of_another_thread_meanwhile_are_none_of_the_graphs():
    b = Builder(format="chrome").run(0, 120, 50, launch=100)
    recording(500, 400, b=b)
    for i in range(100):
        b.host("cudaLaunchKernel", 600 + 100 * i, 8, "other thread")
    assert "launches 100 more times" in up_to_last_gpu_event(b.build()).quality[0].message


def test_a_graph_recorded_anew_in_each_step_is_no_start():
    b, at = Builder(format="chrome"), 100.0
    for step in range(12):
        begin = at
        at = recording(at + 20, 30, b=b)
        b.host("cudaGraphLaunch", at, 20, "launch 0")
        for i in range(30):
            b.run(0, at + 30 + 12 * i, 10, launch=at, launch_length=20)
        at += 500
        b.host(f"ProfilerStep#{step}", begin, at - begin, "launch 0")
    trace, steps = detect_steps(b.build())
    assert steps is not None and steps.count >= 10 and not steps.times.start_up
    assert analyze_trace(trace).findings[0].id == "graph_recapture"
