"""Dips found in histories whose course is known."""

from __future__ import annotations

import math

import pytest

from gputop.core.errors import EXIT_USAGE, GputopError
from gputop.core.metrics import GPU_METRICS
from gputop.core.samples import GpuInfo, GpuSample, HostSample, NodeSample, Reading
from gputop.session.auto_capture import Dip, DipRule, Trigger, parse_rule
from gputop.session.options import DEFAULT_RULE
from gputop.telemetry.history import History

START_S = 1_700_000_000.0


def node_sample(now_s: float, levels: tuple[float | None, ...], metric: str = "sm_active") -> NodeSample:
    unit = GPU_METRICS[metric].unit
    gpus = tuple(GpuSample(GpuInfo(i, f"GPU-{i}", "H100"), {} if v is None else {metric: Reading(v, unit)})
                 for i, v in enumerate(levels))
    return NodeSample(now_s, gpus, HostSample("node", {}))


@pytest.mark.parametrize(("text", "rule"), [
    (DEFAULT_RULE, (("sm_active", "gpu_util"), 5.0, 0.6, None)),
    (" SM <0.5 * median  for 10 s", (("sm_active", "gpu_util"), 10.0, 0.5, None)),
    ("tensor<10%", (("tensor_active",), 5.0, None, 0.1)),
    ("dram < 0.3 for 2.5s", (("dram_active",), 2.5, None, 0.3)),
    ("power<200W for 3s", (("power_w",), 3.0, None, 200.0)),
])
def test_rules(text, rule):
    parsed = parse_rule(text)
    assert (parsed.metrics, parsed.hold_s, parsed.factor, parsed.level) == rule


@pytest.mark.parametrize("text", ["", "sm", "sm>0.6", "sm<1.5*median", "sm<0*median", "sm<200W", "power<50%", "sm<30",
                                  "sm<0.6*median for 0s", "sm<0.6*median for 2h", "fan<0.5", "sm<0.6*mean"])
def test_what_is_no_rule_is_wrong_usage(text):
    with pytest.raises(GputopError, match="not a valid dip rule") as caught:
        parse_rule(text)
    assert caught.value.exit_code == EXIT_USAGE and DEFAULT_RULE in caught.value.fix


class Course:
    """A history that goes on second by second, and what the trigger says of it."""

    def __init__(self, rule: str = DEFAULT_RULE, metric: str = "sm_active") -> None:
        self.history, self.trigger, self.metric = History(), Trigger(parse_rule(rule)), metric
        self.now_s = START_S

    def go(self, seconds: int, *values: float | None) -> list[Dip]:
        """So many seconds at these levels, one for each GPU."""
        dips = []
        for _ in range(seconds):
            self.now_s += 1
            self.history.append(node_sample(self.now_s, values, self.metric))
            dip = self.trigger.check(self.history)
            dips += [dip] if dip else []
        return dips


def test_a_dip_is_reported_once_after_it_has_lasted():
    course = Course()
    assert course.go(120, 0.9, 0.9) == []
    assert course.go(5, 0.9, 0.3) == []
    (dip,) = course.go(60, 0.9, 0.3)
    assert dip.now_s - dip.began_s == 5.0 and dip.median == pytest.approx(0.9) and dip.value == pytest.approx(0.3)
    assert dip.uuid == course.history.uuids[1]
    assert dip.text("1") == "GPU 1: SM active 30% for 5 s, usually 90%"


def test_a_short_one_is_none_nor_is_a_gap_in_the_readings():
    course = Course()
    course.go(60, 0.9)
    for _ in range(10):
        assert course.go(4, 0.2) == [] and course.go(2, 0.9) == []
    for _ in range(10):
        assert course.go(3, 0.2) == [] and course.go(1, None) == []


def test_it_must_recover_before_the_next():
    course = Course()
    course.go(120, 0.9)
    assert len(course.go(20, 0.3)) == 1
    assert course.go(20, 0.6) == [] and course.go(20, 0.3) == [], "above the threshold of 0.54, not recovered"
    assert course.go(20, 0.9) == [] and len(course.go(20, 0.3)) == 1


def test_too_early_or_usually_idle_there_is_nothing_to_dip_from():
    course = Course()
    assert course.go(20, 0.9) == [] and course.go(9, 0.1) == []
    course = Course()
    assert course.go(300, 0.05) == [] and course.go(60, 0.0) == []


def test_the_end_of_a_job_is_a_dip_once_and_idle_is_its_usual_then():
    course = Course()
    course.go(120, 0.9)
    assert len(course.go(900, 0.0)) == 1


def test_a_level_needs_no_earlier_samples():
    course = Course("sm<30% for 3s")
    (dip,) = course.go(10, 0.1)
    assert dip.median is None and "usually" not in dip.text("0")
    course.go(5, 0.5)
    assert len(course.go(10, 0.1)) == 1


def test_the_coarse_figure_stands_in():
    course = Course(metric="gpu_util")
    course.go(60, 0.9)
    (dip,) = course.go(10, 0.2)
    assert dip.metric == "gpu_util"


def test_power():
    course = Course("power<0.5*median", metric="power_w")
    course.go(60, 600.0)
    (dip,) = course.go(10, 150.0)
    assert dip.text("0") == "GPU 0: Power 150 W for 5 s, usually 600 W"


def test_a_clock_set_back():
    course = Course()
    course.go(120, 0.9)
    course.go(3, 0.2)
    course.now_s -= 600
    course.go(60, 0.9)
    assert len(course.go(10, 0.2)) == 1


def test_fast_sampling_counts_seconds_not_samples():
    history, trigger = History(), Trigger(DipRule("r", ("sm_active",), 5.0, factor=0.6))
    now_s, dips = START_S, []
    for i in range(1400):
        now_s += 0.1
        history.append(node_sample(now_s, (0.9 if i < 600 else 0.2,)))
        dips.append(trigger.check(history))
    at = [i for i, dip in enumerate(dips) if dip]
    assert len(at) == 1 and math.isclose(at[0], 650, abs_tol=1)
