from __future__ import annotations

from gputop.core.samples import NOT_RESPONDING
from gputop.telemetry.history import History
from gputop.tui.monitor.columns import ACTIVITY, HOST, MAIN, fields_of, plan
from gputop.tui.monitor.layout import LaneLines, TableRows
from gputop.tui.monitor.visible_time import LaneSet, VisibleTime
from tests.fakes import gpu_sample, node_sample
from tests.records import replace

STACK = TableRows((LaneLines(MAIN, 3), LaneLines("memory", 1), LaneLines("nvlink", 1)), host_lines=2, has_axis=True)
FIELDS = {field.key: field for field in fields_of(120)}
WIDTH = FIELDS[MAIN].width


def lanes_of(ticks: int) -> tuple[LaneSet, VisibleTime, History]:
    time, history = VisibleTime(), History()
    time.history, time.columns = history, WIDTH
    time.note_interval(1.0)
    for tick in range(ticks):
        history.append(node_sample(tick, 2))
        time.advance()
    return LaneSet(time), time, history


def test_each_gpu_has_the_lanes_of_the_stack_and_the_node_has_one() -> None:
    lanes, _, _ = lanes_of(30)
    gpus = node_sample(29, 2).gpus
    drawn = lanes.update(gpus, ACTIVITY, STACK, FIELDS)
    of_gpu = {MAIN: WIDTH, "memory": WIDTH, "nvlink": WIDTH}
    assert drawn == {gpus[0].info.uuid: of_gpu, gpus[1].info.uuid: of_gpu, HOST: {HOST: WIDTH}}
    for device, key in ((gpus[0].info.uuid, MAIN), (gpus[1].info.uuid, "nvlink"), (HOST, HOST)):
        assert lanes.get(device, key, WIDTH) is not None
        assert lanes.get(device, key, WIDTH - 1) is None, "drawn for another width"
        assert lanes.get(device, key, 0) is None and lanes.get(device, "power", WIDTH) is None
    mean = lanes.mean(gpus[0].info.uuid, MAIN)
    assert mean is not None and 0 < mean < 1 and lanes.mean_at(gpus[0].info.uuid, MAIN, WIDTH - 1) is not None


def test_lanes_are_drawn_again_only_when_they_move() -> None:
    lanes, time, history = lanes_of(60)
    gpus = node_sample(59, 2).gpus
    assert lanes.update(gpus, ACTIVITY, STACK, FIELDS)
    history.append(node_sample(60, 2))
    time.advance()  # by less than a slice or five seconds
    assert lanes.update(gpus, ACTIVITY, STACK, FIELDS) == {}
    drawn = lanes.update(gpus, "power_w", STACK, FIELDS)[gpus[0].info.uuid]
    assert drawn == {MAIN: WIDTH, "memory": 0, "nvlink": 0}
    lanes.clear()
    assert lanes.get(gpus[0].info.uuid, MAIN, WIDTH) is None
    assert lanes.update(gpus, "power_w", STACK, FIELDS)


def test_a_table_of_columns_has_the_lanes_of_its_columns() -> None:
    lanes, time, _ = lanes_of(30)
    fields = {field.key: field for field in plan(160)}
    time.columns = fields[MAIN].width
    gpu = node_sample(29, 2).gpus[0]
    drawn = lanes.update([gpu], ACTIVITY, TableRows((LaneLines(MAIN, 1),)), fields)
    assert set(drawn[gpu.info.uuid]) == {MAIN, "memory_lane", "pcie_lane"} and HOST not in drawn


def test_metrics_without_a_scale_of_their_own_have_the_same_one_on_all_gpus() -> None:
    lanes, _, _ = lanes_of(30)
    gpus = node_sample(29, 2).gpus
    lanes.update(gpus, ACTIVITY, STACK, FIELDS)
    assert set(lanes.full_scales) == {"nvlink"}
    lanes.update(gpus, "nvlink_rx_bytes_per_s", STACK, FIELDS)
    assert set(lanes.full_scales) == {MAIN, "nvlink"} and lanes.full_scales[MAIN] == lanes.full_scales["nvlink"] == 1e11


def test_a_gpu_that_stopped_to_respond_keeps_the_lane_of_what_there_was() -> None:
    lanes, time, _ = lanes_of(30)
    silent = replace(gpu_sample(0, 30), state=NOT_RESPONDING, readings={})
    assert lanes._activity_of(silent) == ("sm_active",)
    coarse = History()
    for tick in range(30):
        node = node_sample(tick, 1)
        coarse.append(replace(node, gpus=(gpu_sample(0, tick, fine=False),)))
    time.history = coarse
    assert lanes._activity_of(silent) == ("sm_active",), "as it is known"
    assert LaneSet(time)._activity_of(silent) == ("gpu_util",)
