from __future__ import annotations

import itertools

import pytest
from textual.geometry import Region

from gputop.core.samples import LOST, GpuSample, Reading, XidEvent
from gputop.render.gpu_columns import short_gpu_name
from gputop.render.palette import BAD, WARN
from gputop.tui.monitor.columns import ACTIVITY, figures_of, parts, plan
from gputop.tui.monitor.gpu_table import GpuTable, Pane
from gputop.tui.monitor.status_lines import header, host
from tests.fakes import gpu_sample, node_sample
from tests.records import replace

FIELDS = {field.key: field for width in (120, 160) for field in plan(width)}
FIELDS_120 = {field.key: field for field in plan(120)}


@pytest.mark.parametrize("width", [10, 20, 30, 49, 50, 79, 80, 99, 100, 110, 149, 150, 200, 400])
def test_columns_never_overlap_and_never_leave_the_screen(width: int) -> None:
    fields = plan(width)
    for left, right in itertools.pairwise(fields):
        assert left.x + left.width <= right.x
    assert fields[-1].x + fields[-1].width <= max(width, 4)
    assert next(f for f in fields if f.key == "main").width >= min(6, width - 4)


def test_the_main_lane_is_never_crowded_out_by_what_stands_beside_it() -> None:
    lengths = {width: next(f.width for f in plan(width) if f.key == "main") for width in range(80, 260)}
    assert all(length >= 26 for length in lengths.values())
    assert all(length >= 36 for width, length in lengths.items() if width >= 110)


def _without(sample: GpuSample, metric: str) -> GpuSample:
    readings = dict(sample.readings)
    readings[metric] = Reading.missing(readings[metric].unit, "not supported")
    return replace(sample, readings=readings)


def test_the_bar_is_as_long_as_the_present_value_of_the_lane_s_metric() -> None:
    gpu = gpu_sample(0, 10)  # half busy
    assert figures_of(gpu, ACTIVITY, FIELDS)["bar"][0] == "█████     "
    watts, most = gpu["power_w"].value, gpu["power_limit_w"].value
    assert watts and most
    assert figures_of(gpu, "power_w", FIELDS)["bar"][0].count("█") == int(10 * watts / most)
    assert "bar" not in figures_of(gpu, ACTIVITY, {})
    assert figures_of(_without(gpu, "power_w"), "power_w", FIELDS)["bar"][0] == ""


def test_a_lost_gpu_says_so_and_cannot_drive_the_terminal() -> None:
    lost = replace(gpu_sample(3, 1), state=LOST, message="GPU 3 is lost: it fell off the bus\x1b[2J")
    assert figures_of(lost, ACTIVITY, FIELDS)["message"][0] == "is lost: it fell off the bus�[2J"
    assert figures_of(replace(lost, message=""), ACTIVITY, FIELDS)["message"][0] == "lost"


def test_power_at_its_limit_and_reasons_are_marked() -> None:
    hot = replace(gpu_sample(0, 19), clock_event_reasons=("idle", "power cap"))
    readings = {**hot.readings, "power_w": Reading(699.0, "W")}
    figures = figures_of(replace(hot, readings=readings), ACTIVITY, FIELDS)
    assert figures["flags"][0].strip() == "power cap"
    assert figures["power"][1] != figures_of(gpu_sample(0, 1), ACTIVITY, FIELDS)["power"][1]


def test_faults_are_flagged_before_what_holds_the_clocks_down() -> None:
    gpu = replace(gpu_sample(0, 1), xids=(XidEvent(1.0, 63), XidEvent(2.0, 79)), clock_event_reasons=("power cap",))
    readings = {**gpu.readings, "ecc_uncorrected": Reading(2.0, "count"), "row_remap_pending": Reading(1.0, "count")}
    text, style = figures_of(replace(gpu, readings=readings), ACTIVITY, FIELDS)["flags"]
    assert text == " Xid 79, ECC, remap, power cap" and style == BAD
    assert figures_of(replace(gpu, readings=readings), ACTIVITY, FIELDS)["flag"] == (" Xid", BAD)
    assert figures_of(replace(gpu, xids=()), ACTIVITY, FIELDS)["flag"] == (" pwr", WARN)
    for reason, flag in (("hw thermal", " hot"), ("thermal", " hot"), ("hw slowdown", " hw"), ("sync boost", " clk")):
        limited = replace(gpu, xids=(), clock_event_reasons=(reason,))
        assert figures_of(limited, ACTIVITY, FIELDS)["flag"] == (flag, WARN)
    assert figures_of(replace(gpu, xids=(), clock_event_reasons=("idle",)), ACTIVITY, FIELDS)["flag"][0] == ""
    healthy = {**gpu.readings, "ecc_uncorrected": Reading(0.0, "count"), "row_remap_pending": Reading(0.0, "count")}
    assert figures_of(replace(gpu, xids=(), readings=healthy), ACTIVITY, FIELDS)["flags"] == (" power cap", WARN)


def test_a_mig_instance_is_called_by_its_gpu_and_its_number() -> None:
    def label(index: int, mig: int | None) -> str:
        gpu = gpu_sample(0, 1)
        return figures_of(replace(gpu, info=replace(gpu.info, index=index, mig=mig)), ACTIVITY, FIELDS)["gpu"][0]

    assert [label(3, None), label(3, 1), label(11, 6)] == [" 3", "3:1", "11:6"]


def test_the_header_counts_instances_apart_from_their_gpu() -> None:
    node = node_sample(1, gpus=2)
    instances = [replace(g, info=replace(g.info, index=1, mig=i, uuid=f"MIG-{i}")) for i, g in enumerate(node.gpus)]
    text = "".join(t for t, _ in header(replace(node, gpus=(*node.gpus, *instances)), 1.0, False, 120))
    assert "2×H100 80GB" in text and "2 MIG" in text
    alone = "".join(t for t, _ in header(replace(node, gpus=tuple(instances)), 1.0, False, 120))
    assert "2×H100 80GB" in alone and "MIG" not in alone


def test_the_header_counts_gpus_of_which_only_the_number_is_known() -> None:
    node = node_sample(1, gpus=4)
    lost = [replace(g, info=replace(g.info, name=f"GPU {g.info.index}")) for g in node.gpus[2:]]
    text = "".join(t for t, _ in header(replace(node, gpus=(*node.gpus[:2], *lost)), 1.0, False, 120))
    assert "2×H100 80GB + 2×unknown" in text


def test_full_cores_are_reported() -> None:
    node = node_sample(1)
    busy = replace(node.host, core_ratios=(1.0, 0.97, 0.2) + 93 * (0.1,))
    assert "of 96 cores, 2 full" in "".join(t for t, _ in host(replace(node, host=busy), 120))
    assert "full" not in "".join(t for t, _ in host(node, 120))


@pytest.mark.parametrize(("name", "short"), [
    ("NVIDIA H100 80GB HBM3", "H100 80GB"), ("Tesla V100-SXM2-16GB", "V100-SXM2-16GB"),
    ("NVIDIA GeForce RTX 4090", "RTX 4090"), ("NVIDIA", "NVIDIA"),
])
def test_short_gpu_names(name: str, short: str) -> None:
    assert short_gpu_name(name) == short


def test_a_pane_repaints_the_figures_that_changed_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    lane, newest = (Pane(GpuTable()) for _ in range(2))
    painted: list[tuple[Pane, Region]] = []
    monkeypatch.setattr(Pane, "refresh", lambda pane, *regions: painted.extend((pane, region) for region in regions))
    lane.part, newest.part, *_ = parts(plan(120))
    power, temperature = FIELDS_120["power"], FIELDS_120["temperature"]

    def changes(columns: int, *figures: tuple[int, set[str]]) -> list[tuple[Pane, Region]]:
        painted.clear()
        for pane in (lane, newest):
            pane.note_changes(4, 2, columns, figures)
            pane.repaint()
        return painted

    assert changes(0) == []
    x = power.x - newest.part.x
    assert changes(0, (5, {"power"})) == [(newest, Region(x, 5, power.width, 1))]
    end = temperature.x + temperature.width - power.x
    assert changes(0, (4, {"power", "temperature"})) == [(newest, Region(x, 4, end, 1))]
    assert changes(1) == [(newest, Region(0, 4, 1, 2))], "the newest slice alone"
    assert changes(9) == [(lane, Region(0, 4, lane.part.width, 2)), (newest, Region(0, 4, 1, 2))]
    assert changes(0, (4, {"reason"})) == [(lane, Region(0, 4, lane.part.width, 2))], "in the place of the lane"
    whole = [(pane, Region(0, 0, pane.part.width, 2)) for pane in (lane, newest) if pane.part is not None]
    assert changes(0, (4, {"message", "power"})) == whole, "a message takes the place of all figures"


def test_coarse_utilization_is_marked() -> None:
    assert figures_of(gpu_sample(0, 10), ACTIVITY, FIELDS)["now"][0] == "50%"
    assert figures_of(gpu_sample(0, 10, fine=False), ACTIVITY, FIELDS)["now"][0] == "~70%"


def test_what_is_not_known_is_na() -> None:
    figures = figures_of(_without(gpu_sample(0, 10), "power_w"), ACTIVITY, FIELDS)
    assert figures["power"][0] == "N/A"
    half = figures_of(_without(gpu_sample(0, 10), "pcie_tx_bytes_per_s"), ACTIVITY, FIELDS)
    assert half["pcie"][0] == "6.0/N/A"
