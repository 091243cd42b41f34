"""The page of a snapshot: its structure, what may not be in them, and the page in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
import unicodedata
from pathlib import Path
from xml.etree import ElementTree

import pytest

from gputop.core.errors import GputopError
from gputop.core.findings import Advice
from gputop.diagnosis.tables import tables
from gputop.export.html import to_html
from gputop.export.snapshot import document, format_of, render, to_json, to_text, write_snapshot
from gputop.render.finding_text import NOTHING_FOUND
from gputop.render.step_parts import PART_BY_ID
from gputop.replay.snapshot_document import read
from gputop.text.markup import esc
from tests.analyses import make_analysis
from tests.export.html_page import Page
from tests.export.scene import HOSTILE, SECRET, session
from tests.fakes import StillSession
from tests.records import replace

CHROMIUM = next(filter(None, map(shutil.which, (
    "chromium", "chromium-headless-shell", "chromium-browser", "google-chrome"))), None)
browser = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
_SVG = "{http://www.w3.org/2000/svg}"


def _harmless(text: str) -> bool:
    """No control, format or surrogate character but line breaks."""
    return not [c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs") and c != "\n"]


def test_the_page_shows_the_ops_below_the_roofs() -> None:
    roofline = re.search(r'<svg xmlns[^>]*aria-label="roofline">.*?</svg>', to_html(document(session())))
    root = ElementTree.fromstring(roofline[0])
    fast, slow = root.iter(f"{_SVG}circle")
    roof, = root.iter(f"{_SVG}polyline")
    memory, ridge, compute = ([float(v) for v in pair.split(",")] for pair in roof.attrib["points"].split())
    assert ridge[1] == compute[1] < memory[1] and memory[0] < ridge[0] < compute[0]
    assert float(fast.attrib["cx"]) > ridge[0] > float(slow.attrib["cx"])
    assert float(slow.attrib["cy"]) > float(fast.attrib["cy"]) > compute[1]
    texts = ["".join(text.itertext()) for text in root.iter(f"{_SVG}text")]
    assert {"1", "2"} == set(texts)


def test_the_page_names_the_ops_of_the_roofline_and_says_why_a_row_is_no_layer() -> None:
    words = " ".join(Page(to_html(document(session()))).texts)
    assert "1 Dense_0/dot_general: 400 TFLOP/s in bf16, 900 FLOP per byte" in words and "both logarithmic" in words
    ladder = words[words.index("From the mean step"):]
    assert "MFU unknown." in ladder and "0 s" not in ladder[:ladder.index("MFU unknown.")]
    assert "no op named: These kernels name no op." in words, "not only as a hint on hover"


# -- HTML ----------------------------------------------------------------------------------------


def test_the_page_has_its_parts() -> None:
    page = Page(to_html(document(session())))
    headings = re.findall(r"<h2>([^<]*)", to_html(document(session())))
    assert headings == ["SM active", "What to do", "The step", "Now", "Other lanes", "Processes", "Host"]
    assert page.count("article", "finding") == 2 and page.count("article", "high") == 1
    assert page.count("div", "step") == 1 and page.count("div", "steps") == 1
    lanes = [a for t, a in page.elements if t == "svg" and (a.get("aria-label") or "").startswith("GPU ")]
    assert len(lanes) >= 8 + 8 + 8, "activity, one step, other lanes"
    for expected in ("node-07", "ds = ds.map(\n    fn)", "saves up to 46% of the step", PART_BY_ID["input"].label,
                     "It also explains", "Xid 79", "no answer", "the server said so",
                     "CUDA_VISIBLE_DEVICES=0,1", "a trace was captured"):
        assert expected in page.text, expected
    titles = {a["title"] for _, a in page.elements if a.get("title")}
    assert "GPM" in titles and "the test says so" in titles and "not sampled" in titles, "sources and reasons on hover"
    assert "banner" not in [a.get("class") for _, a in page.elements]


def test_shares_of_the_step_fill_its_bar() -> None:
    text = to_html(document(session()))
    widths = [float(w) for w in re.findall(r'<span style="width:([\d.]+)%;background', text)]
    assert len(widths) == 6 and sum(widths) == pytest.approx(100, abs=0.01)
    assert text.index("</i>compute<b>") < text.index("</i>input wait<b>"), "the legend begins with the largest"


def test_a_small_share_is_no_zero_and_a_missing_figure_says_why() -> None:
    doc = json.loads(to_json(document(session())))
    doc["capture"]["analysis"]["breakdown"]["d2h"] = 1e-6
    doc["capture"]["analysis"]["gpus"] = make_analysis(gpus=[{"gpu": 0, "busy": 0.9}]).to_json()["gpus"]
    page = to_html(doc)
    assert "D2H<b>&lt;0.1%</b>" in page and "0.0%" not in page
    gpus = next(table for table in tables(make_analysis()) if table.name == "GPUs")
    reasons = {column.title: column.missing for column in gpus.columns}
    assert all(f'title="{esc(reasons[title])}">N/A<' in page for title in ("by host", "tensor", "delay"))


@pytest.mark.parametrize(("name", "value", "shown"), [
    ("kernels_per_s", 4869.0, "kernel rate <b>4,869/s</b>"), ("bytes_per_s", 2.77e10, "rate <b>27.7 GB/s</b>"),
    ("pcie_rx_bytes_per_s", 2e9, "PCIe traffic to the GPU <b>2.0 GB/s</b>"), ("power_w", 577.0, "power <b>577W</b>"),
    ("temperature_c", 59.0, "temperature <b>59°C</b>"), ("sm_clock_hz", 1.98e9, "SM clock <b>1980MHz</b>"),
    ("launch_pace_s", 26e-6, "median time between launches <b>26.0 µs</b>"),
    ("factor", 8.0, "batch size relative to the current one <b>8×</b>"),
])
def test_evidence_is_in_the_unit_its_name_ends_in(name: str, value: float, shown: str) -> None:
    watched = session()
    watched.results.findings = (replace(watched.results.findings[0], evidence={name: value}),)
    assert f"<li>{shown}</li>" in to_html(document(watched))


def test_the_text_keeps_its_prose_within_80_columns() -> None:
    watched = session()
    why = "For 46% of the step the training loop waits for its next batch and no GPU has work. " * 3
    watched.results.findings = (replace(watched.results.findings[0], why=why, action=why),)
    text = to_text(watched)
    advice = text[text.index("\nWhat to do"):text.index("\nGPU ")].splitlines()
    assert max(map(len, advice)) <= 80 and sum("46%" in line for line in advice) >= 6
    assert "        ds = ds.map(" in advice and "            fn)" in advice
    watched.results.findings = ()
    assert to_text(watched).splitlines()[3:5] == ["The limit.", ""]


def test_the_page_asks_nobody_for_anything() -> None:
    page = Page(to_html(document(session())))
    for tag, attributes in page.elements:
        assert not {"src", "href", "action", "srcset", "background", "poster", "onclick"} & set(attributes), tag
    assert not {"link", "img", "iframe", "object", "form", "base", "audio", "video"} & {t for t, _ in page.elements}
    text = to_html(document(session()))
    assert not re.search(r"@import|url\(|@font-face|\bfetch\(|XMLHttpRequest|import\(", text)
    assert "default-src 'none'" in text


def test_the_page_holds_its_document(tmp_path: Path) -> None:
    doc = document(session(name=HOSTILE))
    (tmp_path / "a.json").write_text(to_json(doc))
    (tmp_path / "a.html").write_text(to_html(doc), "utf-8")
    assert read(tmp_path / "a.html") == read(tmp_path / "a.json")


def test_a_page_of_16_gpus_with_wild_figures_stays_small() -> None:
    watched = session(16, noise=True, ticks=400)
    assert len(to_html(document(watched)).encode()) < 1_500_000


def test_a_simulated_node_says_so_in_every_form() -> None:
    watched = session()
    watched.feed.sample = replace(watched.feed.sample, simulated=True)
    page = Page(render(watched, "html"))
    assert page.count("div", "banner") == 1 and "SIMULATED" in page.text


def test_without_capture_history_or_gpus_there_is_still_a_page() -> None:
    watched = StillSession(ticks=1)
    watched.feed.sample = replace(watched.feed.sample, gpus=(), processes=())
    watched.feed.history = None
    watched.results.live = Advice()
    page = Page(to_html(document(watched)))
    assert page.count("section") == 2 and NOTHING_FOUND in page.text


def test_a_trace_that_could_not_be_analyzed_says_why() -> None:
    watched = session()
    watched.results.last_capture = replace(watched.results.last_capture, analysis=None, report="",
                                   problem=GputopError("the trace holds no event", "Capture while it trains."))
    text = to_html(document(watched))
    assert "the trace holds no event" in text and "Capture while it trains." in text and "/traces/vm.xplane.pb" in text


# -- names from outside, secrets -----------------------------------------------------------------


def test_hostile_names_are_shown_and_do_nothing() -> None:
    watched = session(2, name=HOSTILE)
    html, text = (render(watched, kind) for kind in ("html", "text"))
    page = Page(html)
    assert [t for t, _ in page.elements].count("script") == 2 and not page.count("img")
    assert not [a for _, a in page.elements if any(name.startswith("on") for name in a)]
    assert "</script><script>document.title='owned'" in page.text, "shown as it is"
    assert "[bold]x[/]" in html and "[bold]x[/]" in text
    for form in (html, text, render(watched, "json")):
        assert _harmless(form)
        form.encode()
    assert json.loads(render(watched, "json"))["host"]["hostname"] == HOSTILE, "the document keeps what was read"


def test_no_form_holds_the_secrets_of_commands(tmp_path: Path) -> None:
    paths = write_snapshot(session(), tmp_path)
    assert [p.suffix for p in paths] == [".json", ".txt", ".html"]
    for path in paths:
        assert SECRET not in path.read_text() and path.stat().st_mode & 0o777 == 0o600
    assert "--api-key *** --lr 0.1" in to_text(session())


@pytest.mark.parametrize(("name", "kind"), [("a.json", "json"), ("a.HTML", "html"), ("a.htm", "html"),
                                            ("a.txt", "text"), ("a", "text")])
def test_the_name_of_a_file_decides_the_format(name: str, kind: str) -> None:
    assert format_of(Path(name)) == kind


# -- in a browser --------------------------------------------------------------------------------


def _chromium(profile: Path, page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync",
         "--disable-component-update", "--no-first-run", "--hide-scrollbars", "--enable-logging=stderr",
         "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={profile}", *options, page.as_uri()],
        capture_output=True, text=True, timeout=120, check=True)


@browser
@pytest.mark.parametrize("name", ["", HOSTILE])
def test_a_browser_opens_the_page_and_runs_its_own_script_alone(tmp_path: Path, name: str) -> None:
    path = tmp_path / "page.html"
    path.write_text(to_html(document(session(name=name))), "utf-8")
    shot = tmp_path / "page.png"
    done = _chromium(tmp_path / "profile", path, "--dump-dom")
    assert "CONSOLE" not in done.stderr, "no error, nothing refused"
    dom = Page(done.stdout)
    assert dom.count("button") == dom.count("div", "code") == 1
    assert "<title>gputop: " in done.stdout and not dom.count("img")
    _chromium(tmp_path / "profile", path, f"--screenshot={shot}", "--window-size=1280,2000")
    width, height = struct.unpack(">II", shot.read_bytes()[16:24])
    assert (width, height) == (1280, 2000) and shot.stat().st_size > 50_000


@browser
@pytest.mark.parametrize("width", [1280, 500])
def test_nothing_of_the_page_hangs_over_its_edge(tmp_path: Path, width: int) -> None:
    text = to_html(document(session(16)))
    measured = re.sub(r"<meta http-equiv[^>]*>", "", text).replace("</body>", (
        "<script>document.title = [document.documentElement.scrollWidth, innerWidth].join(' of ')</script></body>"))
    path = tmp_path / "page.html"
    path.write_text(measured, "utf-8")
    done = _chromium(tmp_path / "profile", path, "--dump-dom", f"--window-size={width},900")
    assert f"<title>{width} of {width}</title>" in done.stdout
