"""The report over recordings as a page."""

from __future__ import annotations

import json
import re
from contextlib import closing
from html import unescape
from pathlib import Path

import pytest
from msgspec.structs import replace

from gputop.cli import main
from gputop.export.days import DATA_ID, to_html
from gputop.goodput.model import Creep, HourFinding, OwnRuleReport, Report
from gputop.goodput.recorded import report
from gputop.replay.format import RecordingWriter
from tests.commands.schema_problems import problems
from tests.export.html_page import Page
from tests.goodput.days import GIB, START_S, node

EVIL = '"></script><img src=x onerror=alert(1)>\x1b[31m'
CREEP = Creep(what="process", name=EVIL, pid=7, begin_s=0.0, end_s=3600.0, first_bytes=GIB, last_bytes=2 * GIB,
              bytes_per_s=GIB / 3600, limit="node", limit_bytes=8 * GIB, full_in_s=7200.0, full_in_low_s=7000.0,
              full_in_high_s=7400.0)
RULE = OwnRuleReport(id="own", title=EVIL, severity="low", gpus=[0, 1], judged_s=100.0, held_s=50.0, times=2,
                     longest_s=40.0, last_s=START_S, missing=None)


@pytest.fixture(scope="module")
def days(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Two days of six hours, the second after a gap, with an hour of waiting."""
    path = tmp_path_factory.mktemp("days") / "a.rec"
    with closing(RecordingWriter(path)) as writer:
        for day in (0, 1):
            for minute in range(360):
                what = "wait" if day and 120 <= minute < 180 else "train"
                writer.append(node(START_S + 86400 * day + 60 * minute, what))
    return report([path], 0.3)


def test_a_day_is_a_row_and_an_hour_a_column_in_the_colors_of_the_states(days: Report) -> None:
    text = to_html(days)
    page = Page(text)
    pictures = [attributes for tag, attributes in page.elements if tag == "svg"]
    assert [picture["aria-label"].rpartition(" ")[2] for picture in pictures] == ["100%", "83%"]  # type: ignore[union-attr]
    assert text.count("<g><title>") == len(days.hours)
    (worst,) = re.findall(r"<g><title>[^<]*waiting 98%.*?</g>", text)
    heights = [float(height) for height in re.findall(r"v([\d.]+)h", worst)]
    assert sum(heights) == pytest.approx(100, abs=0.1) and max(heights) > 90
    assert {"Worst hours", "GPU time", "Day by day", "GPUs", "Jobs"} <= set(page.texts)
    assert "21.9 h" in page.texts and "goodput" in " ".join(page.texts) and "at 0.3 per kWh" in " ".join(page.texts)


def test_the_document_is_inside_and_nothing_is_loaded(days: Report, tmp_path: Path) -> None:
    text = to_html(days)
    (document,) = re.findall(rf'<script type="application/json" id="{DATA_ID}">(.*?)</script>', text)
    assert not problems("report", json.loads(document)) and json.loads(document)["host"] == days.host
    assert "default-src 'none'" in text and not re.search(r"""(?:src|href)=|url\(|@import|https?://""", text)


def test_what_comes_from_outside_stays_text(days: Report) -> None:
    worst = [replace(hour, findings=[HourFinding(id="own", title=EVIL, gpus=[0], held_ratio=0.5)], not_judged=None)
             for hour in days.worst_hours]
    evil = replace(days, host=EVIL, creep=[CREEP], own_rules=[RULE], worst_hours=worst, notes=[EVIL],
                   jobs=[replace(job, job=EVIL, user=EVIL) for job in days.jobs],
                   gpus=[replace(gpu, name=EVIL, uuid=EVIL) for gpu in days.gpus])
    text = to_html(evil)
    page = Page(text)
    assert page.count("img") == 0 and page.count("script") == 2 and "\x1b" not in text
    assert unescape(text).count("<img src=x") >= 8
    assert "the 8.0 GiB of the node will be full 2.0 h after" in unescape(text)


def test_of_no_time_it_says_so(days: Report) -> None:
    empty = replace(days, hours=[], worst_hours=[], gpus=[], jobs=[], simulated=True,
                    total=replace(days.total, states_s={}, goodput_ratio=None, energy_j=None))
    text = " ".join(Page(to_html(empty)).texts)
    assert "N/A: no GPU time was recorded." in text and "SIMULATED" in text


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "a.rec", tmp_path / "report.html"
    with closing(RecordingWriter(path)) as writer:
        for minute in range(5):
            writer.append(node(START_S + 60 * minute, "train"))
    assert main(["report", str(path), "--html", str(out)]) == 0
    shown = capsys.readouterr()
    assert shown.out == "" and str(out) in shown.err and out.stat().st_mode & 0o777 == 0o600
    assert out.read_text().startswith("<!DOCTYPE html>")
    assert main(["report", str(path), "--html", str(tmp_path / "none" / "x.html")]) == 1
    assert "cannot write" in capsys.readouterr().err
