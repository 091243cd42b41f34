"""The boxes over the monitor: a process, the host, the job, the GPU numbers of a finding; copying; help and palette."""

from __future__ import annotations

import re
import signal

import pytest
from textual.app import SystemCommand
from textual.command import CommandList

from gputop.core.errors import GputopError
from gputop.core.findings import Finding
from gputop.core.metrics import ADAPTER_METRICS, CGROUP_METRICS
from gputop.core.samples import AdapterSample, CgroupSample, HostProcess, PodContainer, ProcessSample, Reading
from gputop.profiler.capture.records import Server
from gputop.profiler.capture.request import ask_other_job
from gputop.render.palette import BAD, BOLD, WARN
from gputop.session.gpu_numbers import GpuNumbers
from gputop.telemetry.history import History
from gputop.tui import open_screens
from gputop.tui.keys import MONITOR, key_groups, name
from gputop.tui.monitor import status_lines
from gputop.tui.monitor.columns import METRICS
from gputop.tui.monitor.gpu_table import GpuTable
from gputop.tui.monitor.process_panel import ProcessPanel
from gputop.tui.screens.details import host_text, job_text, process_text
from gputop.tui.screens.dialogs import LivePopup, with_comments_above
from gputop.tui.screens.finding import FindingPopup, finding_parts
from gputop.tui.screens.process_screens import ProcessPopup, SignalScreen
from gputop.tui.screens.tables_screen import TablesScreen
from gputop.tui.widgets.dialog_frame import WrappedText
from tests.analyses import make_analysis
from tests.fakes import START_S, StillSession, cgroup_sample, node_sample, reading
from tests.records import replace
from tests.tui.found import HEAVY, SMALL, FoundSession, box_text, line_text, piloted, text_of, until
from tests.tui.screens.signaling import SignalingSession, open_signals
from tests.tui.screens.tabled import TabledSession
from tests.tui.textual_private import clear_notifications, message_text

SECRET = "hf_" + "a1B2" * 8


async def test_a_signal_is_sent_only_after_the_question_is_answered() -> None:
    session = SignalingSession()
    async with piloted(session) as (app, pilot):
        signals = await open_signals(app, pilot)
        await pilot.press("y")
        assert isinstance(app.screen, SignalScreen) and session.sent == [], "y alone sends nothing"
        await pilot.press("down", "enter")
        assert "Send SIGTERM to 41231?" in text_of(signals)
        await pilot.press("down")
        assert signals.number is signal.SIGTERM, "what was asked for stays"
        await pilot.press("n")
        assert not signals.asked
        await pilot.press("up", "enter", "y")
        await pilot.pause()
        assert session.sent == [(41231, signal.SIGINT)] and "SIGINT was sent to process 41231" in message_text(app)


async def test_a_refused_signal_is_reported_with_its_reason() -> None:
    session = SignalingSession(GputopError("41231 belongs to bob, you are ana", "Ask its owner."))
    async with piloted(session) as (app, pilot):
        await open_signals(app, pilot)
        await pilot.press("enter", "y")
        await pilot.pause()
        assert "41231 belongs to bob, you are ana" in message_text(app) and "Ask its owner" in message_text(app)


def test_neither_recordings_nor_simulations_get_signals() -> None:
    session = StillSession()
    process = node_sample(1).processes[0]
    session.feed.source = type("Simulated", (), {"simulated": True})()
    with pytest.raises(GputopError, match="simulated"):
        session.signal(process, signal.SIGTERM)
    session.feed.player = object()  # type: ignore[assignment]
    with pytest.raises(GputopError, match="recording"):
        session.signal(process, signal.SIGTERM)


async def test_the_details_of_a_process_and_its_copied_command_hide_secrets() -> None:
    session = StillSession()
    process = replace(session.feed.sample.processes[0], command=f"python train.py --hf-token {SECRET}", parent_pid=7,
                      cuda_visible_devices="0,1", container="docker 0123")
    session.feed.sample = replace(session.feed.sample, processes=(process,))
    async with piloted(session, (200, 40)) as (app, pilot):
        panel = app.query_one(ProcessPanel)
        assert "--hf-token ***" in text_of(panel) and SECRET not in text_of(panel)
        panel.focus()
        await pilot.press("enter")
        assert isinstance(app.screen, ProcessPopup)
        text = box_text(app)
        assert "--hf-token ***" in text and SECRET not in text
        for part in ("docker 0123", "CUDA_VISIBLE_DEVICES  0,1", "6.4 cores", "70.8 GiB", "40.0 GiB"):
            assert part in text
        await pilot.press("y")
        assert app.clipboard == "python train.py --hf-token ***"


def test_what_is_not_known_of_a_process_says_why() -> None:
    why = "access denied"
    process = ProcessSample(9, None, None, Reading.missing("cores", why), Reading.missing("bytes", why), reason=why,
                            reasons={"user": why, "cuda_visible_devices": why, "container": why})
    text = str(process_text(process, START_S, gone=True))
    assert text.count(why) >= 6 and "last sample" in text and "not set" not in text and text.endswith("\nGPU   none\n")


def test_a_process_shows_its_pod_or_why_its_name_is_not_known() -> None:
    missing = Reading.missing("count", "not sampled")
    inside = ProcessSample(9, "ana", "python train.py", missing, missing, container="containerd 0123456789ab",
                           kubernetes=PodContainer("1b2c-3d", "c" * 64, "llama-0", "ml\x1b", "train"))
    text = str(process_text(inside, START_S))
    assert re.search(r"^pod +ml\ufffd/llama-0 +container train$", text, re.M)
    assert re.search(r"^pod UID +1b2c-3d$", text, re.M)
    unnamed = replace(inside, kubernetes=PodContainer("1b2c-3d", "c" * 64, reason="no log link"))
    assert re.search(r"^pod +N/A +no log link$", str(process_text(unnamed, START_S)), re.M)
    assert "pod" not in str(process_text(replace(inside, kubernetes=None), START_S))


async def test_host_and_job_open_by_key_and_by_mouse_and_follow_the_samples() -> None:
    session = FoundSession()
    async with piloted(session) as (app, pilot):
        await pilot.press("h")
        assert isinstance(app.screen, LivePopup) and "I/O wait" in box_text(app)
        sample = session.feed.sample
        session.feed.sample = replace(sample, host=replace(sample.host, hostname="other-node"))
        app._refresh_all()
        assert "other-node" in box_text(app)
        await pilot.press("escape")
        await pilot.click("#host", offset=(3, 0))
        assert "I/O wait" in box_text(app)
        await pilot.press("escape", "i")
        assert "127.0.0.1:6009" in box_text(app) and "PID 41231" in box_text(app)
        await pilot.press("escape")
        await pilot.click("#job", offset=(3, 0))
        assert "Profiler servers" in box_text(app)


def test_the_host_in_full() -> None:
    sample = node_sample(1)
    host = replace(sample.host, core_ratios=(0.0, 0.5, 1.0) * 30, cpu_limit_cores=4.0)
    text = str(host_text(replace(sample, host=host)))
    assert "30 full" in text and "4 cores" in text and text.count("█!") == 30 and "   64  " in text
    assert "the load of individual cores is unknown" in str(host_text(sample)) and "the test says so" in text
    assert "no process holds a GPU" in str(host_text(replace(sample, processes=())))


BUSY = tuple(HostProcess(pid, "ana", f"proc-{pid} --token {SECRET}", Reading(cores, "count"), Reading(rss, "bytes"))
             for pid, cores, rss in ((41231, 6.0, 40e9), (7, 31.0, 1e9), (8, 0.0, 90e9), (9, 0.01, 0.0)))


def test_the_host_names_the_processes_that_use_most_also_without_a_gpu() -> None:
    sample = node_sample(1)
    assert "All processes by CPU  each" in str(host_text(sample)) and str(host_text(sample)).count("not sampled") == 2
    host = replace(sample.host, top_processes=BUSY, top_reason=None)
    text = str(host_text(replace(sample, host=host), width=80))
    by_cpu, by_memory = text.split("All processes by CPU")[1].split("All processes by memory")
    assert [line.split()[0] for line in by_cpu.splitlines()[1:] if line] == ["7", "41231"], "not those that use none"
    assert [line.split()[0] for line in by_memory.splitlines()[1:] if line] == ["8", "41231", "7"]
    assert "GPU 0-7" in by_cpu and SECRET not in text and max(map(len, by_cpu.splitlines()[1:])) <= 80
    first = tuple(replace(p, cpu_cores=Reading.missing("count", "first sample: a rate needs two "
                                                                "samples")) for p in BUSY)
    assert "N/A: first sample" in str(host_text(replace(sample, host=replace(host, top_processes=first))))


def test_control_groups_show_what_is_used_of_what_is_granted_and_what_is_strained() -> None:
    job = cgroup_sample("slurm 48213", cpu_limit_cores=8.0, cpu_used_cores=7.9, cpu_throttled_ratio=0.41,
                        memory_limit_bytes=64e9, memory_used_bytes=60e9, oom_kills=2.0)
    own = cgroup_sample("/user.slice", cpu_limit_cores=None, cpu_used_cores=0.2, cpu_throttled_ratio=None,
                        memory_limit_bytes=None, memory_used_bytes=1e9, oom_kills=0.0)
    sample = node_sample(1)
    (process,) = sample.processes
    ranks = tuple(replace(process, pid=pid, cgroup=job) for pid in range(100, 106))
    shown = host_text(replace(sample, host=replace(sample.host, cgroup=own), processes=ranks))
    text = str(shown)
    assert "Control group of gputop  /user.slice" in text and "0.2 cores  no limit" in text
    assert "Control group of PID 100, 101, 102, 103 …  slurm 48213" in text and text.count("slurm 48213") == 1
    assert "7.9 of 8 cores" in text and "55.9 GiB of 59.6 GiB, 94%" in text and "OOM kills             2" in text
    marked = {text[span.start:span.end].rstrip() for span in shown.spans if span.style in (WARN, BAD)}
    assert {"41%", "55.9 GiB of 59.6 GiB, 94%", "2"} <= marked
    assert "slurm 48213, all of its processes" in str(process_text(ranks[0], START_S))
    same = replace(sample, host=replace(sample.host, cgroup=job), processes=ranks[:1])
    assert "Control group of gputop and PID 100" in str(host_text(same))
    unseen = CgroupSample("/x", {m: Reading.missing(metric.unit, "cannot be seen") for m, metric in
                                 CGROUP_METRICS.items()})
    text = str(host_text(replace(sample, host=replace(sample.host, cgroup=unseen))))
    assert len(re.findall("N/A +cannot be seen", text)) == 2 and "0.0 cores" not in text


def test_the_job_without_a_server_says_how_to_start_one() -> None:
    session = StillSession()
    assert "server.start(6009)" in str(job_text(session))
    session.watch.servers = (Server("127.0.0.1:1", problem="the node does not answer", asked=True),)
    assert "the node does not answer" in str(job_text(session))


async def test_the_question_about_another_job_at_a_named_address_names_its_script_and_user() -> None:
    async with piloted(StillSession(), (80, 24)) as (app, pilot):
        server = Server("127.0.0.1:9877", "TensorFlow 2.21.0: /opt/venv/bin/python serve.py /x", 8100, owner="eve")
        open_screens.ask_before_capture(app, ask_other_job(app.session.control.request(), server,
                                                           Server("127.0.0.1:6009")))
        await pilot.pause()
        question, about = (str(part.text) for part in app.screen.query(WrappedText))
        assert question == "Another job now answers at 127.0.0.1:9877. Capture from it? y/N"
        assert about.startswith("127.0.0.1:9877  serve.py /x (TensorFlow 2.21.0)\n\nIt belongs to user eve. A capture "
                                "slows that job down,")


@pytest.mark.parametrize(("written", "copied"), [
    ("a\x1b[201~;rm -rf ~\nb", "a\ufffd[201~;rm -rf ~\nb"),  # the end of a bracketed paste, and what would be typed
    ("a\rb\r\nc", "a b\nc"), ("if x:\n\ty", "if x:\n    y"), ("a\x9b201~\x07\x00", "a\ufffd201~\ufffd\ufffd"),
    ("a\u202eb\u200bc\u2028d\ud800", "a\ufffdb\ufffdc d\ufffd"), ("x" * 200_000, "x" * 100_000),
])
async def test_what_is_pasted_types_nothing(written: str, copied: str) -> None:
    """A snapshot of somebody else's, whose findings have code."""
    session = FoundSession()
    session.change_capture(analysis=make_analysis(findings=[replace(HEAVY, snippet=written)]))
    session.results.refresh()
    async with piloted(session) as (app, pilot):
        await pilot.press("r", "y")
        await pilot.pause()
        assert app.clipboard == copied
        await pilot.press("enter", "y")
        await pilot.pause()
        assert app.clipboard == copied


def test_a_command_that_is_copied_is_one_line() -> None:
    finding = replace(HEAVY, snippet="", ncu="ncu -k x\nrm -rf ~\n", origin="trace")
    assert FindingPopup(finding, lambda _: None).copied()[0] == "ncu -k x rm -rf ~"


async def test_the_code_of_a_finding_is_copied_from_the_panel_and_from_its_details() -> None:
    async with piloted(FoundSession()) as (app, pilot):
        await pilot.press("r", "y")
        await pilot.pause()
        assert app.clipboard == HEAVY.snippet and "OSC 52" in message_text(app)
        clear_notifications(app)
        app.session.results.findings = (replace(SMALL, snippet=None),)
        app._refresh_actions()
        await pilot.press("y")
        await pilot.pause()
        assert "The finding as Markdown" in message_text(app) and SMALL.title in app.clipboard
        await pilot.press("enter", "y")
        await pilot.pause()
        assert "no code to copy" in message_text(app)


def parts_text(finding: Finding, numbers: GpuNumbers | None) -> str:
    return "\n".join(str(getattr(part, "text", part)) for part in finding_parts(finding, numbers))


def test_the_details_of_a_finding_tell_its_rule_its_consequences_and_whose_gpu_numbers() -> None:
    nested = replace(SMALL, id="low_sm_active", title="inner", why="because of it", origin="live")
    finding = replace(HEAVY, consequences=(replace(SMALL, consequences=(nested,)),), gpus=(2,))
    text = parts_text(finding, GpuNumbers({0: 2}, "By CUDA_VISIBLE_DEVICES=2."))
    assert "GPU 0 of the process = GPU 2 of the node" in text and "Rule  gpu0_oversubscribed" in text
    assert "because of it" in text and "low_sm_active, live" in text and SMALL.why in text
    assert "of the process" not in parts_text(replace(finding, origin="live"), GpuNumbers({0: 2}))


def test_a_comment_that_does_not_fit_stands_above_its_line_of_code() -> None:
    code = ("with scope():  # the job's own, and metrics too\n    fit(a, b)  # short\n    # of two words or more\n"
            "x = '# no'")
    assert with_comments_above(code, 100) == code
    assert with_comments_above(code, 24).split("\n") == [
        "# the job's own, and", "# metrics too", "with scope():", "    fit(a, b)  # short", "    # of two words or",
        "    # more", "x = '# no'"]
    url = "x = get('https://example.org/a#  b', '# c')"
    assert with_comments_above(url, 20) == url, "that is no comment"


async def test_findings_carry_the_nodes_gpu_numbers_in_the_app() -> None:
    session = FoundSession()
    process = replace(session.feed.sample.processes[0], cuda_visible_devices="3",
                      gpus={3: session.feed.sample.processes[0].gpus[3]})
    session.feed.sample = replace(session.feed.sample, processes=(process,))
    found = make_analysis(gpus=[{"gpu": 0}], findings=session.results.last_capture.findings)
    session.capture_ended(replace(session.results.last_capture, analysis=found), session.watch.servers)
    assert next(f for f in session.results.findings if f.id == HEAVY.id).gpus == (3,)
    async with piloted(session) as (app, pilot):
        assert "The job's GPU 0 is GPU 3 on this node." in text_of(app._actions)
        await pilot.press("r", "enter")
        assert "GPU 0 of the process = GPU 3 of the node" in box_text(app)
    session.capture_ended(replace(session.results.last_capture, analysis=found), 2 * [*session.watch.servers])
    assert "several workers" in (session.results.gpu_numbers.reason or "")
    assert next(f for f in session.results.findings if f.id == HEAVY.id).gpus == HEAVY.gpus


# -- help and palette -------------------------------------------------------------------------


async def test_help_lists_the_keys_of_the_screen_one_is_on() -> None:
    async with piloted(FoundSession(), (120, 60)) as (app, pilot):
        await pilot.press("question_mark")
        text = box_text(app)
        lefts = [title for title in ("Capture", "Results", "Time") if f"\n{title}" in f"\n{text}"]
        assert lefts == ["Capture", "Results", "Time"] and text.index("Capture") < text.index("Results")
        assert text.index("What to do, where you are") < text.index("Processes (tab)")
        for binding in MONITOR:
            assert name(binding.key.split(",")[0]) in text and binding.tooltip.split()[0].rstrip(",;") in text
        assert "Each row is a GPU" in text and "server.start(6009)" in text
        await pilot.press("escape")
        app.query_one(GpuTable).focus()
        await pilot.press("enter", "question_mark")
        assert "and the wheel" in box_text(app) and "capture a trace" not in box_text(app)


@pytest.mark.parametrize("width", [40, 80, 200])
async def test_help_is_broken_at_its_key_column(width: int) -> None:
    async with piloted(StillSession(), (width, 24)) as (app, pilot):
        headings = {title for title, _ in key_groups(app.screen)}
        await pilot.press("question_mark")
        lines = box_text(app).splitlines()
        at = next(i for i, line in enumerate(lines) if line.lstrip().startswith("C  "))
        column = lines[at].index("capture at")
        assert lines[at + 1].startswith(" " * column)
        assert (" h  host" in lines[1]) == (width >= 80), "two columns where there is room"
        text = app.screen.query_one(WrappedText).text
        bold = {text.plain[span.start:span.end].strip() for span in text.spans if span.style == BOLD}
        assert bold == headings, "nothing beside them is"


async def test_the_palette_has_every_key_with_a_sentence_and_runs_it() -> None:
    async with piloted(FoundSession()) as (app, pilot):
        found: dict[str, SystemCommand] = {c.title: c for c in app.get_system_commands(app.screen)}
        use = ("Capture a trace", "Attach to a profiler server", "Timeline", "Tables", "Captures", "Mark as A",
               "Compare with A", "Snapshot", "Host", "Job", "Filter processes", "Details", "Copy")
        assert [title for title in found if title in use] == list(use) and all(found[title].help for title in use)
        assert not {"Up", "Down"} & found.keys()
        await found["Host"].callback()  # type: ignore[misc]
        assert isinstance(app.screen, LivePopup)
        await pilot.press("escape")
        await found["Copy"].callback()  # type: ignore[misc]
        await pilot.pause()
        assert app.clipboard == HEAVY.snippet
        await pilot.press("ctrl+p")
        await pilot.pause()
        await pilot.press(*"in the lanes")  # words of what it does
        await until(pilot, lambda: app.screen.query(CommandList).first().option_count)
        await pilot.press("enter")
        await until(pilot, lambda: app.query_one(GpuTable).metric == METRICS[1])


async def test_keys_of_the_picture_do_nothing_where_it_is_covered() -> None:
    async with piloted(TabledSession()) as (app, pilot):
        await pilot.press("T")
        assert isinstance(app.screen, TablesScreen)
        assert next(iter(app.get_system_commands(app.screen))).title == "Next table", "those of the screen come first"
        await pilot.press("m", "space", "left_square_bracket")
        assert app.screen_stack[0].query_one(GpuTable).metric == METRICS[0] and not app.paused
        await pilot.press("question_mark")
        assert "next metric" not in box_text(app) and "capture a trace" in box_text(app)
        await pilot.press("escape", "h")
        assert isinstance(app.screen, LivePopup)


def adapters(*loads: float | None) -> tuple[AdapterSample, ...]:
    return tuple(AdapterSample(f"mlx5_{i}", "ACTIVE", "InfiniBand", i, {
        metric: reading(value, ADAPTER_METRICS[metric].unit) for metric, value in {
            "rdma_rx_bytes_per_s": None if load is None else 50e9 * load, "rdma_tx_bytes_per_s": 1e9,
            "rdma_max_bytes_per_s": 50e9, "rdma_retransmits": 7}.items()}) for i, load in enumerate(loads))


def test_rdma_stands_in_the_host_line_and_each_adapter_with_its_history_in_the_details() -> None:
    sample = node_sample(1)
    history = History()
    for load in (0.0, 0.5, 0.9):
        sample = replace(sample, time_s=sample.time_s + 1, host=replace(sample.host, adapters=adapters(load, None)))
        history.append(sample)
    line = line_text(status_lines.host(sample, 200))
    assert " RDMA ×2 ↓ 45.0 GB/s ↑ 2.0 GB/s, fullest 90%" in line, line
    assert "RDMA" not in line_text(status_lines.host(node_sample(1), 200))
    text = str(host_text(sample, 100, history.host(60.0)))
    assert "RDMA adapter mlx5_0  InfiniBand ACTIVE, NUMA node 0" in text and "90% of the link" in text
    assert "▁▅█" in text and "the test says so" in text.partition("mlx5_1")[2]


def test_the_job_on_a_node_without_gpus_has_no_step_period_of_them() -> None:
    session = FoundSession()
    session.feed.sample = replace(session.feed.sample, gpus=())
    text = str(job_text(session))
    assert "there are no GPUs here. In the last capture, a step took 412 ms." in text and "GPUs' load" not in text
