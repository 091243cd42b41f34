"""The live rule about sick hardware: each kind of fault, what outranks what, and when nothing is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from gputop.core.findings import Finding, Severity
from gputop.core.samples import LOST, NOT_RESPONDING, GpuInfo, GpuSample, XidEvent
from tests.advice.live.scene import START_S, Scene, abstained, after, get, ids, only, play, verdict
from tests.records import replace


def sick(state: str, since_s: float, until_s: float = 1e9, message: str = "the driver says so",
         xids: tuple[XidEvent, ...] = ()) -> Callable[[GpuSample, float], GpuSample]:
    def change(gpu: GpuSample, t: float) -> GpuSample:
        if gpu.info.index == 3 and since_s <= t < until_s:
            return GpuSample(gpu.info, {}, state=state, message=message, processes_reason="gone", xids=xids)
        return gpu

    return change


def test_a_lost_gpu_is_reported_at_once_and_the_rest_is_judged() -> None:
    _, advice = play(Scene({0: 0.0}, change=sick(LOST, 150)), 160)
    assert "hardware_error" not in ids(advice[149]) and "hardware_error" in ids(advice[150])
    finding = get(advice[-1], "hardware_error")
    assert (finding.severity, finding.gpus, finding.evidence["lost_count"]) == ("high", (3,), 1.0)
    assert "The driver says so" in finding.why
    assert get(advice[-1], "idle_gpu").gpus == (0,)


def test_a_short_silence_is_no_error_and_no_answer_at_all_is_one() -> None:
    _, advice = play(Scene(change=sick(NOT_RESPONDING, 50, 58)), 70)
    assert all("hardware_error" not in ids(a) for a in advice)
    _, advice = play(Scene(change=sick(NOT_RESPONDING, 50)), 70)
    shown = [i for i, a in enumerate(advice) if "hardware_error" in ids(a)]
    assert shown == list(range(59, 70))  # 10 s after the last answer, at 49
    assert get(advice[-1], "hardware_error").evidence["silent_s"] == 20.0
    assert "hardware_error" in ids(after(Scene(change=sick(NOT_RESPONDING, 0)), 30))


def test_each_state_has_its_own_fix() -> None:
    def change(gpu: GpuSample, t: float) -> GpuSample:
        states = {2: (LOST, "GPU 2 is lost: no answer. Reboot."), 3: (NOT_RESPONDING, "GPU 3 does not respond: ."),
                  4: (LOST, "GPU 4 needs a reset: no calls. Reset it.")}
        state, message = states.get(gpu.info.index, ("", ""))
        return GpuSample(gpu.info, {}, state=state, message=message, processes_reason="gone") if state else gpu

    faults = {fault.what: fault.gpus for fault in verdict(Scene(change=change), 30, "hardware_error").faults}
    assert faults == {"is lost": (2,), "is not responding": (3,), "is unusable until a reset": (4,)}


def with_xids(events: Mapping[int, tuple[tuple[float, int], ...]]) -> Scene:
    """GPUs that report (seconds of the scene, Xid)."""
    def change(gpu: GpuSample, t: float) -> GpuSample:
        here = events.get(gpu.info.index, ())
        return replace(gpu, xids=tuple(XidEvent(START_S + at_s, xid) for at_s, xid in here if at_s <= t))

    return Scene(change=change)


@pytest.mark.parametrize(("xid", "severity", "resets"), [
    (79, "high", False), (54, "high", False), (143, "high", False), (48, "high", True), (74, "high", True),
    (119, "high", True), (109, "high", True), (63, "medium", False), (92, "medium", False), (93, "medium", False),
    (13, "medium", False), (31, "medium", False), (43, "medium", False), (45, "low", False), (987, "medium", False)])
def test_the_severity_follows_what_the_number_means(xid: int, severity: Severity, resets: bool) -> None:
    finding = get(after(with_xids({3: ((5.0, xid),)}), 20), "hardware_error")
    assert (finding.severity, finding.gpus) == (severity, (3,))
    assert "GPU 3" in finding.title and f"Xid {xid}:" in finding.title
    assert ("--gpu-reset -i 3" in (finding.snippet or "")) == resets
    assert finding.evidence == {"xid": float(xid), "xid_count": 1.0, "xid_age_s": 14.0}


@pytest.mark.parametrize("state", [LOST, NOT_RESPONDING])
def test_a_gpu_that_is_gone_has_the_drivers_order_alone(state: str) -> None:
    finding = get(after(Scene(change=sick(state, 0)), 30), "hardware_error")
    assert finding.why == "The driver says so."
    assert "reset" not in finding.action and "reboot" not in finding.action
    assert finding.snippet == "sudo dmesg | grep -i xid"


def test_the_command_resets_the_gpus_of_the_title() -> None:
    """GPU 3 is lost, which outranks the faults of GPU 2: those are named, but not what is reset."""
    lost = sick(LOST, 0)

    def change(gpu: GpuSample, t: float) -> GpuSample:
        return replace(gpu, xids=(XidEvent(START_S, 95),)) if gpu.info.index == 2 else lost(gpu, t)

    finding = get(after(Scene(change=change), 20), "hardware_error")
    assert finding.title == "GPU 3 is lost" and "Also: GPU 2 reported Xid 95" in finding.why
    assert "--gpu-reset" not in (finding.snippet or "")


def test_an_unknown_number_points_to_the_catalog_and_an_old_one_is_forgotten() -> None:
    finding = get(after(with_xids({3: ((5.0, 987),)}), 20), "hardware_error")
    assert "docs.nvidia.com" in finding.action
    scene = with_xids({3: ((5.0, 79),)})  # an old Xid is forgotten
    _, advice = play(replace(scene, interval_s=10.0), 640)
    shown = [10.0 * i for i, a in enumerate(advice) if "hardware_error" in ids(a)]
    assert (shown[0], shown[-1]) == (10.0, 600.0)


def test_the_worst_comes_first_and_the_others_are_named() -> None:
    finding = get(after(with_xids({1: ((5.0, 31), (6.0, 31)), 2: ((6.0, 31), (7.0, 95))}), 20), "hardware_error")
    assert finding.severity == "high" and finding.gpus == (1, 2)
    assert finding.title.startswith("GPU 2 ") and "Xid 95:" in finding.title
    assert "GPUs 1-2" in finding.why and "Xid 31:" in finding.why and finding.evidence["xid"] == 95
    assert "--gpu-reset -i 2" in (finding.snippet or "") and "-i 1" not in (finding.snippet or "")
    # It cannot be reset, whatever else it reported before it went.
    finding = get(after(with_xids({3: ((5.0, 48), (6.0, 79)), 2: ((5.0, 48),)}), 20), "hardware_error")
    assert finding.title.startswith("GPU 3 reported Xid 79") and finding.action.startswith("Power-cycle the node")
    assert "reset" not in finding.action and "--gpu-reset" not in (finding.snippet or "")
    assert "Also: GPUs 2-3 reported Xid 48" in finding.why


def test_an_event_that_a_mig_instance_reports_too_counts_once() -> None:
    def scene(gpu: GpuSample, t: float) -> GpuSample:
        # GPUs 1 and 2 stand for an instance of GPU 0 and GPU 0 itself.
        info = GpuInfo(0, gpu.info.uuid, "H100", mig=0 if gpu.info.index == 1 else None)
        return replace(gpu, info=info, xids=(XidEvent(START_S, 43),)) if gpu.info.index in (1, 2) else gpu

    finding = get(after(Scene(change=scene), 20), "hardware_error")
    assert finding.evidence["xid_count"] == 1 and finding.gpus == (0,)


def memory(**values: float) -> Finding | None:
    return next((f for f in after(Scene(change=only(4, **values)), 10).findings if f.id == "hardware_error"), None)


@pytest.mark.parametrize(("values", "severity", "evidence"), [
    ({"ecc_uncorrected": 2}, "high", {"ecc_uncorrected_count": 2.0}),
    ({"row_remap_failed": 1}, "high", {"row_remap_failed_count": 1.0}),
    ({"row_remap_pending": 1}, "medium", {"row_remap_pending_count": 1.0})])
def test_memory_faults(values: dict[str, float], severity: Severity, evidence: dict[str, float]) -> None:
    finding = memory(**values)
    assert (finding.severity, finding.gpus, finding.evidence) == (severity, (4,), evidence)


def test_memory_that_is_healthy_is_no_finding_and_a_pending_row_waits_for_the_job() -> None:
    healthy = {"ecc_uncorrected": 0, "ecc_corrected": 12, "row_remap_failed": 0, "row_remap_pending": 0,
               "rows_remapped": 3, "ecc_uncorrected_lifetime": 1}
    assert memory(**healthy) is None
    assert "when the job is done" in memory(row_remap_pending=1).action  # a pending row says to wait for the job


def test_without_events_and_counters_the_rule_abstains() -> None:
    silent = Scene(change=lambda gpu, t: replace(gpu, xids_reason="not supported"))
    assert "not supported" in abstained(after(silent, 10))["hardware_error"]
    assert "hardware_error" not in abstained(after(Scene(), 10))


def test_that_a_lost_gpu_fell_off_the_bus_is_said_once() -> None:
    lost = sick(LOST, 100, message="the GPU fell off the bus (Xid 79). Drain the node.",
                xids=(XidEvent(START_S + 100, 79),))
    (finding,) = [f for f in after(Scene(change=lost), 120).findings if f.id == "hardware_error"]
    assert (finding.why, finding.action) == ("The GPU fell off the bus (Xid 79).", "Drain the node.")
