"""The figures of real traces, against those measured on them independently (``shared/data/README.md``)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gputop.diagnosis.report import text_report
from tests.diagnosis.real_traces import DATA, FILES, analysis_of, analyzed, needs_data

OWN = Path(__file__).resolve().parents[1] / "data"

POINT = 0.002  # 0.2 percentage points
ROUND = 0.0006  # the table is rounded to 0.1


def found(name: str) -> dict[str, str]:
    return {f.id: f.severity for f in analyzed(name).findings}


# GPU: window ms, busy, compute, collectives, exposed (None: not in the table), copies, host's fault, launch delay s
TABLE = [
    *(("dlrm", gpu, *row) for gpu, row in enumerate(zip(
        (13.0, 18.7, 11.4, 18.9, 16.6, 16.4, 11.4, 11.0), (50.7, 65.7, 37.9, 56.8, 46.4, 44.4, 38.2, 24.2),
        (7.9, 6.6, 9.4, 6.6, 6.8, 6.4, 9.2, 9.7), (44.6, 60.5, 30.8, 51.8, 39.7, 38.1, 31.2, 15.9),
        [None] * 8, [0.15] * 8, [98] * 8, [2.0e-6] * 8, strict=True))),
    ("a100", 0, 660.6, 23.8, 17.5, 7.1, 6.0, 0.4, 100, 1.8e-6),
    ("v100", 0, 480.0, 98.4, 97.5, 0, 0, 0.9, 17, 76.4e-3),
    ("h100", 0, 969, 99.3, 2.3, 0, 0, 97.0, None, 421e-3),
    ("h100", 1, 969, 99.3, 2.3, 0, 0, 97.0, None, 421e-3),
    ("mfu", 0, 300, 91.3, 84.6, 5.7, None, 1.0, 82, None),
    ("mfu", 1, 299, 89.5, 85.7, 2.8, None, 1.0, None, 219e-6),
]


@needs_data
@pytest.mark.parametrize("row", TABLE, ids=[f"{row[0]}-gpu{row[1]}" for row in TABLE])
def test_time_of_each_gpu(row):
    name, gpu, window_ms, busy, compute, collectives, exposed, copies, fault, delay = row
    use = analyzed(name).gpus[gpu]
    assert use.gpu == gpu
    assert use.window_s * 1e3 == pytest.approx(window_ms, abs=0.6)
    assert use.busy == pytest.approx(busy / 100, abs=POINT + ROUND)
    assert use.compute == pytest.approx(compute / 100, abs=POINT + ROUND)
    assert use.collectives == pytest.approx(collectives / 100, abs=POINT + ROUND)
    assert use.copies == pytest.approx(copies / 100, abs=POINT)
    if exposed is not None:
        assert use.collectives_exposed == pytest.approx(exposed / 100, abs=POINT)
    if fault is not None:
        assert use.idle_host_fault == pytest.approx(fault / 100, abs=0.015)
    if delay is not None:
        assert use.launch_delay_median_s == pytest.approx(delay, rel=0.06)


@needs_data
def test_time_in_collectives_and_that_dlrm_waits_for_gpu_7():
    hta = (49.34, 34.28, 62.08, 43.20, 53.57, 55.64, 61.80, 75.75)  # idle
    assert [1 - use.busy for use in analyzed("dlrm").gpus] == pytest.approx([x / 100 for x in hta], abs=POINT)
    c = analyzed("dlrm").collectives
    assert c is not None and c.summed_s == pytest.approx(48.54e-3, rel=1e-3)
    assert c.transfer_s == pytest.approx(1.74e-3, rel=5e-3) and c.waiting == pytest.approx(0.964, abs=5e-4)
    assert c.last_to_arrive == {7: 5, 5: 2, 4: 1} and c.count_per_step == 8
    main = next(f for f in analyzed("dlrm").findings if f.id == "collective_waiting")
    assert main.gpus == (7,) and main.evidence["last_to_arrive_count"] == 5
    # The transfer is short: the network is not to blame.
    assert not {"communication_exposed", "allreduce_slow", "allreduce_count"} & {i for f in analyzed("dlrm").findings
                                                                                 for i in f.ids}
    c = analyzed("mfu").collectives
    assert c is not None and (c.summed_s, c.transfer_s) == pytest.approx((25.40e-3, 11.55e-3), rel=1e-3)


@needs_data
def test_h100_copies_are_pinned_at_link_rate():
    use = analyzed("h100").gpus[0]
    size = use.copies_bytes["h2d"]
    assert size == pytest.approx(25.5e9, rel=2e-3)
    assert size / use.copies_s["h2d"] == pytest.approx(27.7e9, rel=2e-3)
    assert use.copies_pageable_s is not None and use.copies_pageable_s / use.copies_s["h2d"] < 1e-3
    assert use.tensor_core_time == 0
    finding = analyzed("h100").findings[0]
    assert (finding.id, finding.severity) == ("copies_excessive", "high")
    assert "pageable" not in finding.action and "already pinned" in finding.why
    assert "CPU offload" in finding.action  # by FSDP, before each layer runs


@needs_data
def test_steps_of_the_kineto_traces():
    a100, v100 = analyzed("a100").steps, analyzed("v100").steps
    assert a100 is not None and a100.count == 3 and a100.median_s == pytest.approx(0.2225, rel=1e-3)
    # The first of five filled the launch queue (35 ms against 96).
    assert v100 is not None and (v100.count, v100.dropped) == (4, 1)
    assert v100.median_s == pytest.approx(95.6e-3, rel=2e-3)


@needs_data
@pytest.mark.parametrize(("name", "findings"), [
    # The hosts' launches pace the jobs: without its waits, or with its communication hidden, a step is as long.
    # There is one whole step, so nothing is high.
    ("dlrm", {"collective_waiting": "medium", "launch_bound": "medium"}),
    ("a100", {"launch_bound": "high"}),
    ("v100", {"tensor_cores_unused": "high"}),
    # Pinned copies and kernels are on one stream per GPU, which is said with the parameters that they bring.
    ("h100", {"copies_excessive": "high", "tensor_cores_unused": "low"}),
    # GPU 1's host is late by 4%; launched earlier it saves less than 1% by replay: the copies make it wait.
    ("mfu", {"elementwise_unfused": "medium", "sync_copies": "medium"}),
    ("amd_attention", {}),
])
def test_findings(name, findings):
    assert found(name) == findings


@needs_data
@pytest.mark.parametrize("name", ["amd_8gpu", "amd_legacy", "amd_attention"])
def test_native_xspaces_with_idle_planes(name):
    a = analyzed(name)
    assert [use.gpu for use in a.gpus] == list(range(8)) and a.collectives is None
    assert all(not use.kernels or use.busy > 0 for use in a.gpus)
    assert a.memory and all(0 < m.peak_bytes <= m.capacity_bytes for m in a.memory)
    assert not found(name).keys() & {"replica_imbalance", "gpu0_oversubscribed", "copies_excessive", "input_bound"}


@needs_data
def test_nothing_wrong_says_what_the_limit_is():
    text = text_report(analyzed("amd_attention"))
    words = " ".join(text.split())
    assert "bound by compute" in words and "91% of the step" in words
    # Four steps in 9.7 s, the rest of which is the profiler's own begin: nothing that is said of a job.
    assert "NO VERDICT 4 steps seen, 20 needed" in words and "0% of the 9.73 s recorded" in words
    assert "NO PROBLEM" not in words and "The profiler starts or stops recording" in words


@needs_data
def test_precision_is_all_there_is_to_say_of_the_healthy_trace():
    (finding,) = analyzed("v100").findings
    assert "GradScaler" in (finding.snippet or "") and "keras" not in (finding.snippet or "")
    # Two thirds of the 57% that these kernels take: the host waits for room in its queue until the recording ends.
    assert finding.gain.by == "replay" and finding.gain.step_time == pytest.approx(0.378, abs=0.01)


@pytest.mark.parametrize("name", [*(pytest.param(name, marks=needs_data) for name in FILES), *(
    OWN / f"{name}.xplane.pb.gz" for name in ("jax_cpu", "keras2_tf215", "keras3_fast", "keras3_host_work",
                                              "keras3_validation", "tf_retracing"))])
def test_documents_are_plain_json_and_reports_fit(name):
    a = analyzed(name) if name in FILES else analysis_of(name)
    json.dumps(a.to_json(), allow_nan=False)
    if a.breakdown is not None and a.steps is not None:
        assert a.breakdown.total == pytest.approx(a.steps.mean_s)
    paths = ("Trace ", "       ")
    assert max(len(line) for line in text_report(a, 80).splitlines() if not line.startswith(paths)) <= 80


@pytest.mark.parametrize("name", ["keras2_tf215", "keras3_fast", "keras3_slow_input"])
def test_tensorflow_captures_against_what_the_job_logged(name):
    logged = json.loads((OWN / "steps.json").read_text())[name]
    a = analysis_of(OWN / f"{name}.xplane.pb.gz")
    assert a.steps is not None and a.steps.confidence == "high"
    assert a.steps.median_s == pytest.approx(logged["median_step_s"], rel=0.1)
    assert ("input_bound" in {f.id for f in a.findings}) == (name == "keras3_slow_input")
    if name == "keras3_slow_input":
        assert a.input is not None and next(iter(a.input.stages)) == "Map"
        assert a.findings[0].action.startswith("Prefetch")  # a batch takes less than the rest of the step


@needs_data
def test_mfu_waits_for_an_8_byte_copy_in_each_layer():
    """Computed independently, by replaying SQLite's rows one by one without the 33 stream synchronizations: 21.0 and
    28.7 ms of 300 are saved on the two GPUs, 31.6 and 28.7 with what they wait for each other."""
    f = next(f for f in analyzed("mfu").findings if f.id == "sync_copies")
    total_s = f.evidence["idle_after_copies_s"] * analyzed("mfu").steps.count
    assert total_s == pytest.approx((0.0210 + 0.0275) / 2, rel=0.1)
    assert f.evidence["mean_bytes"] == 8 and "send small values" in f.action
    assert {c.id for c in f.consequences} == {"launch_bound", "collective_waiting"}
    assert "reduce-overhead" not in next(c.snippet for c in f.consequences if c.id == "launch_bound")


@needs_data
@pytest.mark.parametrize("file", sorted(DATA.glob("xplane_nvidia/*.*[bz]")), ids=lambda f: f.name)
def test_native_traces_whose_fetched_losses_nothing_waits_for(file):
    found = {id_ for f in analysis_of(file).findings for id_ in f.ids}
    assert "sync_copies" not in found
    # Text is split in the model of one; the generator's PyFunc of others is the input pipeline itself.
    assert ("host_placement" in found) == file.name.startswith("mirrored_4v100_text")
    assert ("eager_execution" in found) == file.name.startswith("autoencoder_eager")
