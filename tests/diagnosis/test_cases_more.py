"""Small inputs of kinds that were judged wrongly, against what an expert says of each (``truth.json`` beside them)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gputop.diagnosis.report import short_report, text_report
from tests.diagnosis.real_traces import DATA, analysis_of

FOLDER = DATA / "cases_more"
TRUTH: dict[str, dict[str, Any]] = (
    json.loads((FOLDER / "truth.json").read_text()) if (FOLDER / "truth.json").exists() else {})


_SHARES = ("share_ratio", "h2d_of_step_ratio")


@pytest.mark.skipif(not TRUTH, reason="the shared cases are not on this machine")
@pytest.mark.parametrize("name", TRUTH)
def test_the_case_is_judged_as_an_expert_does(name: str):
    truth, analysis = TRUTH[name], analysis_of(FOLDER / name)
    ids = [finding.id for finding in analysis.findings if finding.severity in ("high", "medium")]
    assert (ids[0] if ids else "") in truth["expected_first"]
    for rule, (least, most) in truth.get("share", {}).items():
        for finding in analysis.findings:
            if finding.id == rule:
                share = next(value for name, value in finding.evidence.items() if name in _SHARES)
                assert least <= share <= most
    assert not set(truth.get("forbidden_ids", ())) & set(ids)
    said = " ".join(f"{short_report(analysis, 1000)} {text_report(analysis, 1000)}".split())
    assert all(word in said for word in truth.get("need_words", ()))
    assert not [word for word in truth.get("forbidden_words", ()) if word in said]
