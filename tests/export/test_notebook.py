"""What a notebook shows of ``gputop.analyze(...)``."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import msgspec
import pytest

import gputop
from tests.analyses import make_analysis
from tests.export.test_pictures import _Page

TRACE = Path(__file__).parents[1] / "data" / "keras3_slow_input.xplane.pb.gz"


@pytest.mark.parametrize("real", [True, False])
def test_a_notebook_shows_the_page_in_a_frame_of_its_own(real: bool) -> None:
    analysis = gputop.analyze(TRACE) if real else gputop.Analysis.from_json(make_analysis().to_json())
    frame = _Page(analysis._repr_html_())  # type: ignore[attr-defined]
    [(tag, attributes)] = frame.elements
    assert tag == "iframe" and attributes["sandbox"] == "allow-scripts" and frame.texts == []
    text = attributes["srcdoc"] or ""
    page = _Page(text)
    assert all(finding.title in unescape(text) for finding in analysis.findings) and page.count("article") == len(
        analysis.findings)
    assert "The step" in page.texts and "default-src 'none'" in text
    assert not re.search(r"""(?:src|href)=|url\(|@import""", text), "nothing is loaded"
    assert ("SIMULATED" in text) == analysis.simulated


def test_a_hostile_name_stays_text() -> None:
    analysis = make_analysis()
    evil = '"></iframe><script>alert(1)</script>'
    analysis = msgspec.structs.replace(analysis, trace=msgspec.structs.replace(analysis.trace, hosts=(evil,)))
    _ = gputop.Analysis
    frame = _Page(analysis._repr_html_())
    assert [tag for tag, _ in frame.elements] == ["iframe"]
    assert _Page(frame.elements[0][1]["srcdoc"] or "").count("script") == 1
