from __future__ import annotations

import pytest

from gputop.core.metrics import GPU_METRICS
from gputop.core.samples import (
    ENDED,
    LOST,
    GpuInfo,
    GpuProcess,
    GpuSample,
    PodContainer,
    ProcessSample,
    Reading,
    XidEvent,
)
from gputop.tui.monitor.process_panel import ProcessPanel, arrange, run_time, tree
from gputop.tui.screens.details import gpu_text
from gputop.tui.screens.process_screens import ProcessPopup
from tests.fakes import StillSession, node_sample
from tests.records import replace
from tests.tui.found import piloted, text_of


def _process(pid: int, command: str, memory: float | None, cpu: float | None, sm: float | None = 0.5) -> ProcessSample:
    def value(v: float | None, unit: str) -> Reading:
        return Reading.missing(unit, "not permitted") if v is None else Reading(v, unit)

    on_gpu = GpuProcess(pid, "C", None, value(memory, "bytes"), value(sm, "ratio"))
    return ProcessSample(pid, "ana", command, value(cpu, "cores"), value(1.0, "bytes"), 1, {0: on_gpu, 1: on_gpu})


A, B, C = _process(1, "python a.py", 10, 3.0), _process(2, "python b.py", 30, None), _process(3, "Xorg", None, 0.1)


def test_sorting_puts_the_largest_first_and_the_unknown_last() -> None:
    assert [p.pid for p in arrange([A, B, C], "gpu memory", "")] == [2, 1, 3]
    assert [p.pid for p in arrange([A, B, C], "cpu", "")] == [1, 3, 2]
    assert [p.pid for p in arrange([C, B, A], "pid", "")] == [1, 2, 3]


_POD = PodContainer("1b2c", "c" * 64, "llama-pretrain-worker-3", "ml", "train")


@pytest.mark.parametrize(("pattern", "pids"), [
    ("PYTHON", [1, 2]), ("3", [1, 3]), ("ana", [1, 2, 3]), ("nobody", []), ("slurm", [3]),
    ("LLAMA-", [1]), ("ml/", [1]), ("container train", [1]), ("9f8", [2])])
def test_filter_matches_pid_user_command_container_and_pod(pattern: str, pids: list[int]) -> None:
    unnamed = PodContainer("9f8e", "d" * 64, reason="no link")
    processes = (replace(A, kubernetes=_POD), replace(B, kubernetes=unnamed), replace(C, container="slurm 12"))
    assert [process.pid for process in arrange(processes, "pid", pattern)] == pids


def test_sums_over_gpus_know_what_is_unknown() -> None:
    assert A.gpu_memory_bytes == 20 and C.gpu_memory_bytes is None
    assert A.mean_sm_ratio == 0.5 and _process(4, "x", 1, 1, None).mean_sm_ratio is None


def test_io_is_known_only_where_both_directions_are() -> None:
    def rate(value: float) -> Reading:
        return Reading(value, "bytes/s")

    assert A.io_bytes_per_s is None
    assert replace(A, io_read_bytes_per_s=rate(3.0)).io_bytes_per_s is None
    assert replace(A, io_read_bytes_per_s=rate(3.0), io_write_bytes_per_s=rate(4.0)).io_bytes_per_s == 7.0


async def lines_of(width: int, process: ProcessSample, attached: frozenset[int] = frozenset(), *,
                   alone: bool = False) -> list[str]:
    """Title and row in the panel of a stacked screen of that width, which it fills; ``alone``: without GPUs."""
    session = StillSession(5)
    session = session.holding(*session.feed.sample.processes, process)
    if alone:
        session.feed.sample = replace(session.feed.sample, gpus=(), processes=(process,))
    async with piloted(session, (width, 62)) as (app, _):
        panel = app.query_one(ProcessPanel)
        panel.update_view(replace(node_sample(1), processes=(process,)), attached)
        return [line.rstrip() for line in text_of(panel).splitlines()]


async def test_a_wide_panel_shows_io_and_container_and_mig_instances() -> None:
    on_part = GpuProcess(4, "C", 1, Reading(10.0, "bytes"), Reading(0.5, "ratio"))
    inside = ProcessSample(
        4, "ana", "python d.py", Reading(1.0, "cores"), Reading(1.0, "bytes"), gpus={0: on_part}, local_pid=77,
        container="docker 0123456789ab\x1b", io_read_bytes_per_s=Reading(4.2e8, "bytes/s"),
        io_write_bytes_per_s=Reading(1e6, "bytes/s"))
    head, row = await lines_of(119, inside, attached=frozenset({77}))
    assert head.split() == ["pid", "user", "GPU", "mem", "sm", "cpu", "I/O", "container", "command"]
    assert row.split() == ["4", "ana", "0:1", "10B", "50%", "100%", "421", "MB/s", "docker", "0123456789ab\ufffd",
                           "●", "d.py"]
    head, _ = await lines_of(80, inside)
    assert head.split() == ["pid", "user", "GPU", "mem", "sm", "cpu", "command"]
    head, row = await lines_of(119, A)
    assert "container" not in head, "no column for what nobody has"
    assert row.split() == ["1", "ana", "0-1", "20B", "50%", "300%", "N/A", "a.py"]


async def test_the_column_of_containers_has_the_pod_and_of_a_long_name_its_end() -> None:
    inside = replace(A, container="containerd 0123456789ab", kubernetes=_POD)
    head, row = await lines_of(119, inside)
    assert "container" in head and "llama-pretrain-worker-3" in row and "containerd" not in row
    long = replace(inside, kubernetes=replace(_POD, pod="x" * 240 + "\x1b-worker-12"))
    row = (await lines_of(119, long))[1]
    assert "  …" + "x" * 11 + "\ufffd-worker-12  a.py" in row
    unnamed = replace(inside, kubernetes=PodContainer("1b2c", "c" * 64, reason="no link"))
    assert "containerd 0123456789ab" in (await lines_of(119, unnamed))[1]


async def test_a_wide_panel_has_a_bar_of_the_memory_and_the_run_time() -> None:
    now_s = node_sample(1).time_s
    half = GpuProcess(1, "C", None, Reading(79.6 * 2**29, "bytes"), Reading(0.5, "ratio"))
    head, row = await lines_of(119, replace(A, gpus={0: half}, started_s=now_s - 7500))
    assert head.split() == ["pid", "user", "GPU", "mem", "sm", "cpu", "I/O", "time", "command"]
    assert row.split() == ["1", "ana", "0", "39.8G", "████", "50%", "300%", "N/A", "2h05", "a.py"]


@pytest.mark.parametrize(("duration_s", "text"), [
    (-3.0, "<1m"), (59.0, "<1m"), (61.0, "1m"), (3599.0, "59m"), (11_100.0, "3h05"), (86_400.0, "1d00h"),
    (200 * 86_400.0, "200d")])
def test_run_times_are_short(duration_s: float, text: str) -> None:
    assert run_time(duration_s) == text


async def test_without_gpus_their_columns_make_room_for_the_memory_of_the_process() -> None:
    training = replace(A, gpus={}, rss_bytes=Reading(3.0 * 2**30, "bytes"))
    ended = replace(training, pid=2, cpu_cores=Reading.missing("cores", ENDED), reason=ENDED)
    head, row = await lines_of(80, training, alone=True)
    assert head.split() == ["pid", "user", "RAM", "cpu", "command"]
    assert row.split() == ["1", "ana", "3.0G", "300%", "a.py"]
    head, row = await lines_of(80, ended, alone=True)
    assert row.split() == ["2", "ana", "3.0G", "N/A", "ended:", "a.py"], "what it was stays"


@pytest.mark.parametrize("reason", [None, "not supported by this driver"])
def test_details_of_a_gpu_name_its_memory_node_and_its_faults(reason: str | None) -> None:
    info = GpuInfo(0, "GPU-0", "H100", "0000:1b:00.0", numa_node=1)
    text = gpu_text(GpuSample(info, {}, xids=(XidEvent(45_296.0, 79),), xids_reason=reason)).plain
    assert "0000:1b:00.0  NUMA node 1\n" in text
    assert "Xid 79 at 12:34:56" in text
    assert ("Xid errors are not reported: not supported by this driver" in text) == (reason is not None)


def test_a_lost_gpu_says_why_once() -> None:
    why = "the GPU fell off the bus"
    lost = {metric.id: Reading.missing(metric.unit, why) for metric in GPU_METRICS.values()}
    gpu = GpuSample(GpuInfo(0, "GPU-0", "H100", "0000:1b:00.0"), lost, state=LOST, message=why)
    text = gpu_text(gpu).plain
    assert text.count(why) == 1 and "All values are N/A for the reason above." in text and "SM active" not in text
    text = gpu_text(replace(gpu, readings=lost | {"gpu_util": Reading(0.5, "ratio", "NVML")})).plain
    assert "Util (coarse)         50%        NVML\nAll other values are N/A" in text


async def test_a_filter_that_looks_like_markup_is_shown_as_it_is() -> None:
    async with piloted(StillSession(5), (160, 40)) as (app, pilot):
        panel = app.query_one(ProcessPanel)
        panel.pattern = "[/] [bold]x"
        panel.draw()
        await pilot.pause()
        assert app.is_running and "[/] [bold]x" in panel._titles[0]
        assert "[bold]x" in app.export_screenshot().replace("&#160;", " ")


def child(process: ProcessSample, parent: int | None) -> ProcessSample:
    return replace(process, parent_pid=parent)


def drawn(*processes: ProcessSample) -> list[str]:
    return [b.lead + str(b.process.pid) if b.process is not None else f"[{b.parent_pid}]" for b in tree(processes)]


def test_the_tree_puts_children_under_their_parents() -> None:
    d, e = _process(4, "d", 1, 1.0), _process(5, "e", 1, 1.0)
    assert drawn(child(B, 1), child(A, 99), child(d, 2), child(C, 2)) == ["1", "└ 2", "  ├ 4", "  └ 3"]
    assert drawn(child(A, 99), child(B, 99), child(d, 1), child(e, 1), C) == [
        "[99]", "├ 1", "│ ├ 4", "│ └ 5", "└ 2", "3"]
    assert drawn(child(A, 1), child(B, 1), child(C, None)) == ["1", "└ 2", "3"]  # init is nobody's group
    assert drawn(child(A, 2), child(B, 1)) == ["1", "└ 2"]  # a ring, as PIDs of two namespaces can make


def test_in_a_container_the_tree_goes_by_the_numbers_in_here() -> None:
    inside = replace(A, pid=41_000, local_pid=10)
    assert drawn(inside, child(B, 10)) == ["41000", "└ 2"]


async def test_selection_tree_and_sorting_by_keys_and_mouse() -> None:
    async with piloted(StillSession().holding(child(A, 77), child(B, 77), C)) as (app, pilot):
        panel = app.query_one(ProcessPanel)
        panel.focus()
        assert panel.selected is not None and panel.selected.pid == 2
        await pilot.press("down")
        assert panel.selected.pid == 1
        await pilot.press("v")
        text = text_of(panel)
        assert "77 parent of these, uses no GPU" in text and "├ b.py" in text and panel.selected.pid == 1
        await pilot.press("v", "up", "up")
        assert panel.selected.pid == 2
        await pilot.click(ProcessPanel, offset=(4, 4))
        assert panel.selected.pid == 3
        await pilot.click(ProcessPanel, offset=(4, 1))
        assert panel.sort == "sm"
        await pilot.press("o")
        assert panel.sort == "cpu"


async def test_a_low_panel_has_rows_in_place_of_frame_and_heading_and_counts_the_others() -> None:
    async with piloted(StillSession().holding(A, B, C), (80, 24)) as (app, pilot):
        panel = app.query_one(ProcessPanel)
        panel.focus()
        await pilot.pause()
        assert panel.outer_size.height == panel.size.height == 2

        def shown() -> list[str]:
            return text_of(panel).splitlines()

        assert shown()[0].split()[:2] == ["›", "2"]
        assert shown()[1].split()[0] == "1" and shown()[1].endswith(" 1 more")
        await pilot.press("down", "down")
        assert shown()[0].split()[0] == "1" and shown()[1].split()[:2] == ["›", "3"]
        await pilot.click(ProcessPanel, offset=(5, 0))
        assert panel.selected is not None and panel.selected.pid == 1
        assert {len(line) for line in shown()} == {80}
        panel.show_matching(".py")
        assert shown()[1].endswith(" with “.py”")
        panel.show_matching("a.py")
        assert shown()[0].endswith(" with “a.py”")
        assert {len(line) for line in shown()[:1]} == {80}


async def test_a_single_process_takes_one_line_where_the_panels_are_stacked() -> None:
    async with piloted(StillSession(5), (80, 24)) as (app, pilot):
        panel = app.query_one(ProcessPanel)
        assert panel.outer_size.height == 1
        line = text_of(panel)
        assert line.split()[0] == "41231" and "train.py" in line
        await pilot.click(ProcessPanel, offset=(5, 0))
        assert isinstance(app.screen, ProcessPopup), "there is no heading to sort by"


def test_filter_matches_pid_user_and_command() -> None:
    assert [p.pid for p in arrange([A, B, C], "pid", "PYTHON")] == [1, 2]
    assert [p.pid for p in arrange([A, B, C], "pid", "3")] == [3]
    assert [p.pid for p in arrange([A, B, C], "pid", "ana")] == [1, 2, 3]
    assert arrange([A, B, C], "pid", "nobody") == []
