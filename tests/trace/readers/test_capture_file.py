"""What gputop leaves beside a trace: read back as it was, and nothing that cannot be."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from gputop.core.captured_samples import CounterLane, GpuCounters, JobCpus, LiveSteps, joined
from gputop.core.codec import convert
from gputop.core.findings import Finding
from gputop.diagnosis.diagnose import analyze
from gputop.trace.readers.capture_file import FILE, CaptureFile, capture_of, read_capture, tightest, write_capture
from gputop.trace.readers.load import load
from tests.comparison.sides import finding
from tests.trace.readers.xspace.reference import Builder

CPUS = JobCpus(8.0, None, 1.5, 2.0)
LIVE = LiveSteps((0.2, 0.21), 0.9, 60.0, 0.05)
TRACE = Path(__file__).resolve().parents[2] / "data" / "keras3_slow_input.xplane.pb.gz"


def test_it_is_read_back_for_the_traces_of_that_capture_alone(tmp_path: Path) -> None:
    said = (convert(finding("input_bound", 0.4), Finding),)
    write_capture(tmp_path, CaptureFile(files={"a.xplane.pb": CPUS, "b.xplane.pb": None}, findings=said))
    found = capture_of([str(tmp_path / "a.xplane.pb"), str(tmp_path / "b.xplane.pb.gz")])
    assert found.findings == said and found.files == {"a.xplane.pb": CPUS, "b.xplane.pb": None}
    for other in (["a.xplane.pb"], ["a.xplane.pb", "c.xplane.pb"], ["x/a.xplane.pb", "b.xplane.pb"], []):
        assert capture_of([str(tmp_path / name) for name in other]) == CaptureFile()


@pytest.mark.parametrize("text", [
    "", "{", "[]", '{"schema": "gputop.capture/2", "files": {"a": null}}', '{"files": {"a": {"allowed": 0}}}',
    '{"files": {"a": {"allowed": -3}}}', '{"files": {"a": {"allowed": 4, "used": 1e9}}}', '{"files": {"a": 3}}',
    '{"counters": {"times_s": [2, 1]}}', '{"counters": {"times_s": [1, null]}}', '{"counters": {"interval_s": 0}}',
    '{"counters": {"times_s": [5e9]}}',
    '{"counters": {"times_s": [1, 2], "gpus": {"0": {"power_w": {"values": [3]}}}}}',
    '{"counters": {"times_s": [1], "gpus": {"0": {"power_w": {"values": [3], "full_scale": 0}}}}}',
    '{"schema": "gputop.capture/1", "files": {"a": null}, "live_steps": '
    '{"period_s": [0.2, 0], "confidence": 0.9, "stretch_s": 60, "interval_s": 1}}',
    '{"files": {"a": {"allowed": 4}}, "findings": [{"id": "x"}]}', '{"files": {"a": {"allowed": NaN}}}',
])
def test_a_damaged_one_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    assert read_capture(tmp_path) == CaptureFile()


def test_the_analysis_of_a_captured_trace_tells_its_cpus(tmp_path: Path) -> None:
    folder = tmp_path / "plugins" / "profile" / "run"
    folder.mkdir(parents=True)
    shutil.copy(TRACE, folder / "vm.xplane.pb.gz")
    assert analyze(folder).trace.job_cpus is None
    write_capture(folder, CaptureFile(files={"vm.xplane.pb": CPUS}, live_steps=LIVE))
    for path in (tmp_path, folder, folder / "vm.xplane.pb.gz"):
        found = analyze(path)
        assert found.trace.job_cpus == CPUS and found.trace.live_steps == LIVE
    assert json.loads(json.dumps(found.to_json()))["trace"]["job_cpus"] == {
        "allowed": 8.0, "quota": None, "used": 1.5, "others": 2.0, "children": None, "ranks": None, "gputop": None,
            "busiest": [], "held_up": None, "waited": None, "age_s": None,
            "threads": None, "cores": None, "main": None, "asleep": None, "children_waited": None}


@pytest.mark.parametrize(("recorded_s", "window_s"), [(None, 1.0), (0.4, 0.4), (5.0, 1.0)])
def test_what_the_profiler_takes_to_stop_is_not_recorded(tmp_path: Path, recorded_s: float | None,
                                                         window_s: float) -> None:
    worker(tmp_path, "vm", 1)
    write_capture(tmp_path, CaptureFile(files={"vm.xplane.pb": None}, recorded_s=recorded_s))
    trace = load([tmp_path / "vm.xplane.pb"])
    begin, end = trace.rank_windows_ns[0]
    assert end - begin == window_s * 1e9 and trace.profile_window_ns == (begin, end)


def test_of_several_workers_the_one_with_the_fewest_cpus_counts() -> None:
    assert tightest({"a": CPUS, "b": JobCpus(8.0, 1.0), "c": None}) == JobCpus(8.0, 1.0)
    assert tightest({"a": None}) is None is tightest({})


def worker(folder: Path, name: str, gpus: int) -> None:
    b = Builder(name)
    for gpu in range(gpus):
        plane = f"/device:GPU:{gpu}"
        b.event(plane, b.line(plane, "Stream #1(Kernel)"), "gemm", 1_000, 500)
    (folder / f"{name}.xplane.pb").write_bytes(b.bytes())


def test_the_samples_of_several_workers_go_to_their_own_gpus(tmp_path: Path) -> None:
    def sampled(*powers: float, times: tuple[float, ...] = (1.0, 2.0)) -> GpuCounters:
        return GpuCounters(times, 1.0, {i: {"power_w": CounterLane((power,) * len(times))}
                                        for i, power in enumerate(powers)})

    for name, gpus in (("a", 2), ("b", 1), ("c", 1), ("d", 1)):
        worker(tmp_path, name, gpus)
    names = [f"{name}.xplane.pb" for name in "abcd"]
    write_capture(tmp_path, CaptureFile(files=dict.fromkeys(names), counters_by_file={
        names[0]: sampled(1, 2), names[1]: sampled(3), names[2]: GpuCounters(reason="node2:1 is on another machine"),
        names[3]: sampled(9, times=(5.0,))}))
    trace = load([tmp_path / name for name in names])
    assert [(gpu.rank, gpu.ordinal) for gpu in trace.gpus] == [(0, 0), (0, 1), (1, 0), (2, 0), (3, 0)]
    assert {gpu: own["power_w"].values[0] for gpu, own in trace.counters.gpus.items()} == {0: 1, 1: 2, 2: 3}
    assert trace.counters.reason == "c: node2:1 is on another machine; d: sampled at other times than the others"


def test_of_many_joined_samples_each_nth_is_kept() -> None:
    lanes = {f"m{i}": CounterLane((1.0,) * 1_000) for i in range(20)}
    of_one = GpuCounters(tuple(map(float, range(1_000))), 1.0, {0: lanes})
    found = joined(dict.fromkeys(range(8), (of_one, "x")), {i: (i, 0) for i in range(8)})
    assert found is not None and found.interval_s == 4 and len(found.gpus) == 8
    assert len(found.times_s) == 250 and not found.reason
