"""Promises of findings held against what their fixes brought, by the jobs' own clocks, on one H200."""

from __future__ import annotations

from pathlib import Path

import pytest

from gputop.core.findings import Finding
from gputop.diagnosis.diagnose import analyze

DATA = Path(__file__).parents[1] / "data"


def found(job: str) -> dict[str, Finding]:
    return {f.id: f for f in analyze(DATA / f"pytorch_h200_{job}.pt.trace.json.gz").findings}


def test_pageable_copies_lead_and_save_what_pinned_ones_on_a_stream_of_their_own_brought() -> None:
    """51.10 ms became 9.45: 81.5%. The call of each copy returns 4 µs before the copy ends, by the clocks."""
    findings = found("pageable")
    f = findings["copies_pageable"]
    assert next(iter(findings)) == f.id and f.severity == "high"
    assert f.gain.step_time == pytest.approx(0.81, abs=0.02) and f.gain.by == "replay"


def test_values_read_one_by_one_lead_and_launches_follow_from_them() -> None:
    """11.18 ms became 1.76 with the metric on the GPU: 84%."""
    (f,) = (f for f in found("metrics").values() if f.severity == "high")
    assert f.id == "sync_copies" and "512 values" in f.title and ".item()" in f.why
    assert "compile" not in f.action and "launch_bound" in f.ids
    assert 0.65 < (f.gain.step_time or 0.0) <= 0.84 and f.gain.at_least


def test_attention_of_kernels_launched_before_the_recording_counts() -> None:
    """52.34 ms became 12.95 with scaled_dot_product_attention: 75%. Four layers have four passes and four back."""
    f = found("attention")["attention_unfused"]
    assert f.evidence["attentions_count"] == 8
    assert 0.6 < (f.gain.step_time or 0.0) <= 0.75 and f.gain.at_least
