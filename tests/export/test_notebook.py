"""What a notebook shows of ``gputop.analyze(...)``."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import msgspec
import pytest

import gputop
from gputop.analysis.results import FlameNode, HostStacks
from gputop.core.codec import from_document
from tests.analyses import make_analysis
from tests.export.html_page import Page
from tests.tui.screens.tabled import STACKS

TRACE = Path(__file__).parents[1] / "data" / "keras3_slow_input.xplane.pb.gz"


@pytest.mark.parametrize("real", [True, False])
def test_a_notebook_shows_the_page_in_a_frame_of_its_own(real: bool) -> None:
    analysis = gputop.analyze(TRACE) if real else gputop.Analysis.from_json(make_analysis().to_json())
    frame = Page(analysis._repr_html_())  # type: ignore[attr-defined]
    [(tag, attributes)] = frame.elements
    assert tag == "iframe" and attributes["sandbox"] == "allow-scripts" and frame.texts == []
    text = attributes["srcdoc"] or ""
    page = Page(text)
    assert all(finding.title in unescape(text) for finding in analysis.findings) and page.count("article") == len(
        analysis.findings)
    assert "The step" in page.texts and "default-src 'none'" in text
    assert not re.search(r"""(?:src|href)=|url\(|@import""", text), "nothing is loaded"
    assert ("SIMULATED" in text) == analysis.simulated


def test_python_in_the_gaps_is_listed_and_an_icicle_shows_its_calls() -> None:
    evil = "<script>alert(1)</script>"
    stacks = from_document(STACKS, HostStacks, "stacks")
    flame = (*stacks.flame, FlameNode(evil, evil, 0, 0.02, 0.0))
    analysis = msgspec.structs.replace(make_analysis(steps={"count": 4, "mean_s": 0.1}), stacks=msgspec.structs.replace(
        stacks, flame=flame))
    assert isinstance(analysis, gputop.Analysis)  # an analysis has its picture from there
    text = Page(analysis._repr_html_()).elements[0][1]["srcdoc"] or ""
    page = Page(text)
    assert page.count("script") == 1 and evil in page.texts
    assert "70.0 ms of each step: metrics.py:112 confusion_matrix, mostly in numpy/core.py:3 add" in page.texts
    boxes = re.findall(r'<b style="left:([\d.]+)%;width:([\d.]+)%;top:(\d+)px', text)
    assert [(float(x), float(w), int(y)) for x, w, y in boxes] == [
        (0, 100, 0), (0, 75, 22), (0, 50, 44), (75, 25, 22), (100, 20, 22)]


def test_a_hostile_name_stays_text() -> None:
    analysis = make_analysis()
    evil = '"></iframe><script>alert(1)</script>'
    analysis = msgspec.structs.replace(analysis, trace=msgspec.structs.replace(analysis.trace, hosts=(evil,)))
    _ = gputop.Analysis
    frame = Page(analysis._repr_html_())
    assert [tag for tag, _ in frame.elements] == ["iframe"]
    assert Page(frame.elements[0][1]["srcdoc"] or "").count("script") == 1
