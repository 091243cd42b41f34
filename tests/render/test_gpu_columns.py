"""The one list of GPU columns: what each view makes of it."""

from __future__ import annotations

import re

import pytest

from gputop.core.metrics import GPU_METRICS
from gputop.core.samples import GpuSample, Reading, XidEvent
from gputop.export.html import to_html
from gputop.export.snapshot import document, to_text
from gputop.render.gpu_columns import COARSE_MARK, COLUMNS, View, activity_text, flags_of
from gputop.text.units import NA
from gputop.tui.monitor.columns import plan, title_texts
from tests.fakes import StillSession, gpu_sample
from tests.records import replace

FIGURES = [column for column in COLUMNS if column.draw == "figure"]


def _figure(gpu: GpuSample, id_: str, view: View) -> str:
    return next(column for column in COLUMNS if column.id == id_).figure_of(gpu, view)[0]


def test_each_column_has_a_name_of_its_own_a_known_source_and_a_view() -> None:
    assert len({column.id for column in COLUMNS}) == len(COLUMNS)
    for column in COLUMNS:
        assert {*column.metrics, *filter(None, [column.limit])} <= set(GPU_METRICS)
        assert column.screen or column.text or column.page or column.id == "main"
        assert list(column.screen) == sorted(column.screen)


def test_headings_and_figures_fit_their_columns() -> None:
    gpu = gpu_sample(0, 19)
    for column in FIGURES:
        assert len(column.heading_in("text")) <= column.text or not column.text
        assert len(column.figure_of(gpu, "text")[0]) < column.text or not column.text
        assert all(len(column.figure_of(gpu, "screen")[0]) < cells + 2 for _, cells in column.screen)


def test_every_view_shows_its_columns_in_the_order_of_the_list() -> None:
    session = StillSession(gpus=2)
    doc = document(session)
    screen = "".join(title_texts(plan(400), "SM active"))
    text = next(line for line in to_text(session).splitlines() if line.startswith("GPU "))
    page = " ".join(re.findall(r"<th[^>]*>([^<]*)</th>", to_html(doc)[to_html(doc).index("<h2>Now"):]))
    for view, line, columns in (
            ("screen", screen, [c for c in FIGURES if c.cells_at(400) and c.id not in ("memory", "pcie")]),
            ("text", text, [c for c in FIGURES if c.text]), ("page", page, [c for c in FIGURES if c.page])):
        places = [line.index(c.heading_in(view)) for c in columns]  # type: ignore[arg-type]
        assert places == sorted(places) and len(set(places)) == len(columns), view
    assert "Memory GiB" in screen and "PCIe RX/TX GB/s" in screen, "lanes name what their figures are"


@pytest.mark.parametrize(("id_", "screen", "text"), [
    ("memory", "71.2/79.6", "71.2G/79.6G"), ("pcie", "6.0/0.4", "6.0/0.4 GB/s"), ("nvlink", NA, NA),
    ("power", "490W", "490W"), ("clock", "1755MHz", "1755MHz"),
])
def test_a_figure_carries_its_unit_unless_the_heading_names_it(id_: str, screen: str, text: str) -> None:
    gpu = gpu_sample(0, 10)
    if id_ == "nvlink":
        gpu = replace(gpu, readings={m: r for m, r in gpu.readings.items() if not m.startswith("nvlink")})
    assert (_figure(gpu, id_, "screen"), _figure(gpu, id_, "text")) == (screen, text)


def test_half_a_pair_is_shown_and_a_pair_of_which_nothing_is_known_is_one_na() -> None:
    gpu = gpu_sample(0, 10)
    used = Reading.missing("bytes", "not supported")
    half = replace(gpu, readings={**gpu.readings, "memory_used_bytes": used})
    assert _figure(half, "memory", "text") == "N/A/79.6G"
    none = replace(gpu, readings={})
    assert _figure(none, "memory", "text") == _figure(none, "pcie", "text") == NA


def test_coarse_utilization_is_marked_and_faults_come_before_what_holds_the_clocks_down() -> None:
    assert activity_text(gpu_sample(0, 10, fine=False)).startswith(COARSE_MARK)
    assert not activity_text(gpu_sample(0, 10)).startswith(COARSE_MARK)
    assert activity_text(replace(gpu_sample(0, 10), readings={})) == NA
    limited = replace(gpu_sample(0, 10), clock_event_reasons=("idle", "power cap"))
    assert flags_of(limited) == (["power cap"], "warn")
    assert flags_of(replace(limited, xids=(XidEvent(1.0, 79),))) == (["Xid 79", "power cap"], "bad")


@pytest.mark.parametrize("counts", [
    {"ecc_uncorrected": 2.0}, {"row_remap_pending": 1.0}, {"row_remap_failed": 1.0},
    {"ecc_corrected": 12.0, "ecc_uncorrected_lifetime": 1.0, "rows_remapped": 3.0}])
def test_text_and_page_name_the_same_faults_and_the_table_marks_those_that_last(counts: dict[str, float]) -> None:
    def change(gpu: GpuSample, tick: int) -> GpuSample:
        readings = {**gpu.readings, **{metric: Reading(value, "count", "NVML") for metric, value in counts.items()}}
        return replace(gpu, readings=readings, clock_event_reasons=())

    session = StillSession(gpus=1, change=change)
    (line,) = [line for line in to_text(session).splitlines() if line.startswith("GPU 0: ")]
    lasting = len(counts) == 1
    tone = "l warn" if lasting else "l"
    assert f'<td class="{tone}">{line.removeprefix("GPU 0: ")}</td>' in to_html(document(session))
    assert line.count(", ") == len(counts) - 1
    flags = {"ecc_uncorrected": ["ECC"], "row_remap_pending": ["remap"], "row_remap_failed": ["remap"]}
    assert flags_of(session.feed.sample.gpus[0]) == ((flags[next(iter(counts))], "bad") if lasting else ([], "warn"))
