"""What the panel says where nothing is wrong."""

from __future__ import annotations

from gputop.core.samples import GpuSample
from tests.advice.live.scene import START_S, Job, Scene, after, ids, only
from tests.records import replace


def test_what_bounds_a_healthy_job() -> None:
    advice = after(Scene(dict.fromkeys(range(8), 0.92), other={"tensor_active": 0.61, "power_w": 540.0}), 200)
    assert ids(advice) == []
    assert advice.limit == ("No problem found so far. GPUs 0-7 are compute bound (SM 92%, tensor 61%, DRAM 32%, "
                            "power 77% of the limit).")
    scene = Scene({0: 0.95, 1: 0.8}, gpus=2, jobs=[Job(gpus=(0, 1))])  # GPUs that differ are shown as a span
    assert after(scene, 200).limit.startswith("No problem found so far. GPUs 0-1 are busy (SM 80-95%")
    def limit_text(**other: float) -> str:
        return after(Scene(dict.fromkeys(range(8), 0.9), other=other), 200).limit

    assert "slowed down by the power limit" in limit_text(power_w=699.0, sm_clock_hz=1.6e9)
    one = after(Scene(dict.fromkeys(range(8), 0.9), change=only(3, power_w=699.0, sm_clock_hz=1.1e9)), 200)
    assert one.limit == ("No other problem found so far. GPUs 0-7 are compute bound (SM 90%, tensor 41%, DRAM 32%, "
                         "power 57-100% of the limit, SM clock 56-100% of the maximum).")
    assert "limited by memory bandwidth" in limit_text(dram_active=0.7, tensor_active=0.2)
    assert "are busy (SM 90%" in limit_text(tensor_active=0.2)
    assert "are partly busy and not at any limit (SM 70%" in after(Scene(dict.fromkeys(range(8), 0.7)), 200).limit


def test_no_problem_is_said_only_with_evidence_and_where_no_time_is_lost() -> None:
    assert after(Scene(fine=False), 200).limit == "", "a finding says so"
    assert after(Scene(), 3).limit == "No findings yet: gputop has 2 s of samples, and the rules need 30 s to 7 min."
    assert after(Scene(), 20).limit.startswith("No findings yet: gputop has 19 s of samples")
    young = after(Scene(jobs=[Job(started_s=START_S)]), 60).limit
    assert young == "No findings yet: gputop has seen the job for less than 120 s."
    silent = after(Scene(other={"sm_active": None, "gpu_util": None}), 200).limit
    assert silent.startswith("Not checked: the activity of GPUs 0-7 is unknown (")

    def late(gpu: GpuSample, t: float) -> GpuSample:
        return replace(gpu, readings={}) if gpu.info.index == 3 and t >= 199 else gpu

    assert after(Scene(change=late), 200).limit == "Not checked: GPU 3: no values."
    assert after(Scene(dict.fromkeys(range(8), 0.3)), 200).limit == ""  # nothing is said where time is lost
    assert after(Scene({0: 0.95} | dict.fromkeys(range(1, 8), 0.3)), 200).limit == ""
    without_power = after(Scene(other={"power_w": None, "tensor_active": None}), 200).limit
    assert without_power == "No problem found so far. GPUs 0-7 are busy (SM 90%, DRAM 32%)."


def test_a_job_that_works_much_less_than_before_is_not_called_well() -> None:
    """A hang cannot be told from a pause in its first minutes; what is seen is said, and from when on."""
    stops = Scene(dict.fromkeys(range(8), lambda t: 0.9 if t < 260 else 0.18))
    assert after(stops, 300).limit == (
        "SM activity of GPUs 0-7 fell from 90% to 18% 40 s ago. This may be an evaluation or a checkpoint. After "
        "120 s, gputop checks for a hang.")
    idles = Scene(dict.fromkeys(range(8), lambda t: 0.9 if t < 260 else 0.0))
    assert "fell from 90% to 0% 40 s ago" in after(idles, 300).limit
    for begin, end in ((292, 300), (220, 260)):  # a short pause and one that is over are ordinary
        scene = Scene(dict.fromkeys(range(8), lambda t, begin=begin, end=end: 0.1 if begin <= t < end else 0.9))
        assert "fell" not in after(scene, 300).limit
    assert "fell" not in after(Scene(dict.fromkeys(range(8), lambda t: 0.9 if int(t / 10) % 2 else 0.3)), 300).limit
