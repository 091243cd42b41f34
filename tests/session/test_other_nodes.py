"""Captures of ranks on other nodes: a stand-in for ssh runs gputop here, or says what a hostile node would."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
from pathlib import Path

import pytest

from gputop.profiler import storage
from gputop.profiler.capture.multi_worker import MultiWorkerCapture, capture_workers
from gputop.profiler.capture.request import CaptureRequest
from gputop.profiler.kineto import recorder
from gputop.profiler.storage import RunFolder
from gputop.profiler.ways import recorder_of
from gputop.session import other_nodes
from gputop.session.other_nodes import OtherNodes
from gputop.telemetry import agents
from gputop.trace.readers.load import load
from tests.profiler.kineto.jobs import fake_job
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
MEETING = "n1:29500"
READY = '{"schema":"gputop.ranks/1","seconds":0.2,"lead_s":0.0,"time_s":1}'
TRACE = '{"traceEvents": []}'


def ranks(*sizes: int, received_s: float = 1, **of_rank: float) -> str:
    """The line of a node whose ranks' traces have these sizes."""
    own = [{"address": "pid:1", "name": "a", "size": size, **of_rank} for size in sizes]
    return json.dumps({"schema": "gputop.ranks/1", "received_s": received_s, "ranks": own})


def answers(line: str, then: str = "cat") -> str:
    """The script of a node that is ready, says so once it is asked, and goes on like that."""
    return f"echo '{READY}'; read line; echo '{line}'; {then}"


SENDS = answers(ranks(len(TRACE)), f"printf '%s' '{TRACE}'")
# kineto asks for work every five seconds, the jobs here twenty times a second: as long is waited for them.
IMPATIENT = {"POLL_PERIOD_S": 0.1, "_LEAD_S": 0.3}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in IMPATIENT.items():
        monkeypatch.setattr(recorder, name, seconds)


def _ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """An ssh that runs ``script`` with the node in $node and what is to run there in $command. A script that does not
    run that has read the question."""
    script = script if "$command" in script else f"read question\n{script}"
    (tmp_path / "bin").mkdir()
    ssh = tmp_path / "bin" / "ssh"
    ssh.write_text('#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nnode=$2\ncommand=$3\n'
                   f'cd {tmp_path}\necho "$command" >> asked\n{script}\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ssh.parent}:{os.environ['PATH']}")


def _gputop_of(tmp_path: Path, pids: list[int]) -> str:
    """A command that is gputop on a node whose ranks are these processes, which have no PyTorch."""
    command = tmp_path / "gputop-there"
    command.write_text(f"#!{sys.executable}\n"
                       f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
                       "from gputop.commands import capture_ranks\n"
                       "from gputop.launch.serve import Ready\n"
                       "from gputop.profiler.kineto import recorder\n"
                       f"recorder.__dict__.update({IMPATIENT})\n"
                       f"capture_ranks.find_ranks = lambda address: {pids}\n"
                       "capture_ranks.make_ready = lambda pid: Ready(f'pid:{pid}', '')\n"
                       "from gputop.cli import main\n"
                       "sys.exit(main())\n")
    command.chmod(0o755)
    return str(command)


def _capture(pid: int, tmp_path: Path, nodes: list[str], command: str, seconds: float = 0.2) -> tuple[
        MultiWorkerCapture, tuple, tuple[str, ...]]:
    request = CaptureRequest(seconds, tmp_path / "logs", force=True)
    stop = threading.Event()
    others = OtherNodes(nodes, MEETING, command, stop)
    with others.running(request):
        captured = capture_workers([recorder_of(f"pid:{pid}")], request, lambda _: None, lambda _: None, stop,
                                   others.agree)
        return captured, *others.collect(captured.run_dir)


def test_ranks_of_all_nodes_are_recorded_together_into_one_folder(place, tmp_path, monkeypatch):
    _ssh(tmp_path, monkeypatch, 'case $node in n3) echo "connect to host n3: Connection refused" >&2; exit 255;; esac\n'
                                'echo Welcome to $node\nexec sh -c "$command"')
    with fake_job(place, RANK="0") as here, fake_job(place, RANK="1") as there:
        captured, outcomes, missing = _capture(here.pid, tmp_path, ["n2", "n3"], _gputop_of(tmp_path, [there.pid]))
    (outcome,) = outcomes
    assert outcome.result is not None and outcome.result.path.parent == captured.run_dir
    assert outcome.address == f"n2 pid:{there.pid}" and outcome.clock is not None and outcome.clock.offset_ns == 0
    assert len(missing) == 1 and missing[0].startswith("not captured: n3: the node refuses connections")
    assert {line.rank for line in load([captured.run_dir]).lines} == {0, 1}
    assert set((tmp_path / "asked").read_text().splitlines()) == {f"{tmp_path}/gputop-there agent"}


def test_a_node_without_such_a_rank_says_so(place, tmp_path, monkeypatch):
    _ssh(tmp_path, monkeypatch, 'exec sh -c "$command"')
    with fake_job(place) as here:
        _, outcomes, (missing,) = _capture(here.pid, tmp_path, ["n2"], _gputop_of(tmp_path, []))
    assert outcomes == () and "no rank of the job with rendezvous address n1:29500 runs here" in missing


@pytest.mark.parametrize(("script", "reason"), [
    ("exit 127", "is not installed on the node"),
    ("yes hm | head -5000", "exited without an answer"),
    (f"echo '{READY[:-1]}'", "exited without an answer"),
    ("echo '" + READY.replace("0.2", "1e9") + "'; cat", "reported an invalid capture length"),
    ("echo '" + READY.replace("0.2", "1e-9") + "'; cat", "reported an invalid capture length"),
    ("echo '" + READY.replace(":1}", ":1e29}") + "'; cat", "an impossible time"),
    (answers(ranks(received_s=-1e29)), "an impossible time"),
    (answers(ranks(len(TRACE), began_s=1e29), f"printf '%s' '{TRACE}'; cat"), "an impossible time"),
    (answers("nothing", "exit"), "exited without an answer"),
    ("head -c 20000000 /dev/zero >&2; cat", "printed more than 8 MB"),
    (answers(ranks(5_000_000_000_000)), "too large"), (answers(ranks(0)), "too large"),
    (answers(ranks(500), "echo '{\"traceEvents\": ['"), "was lost while the node sent its traces"),
    (answers(ranks(500), "head -c 500 /dev/zero; cat"), "sent data that is not a trace"),
    (answers(ranks(19), "printf '%s' '{\"traceEvents\": [], '; cat"), "sent data that is not a trace"),
    (answers(ranks(*[4_000_000_000] * 3)), "too large (12.0 GB)"),
    # One that goes silent once it is ready, one that says for ever that it goes on, one that sends too slowly.
    (f"echo '{READY}'; read line; cat", "the node sent nothing for"),
    (f"""echo '{READY}'; read line; while echo '{{"schema":"gputop.ranks/1","alive":true}}'; do :; done""",
     "exited without an answer"),
    (answers(ranks(500), "printf '{\"traceEvents\": ['; cat"), "the node sent nothing for"),
])
def test_what_a_node_does_wrong_is_told_and_the_others_are_captured(place, tmp_path, monkeypatch, script, reason):
    if script.endswith("'; cat"):  # it goes on, however long its end is waited for
        monkeypatch.setattr(agents, "_END_TIMEOUT_S", 0.1)
    if "sent nothing" in reason:
        monkeypatch.setattr(other_nodes, "_SILENT_S", 0.5)
    _ssh(tmp_path, monkeypatch, script)
    with fake_job(place) as here:
        captured, outcomes, (missing,) = _capture(here.pid, tmp_path, ["n2"], "gputop")
    assert len(captured.captured) == 1 and outcomes == () and reason in missing
    assert len(list(captured.run_dir.glob("*.pt.trace.json"))) == 1


def test_a_name_from_another_node_leads_nowhere(place, tmp_path, monkeypatch):
    line = ('{"schema":"gputop.ranks/1","received_s":1,"ranks":[{"address":"pid:1\\u001b[31m","name":"../../../x/y",'
            f'"size":{len(TRACE)}}},{{"address":"pid:2","name":"b","problem":"it ended"}}]}}')
    _ssh(tmp_path, monkeypatch, answers(line, f"printf '%s' '{TRACE}'"))
    with fake_job(place) as here:
        captured, outcomes, missing = _capture(here.pid, tmp_path, ["n2"], "gputop")
    assert missing == () and "\x1b" not in outcomes[0].address
    assert outcomes[0].result.path.parent == captured.run_dir and outcomes[0].result.path.read_text() == TRACE
    assert outcomes[1].error.message == "it ended"


def test_the_shortest_plan_of_all_nodes_counts(place, tmp_path, monkeypatch):
    ready = READY.replace("0.2", "0.1")
    _ssh(tmp_path, monkeypatch, f"echo '{ready}'; read line; echo \"$line\" > told; echo '{ranks()}'")
    with fake_job(place) as here:
        captured, *_ = _capture(here.pid, tmp_path, ["n2"], "gputop", 0.3)
    assert captured.plan.chosen_s == 0.1 and '"seconds":0.1' in (tmp_path / "told").read_text()


def test_a_node_far_below_the_median_is_left_out_and_named(place, tmp_path, monkeypatch):
    ready = {node: READY.replace("0.2", seconds) for node, seconds in (("n2", "0.3"), ("n3", "0.05"))}
    _ssh(tmp_path, monkeypatch, f"case $node in n2) echo '{ready['n2']}';; n3) echo '{ready['n3']}';; esac; read line; "
                                f"echo \"$node $line\" >> told; echo '{ranks()}'")
    with fake_job(place) as here:
        captured, _, (missing,) = _capture(here.pid, tmp_path, ["n2", "n3"], "gputop", 0.3)
    assert captured.plan.chosen_s == 0.3
    assert missing.startswith("not captured: n3: the node's ranks can be recorded for only 0.05 s, and half of the "
                              "nodes for 0.3 s")
    assert '"seconds":0.3' in (tmp_path / "told").read_text() and "n3 {" not in (tmp_path / "told").read_text()


def test_a_stop_ends_the_wait_for_a_node_and_what_is_there_is_kept(place, tmp_path, monkeypatch):
    monkeypatch.setattr(other_nodes, "_STOPPED_S", 0.1)
    _ssh(tmp_path, monkeypatch, f"echo '{READY}'; read line; case $node in n2) echo '{ranks(len(TRACE))}'; "
                                f"printf '%s' '{TRACE}';; n3) cat;; esac")
    request, stop = CaptureRequest(0.2, tmp_path / "logs", force=True), threading.Event()
    others = OtherNodes(["n2", "n3"], MEETING, "gputop", stop)
    with fake_job(place) as here, others.running(request):
        captured = capture_workers([recorder_of(f"pid:{here.pid}")], request, lambda _: None, lambda _: None, stop,
                                   others.agree)
        others._run = captured.run_dir
        others._collecting.set()
        others._nodes[0].thread.join(PATIENCE_S)
        stop.set()
        outcomes, (missing,) = others.collect(captured.run_dir)
    assert [outcome.name for outcome in outcomes] == ["a.pt.trace.json"]
    assert missing.startswith("not captured: n3: the capture was stopped before all traces from the node arrived")


def test_a_trace_that_would_take_the_reserve_of_the_disk_is_not_begun(place, tmp_path, monkeypatch):
    _ssh(tmp_path, monkeypatch, SENDS)
    monkeypatch.setattr(storage, "_RESERVED_PARTS", 1)
    monkeypatch.setattr(storage, "_RESERVED_BYTES", 1 << 60)
    with fake_job(place) as here:
        captured, outcomes, (missing,) = _capture(here.pid, tmp_path, ["n2"], "gputop")
    assert len(captured.captured) == 1 and outcomes == () and "No space left on device" in missing


def test_a_node_that_builds_says_that_it_goes_on():
    said = io.BytesIO(b'{"schema":"gputop.ranks/1","alive":true}\n' * 3
                      + f"{ranks()}\n".encode())
    came: list[int] = []
    assert other_nodes.read_line(said, other_nodes.Ranks, lambda _: came.append(1)).ranks == ()
    assert len(came) == 4


def test_a_trace_that_cannot_be_saved_here_is_a_problem_of_its_node(place, tmp_path, monkeypatch):
    """Two ranks of one name: the second trace would replace the first."""
    _ssh(tmp_path, monkeypatch, answers(ranks(len(TRACE), len(TRACE)), f"printf '%s' '{TRACE * 2}'"))
    with fake_job(place) as here:
        _, outcomes, (missing,) = _capture(here.pid, tmp_path, ["n2"], "gputop")
    assert len(outcomes) == 1 and "a trace with this name already exists" in missing and "bug" not in missing


def test_a_node_that_ssh_cannot_reach_for_want_of_ssh_is_told(place, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with fake_job(place) as here:
        _, _, (missing,) = _capture(here.pid, tmp_path, ["n2"], "gputop")
    assert missing.startswith("not captured: n2: cannot start ssh") and "bug" not in missing


def test_a_trace_larger_than_the_free_space_is_not_begun(place, tmp_path, monkeypatch):
    _ssh(tmp_path, monkeypatch, answers(ranks(4_000_000_000), "printf begin; cat"))
    monkeypatch.setattr(agents, "_END_TIMEOUT_S", 0.1)
    monkeypatch.setattr(RunFolder, "free_bytes", lambda self, reserve=False: 3_000_000_000)
    with fake_job(place) as here:
        captured, outcomes, (missing,) = _capture(here.pid, tmp_path, ["n2"], "gputop")
    assert len(captured.captured) == 1 and outcomes == () and "No space left on device" in missing
