from __future__ import annotations

from pathlib import Path

import pytest

from gputop.profiler.capture.records import CaptureRecord, Server
from gputop.telemetry.step_period import TOO_FAST, StepPeriodEstimate
from gputop.tui.monitor.status_lines import JobState, host, job, replay_line
from gputop.tui.screens.details import _period
from tests.analyses import make_analysis
from tests.fakes import cgroup_sample, node_sample
from tests.records import replace
from tests.tui.found import line_text

SERVER = Server("127.0.0.1:6009", "python train.py --batch 256", 41231)
FOUND = StepPeriodEstimate(2.4, 0.91, None, "sm_active", tuple(range(8)), 8, 0.5, 1.25, 60.0)


def _job(step_period: StepPeriodEstimate | None = None, step_s: float | None = None, width: int = 160,
         **state: object) -> str:
    record = None if step_s is None else CaptureRecord(
        SERVER.address, Path("t"), 100.0, 10.0, 10.0, analysis=make_analysis(
            steps={"median_s": step_s, "mean_s": step_s}))
    return line_text(job(JobState((SERVER,), True, record=record, step_period=step_period, **state), 112.0, width))


def test_the_auto_capture_stands_before_the_command() -> None:
    line = _job(auto_capture="auto-capture 0/20: sm<0.6*median for 5s")
    assert line.index("127.0.0.1:6009") < line.index("auto-capture 0/20: sm<0.6") < line.index("train.py")
    assert "\x1b" not in _job(auto_capture="auto-capture: \x1b[31m"), "its note may hold what a server said"
    assert len(_job(width=80, auto_capture="auto-capture: " + "x" * 200)) <= 80
    assert "auto-capture" not in _job()


def test_the_hosts_line_warns_of_a_quota_that_throttles_and_memory_near_its_limit() -> None:
    sample = node_sample(1)
    (process,) = sample.processes

    def line(**values: float | None) -> str:
        ranks = tuple(replace(process, pid=pid, cgroup=cgroup_sample(**values)) for pid in (1, 2))
        return line_text(host(replace(sample, processes=ranks), 200))

    plain = line(cpu_throttled_ratio=0.2, memory_used_bytes=0.8e9, memory_limit_bytes=1e9)
    assert plain == line_text(host(sample, 200))
    strained = line(cpu_throttled_ratio=0.3, memory_used_bytes=0.95e9, memory_limit_bytes=1e9)
    assert strained.count("CPU quota: throttled 30%") == 1 and strained.count("memory limit: 906M/954M") == 1


PARTLY = StepPeriodEstimate(2.4, 0.91, None, "sm_active", (0, 1), 8, 0.5, 1.25, 60.0)


@pytest.mark.parametrize(("step_period", "step_s", "expected"), [
    (FOUND, None, "period 2.40 s  "),
    (FOUND, 2.41, "period 2.40 s ≈ 1 step "),
    (FOUND, 1.2, "period 2.40 s ≈ 2 steps "),
    (FOUND, 1.6, "period 2.40 s  captured"),
    (PARTLY, None, "period 2.40 s on 2 of 8 GPUs"),
])
def test_the_step_period(step_period: StepPeriodEstimate, step_s: float | None, expected: str) -> None:
    assert expected in _job(step_period, step_s)


@pytest.mark.parametrize(("step_period", "step_s"), [
    (None, None), (StepPeriodEstimate(None, reason=TOO_FAST, interval_s=1.0, shortest_s=2.5, longest_s=60.0), None),
    (FOUND, 0.6), (replace(FOUND, confidence=0.45), None),
])
def test_only_a_step_period_that_is_sure_is_shown(step_period: StepPeriodEstimate | None, step_s: float | None) -> None:
    assert "period" not in _job(step_period, step_s)


def test_the_step_period_of_a_job_that_has_just_been_started_again_is_not_that_of_the_one_before() -> None:
    assert "period" not in _job(FOUND, restarted_s=108.0) and "period 2.40 s" in _job(FOUND, restarted_s=107.0)


def test_the_details_of_the_job_say_why_there_is_no_period() -> None:
    fast = StepPeriodEstimate(None, reason=TOO_FAST, interval_s=1.0, shortest_s=2.5, longest_s=60.0)
    assert _period(fast, None) == f"not visible in the GPUs' load: {TOO_FAST}"
    assert _period(fast, 0.412).endswith("seen with a sample every 1 s: press +, or start gputop with --interval 0.1")
    assert _period(FOUND, 2.4) == "2.40 s, estimated from the GPUs' load, confidence 0.9"
    assert "too short to be seen with a sample every 0.5 s" in _period(FOUND, 0.6)


def test_the_period_gives_way_on_a_narrow_line_but_the_captured_step_stays() -> None:
    wide, narrow, slim = (_job(FOUND, 1.2, width) for width in (120, 80, 60))
    assert "≈ 2 steps" in wide and "period 2.40 s" in narrow and "period" not in slim
    assert all("step time 1.20 s" in line and "127.0.0.1" in line for line in (wide, narrow, slim))
    assert all(len(line) <= width for line, width in ((wide, 120), (narrow, 80), (slim, 60)))


def test_a_replay_shows_the_period_of_the_recording() -> None:
    assert "period 2.40 s" in line_text(replay_line(160, (200.0, 400.0), FOUND))
    assert "earlier minutes" in line_text(replay_line(160))


@pytest.mark.parametrize("width", [40, 80, 160])
def test_a_replay_shows_how_far_it_is(width: int) -> None:
    def shown(played_s: float, length_s: float) -> str:
        text = line_text(replay_line(width, (played_s, length_s)))
        assert len(text) == width - 1
        return text

    half = shown(100.0, 200.0)
    assert half.startswith(" Recording  1:40 of 3:20  █")
    assert abs(2 * half.count("█") - shown(200.0, 200.0).count("█")) <= 1
    assert shown(3800.0, 7384.0).startswith(" Recording  1:03:20 of 2:03:04")
    assert "0:00 of 0:00" in shown(0.0, 0.0), "of a single sample"
