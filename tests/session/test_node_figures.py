"""The live figures of workers on other nodes: what is read of a snapshot, of a Prometheus, and of nodes that fail."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from gputop.cluster import node_means as prometheus_means
from gputop.commands.common import node_means_by
from gputop.core import codec
from gputop.core.errors import GputopError
from gputop.profiler import addresses
from gputop.profiler.capture.records import Server
from gputop.session import worker_figures
from gputop.session.options import FigureOptions
from gputop.session.worker_figures import (
    AskedFigures,
    WorkerFigures,
    ask,
    by_prometheus,
    by_ssh,
    choose,
    of_answer,
)
from gputop.telemetry import node_answer
from gputop.telemetry.node_answer import NodeAnswer
from tests.advice.live.scene import Job, Scene, recorded
from tests.fakes import StillSession, node_sample
from tests.records import replace

NOBODY = threading.Event()


def node(active: Mapping[int, float], *, served: Mapping[int, int] | None = None) -> NodeAnswer:
    """Of a node whose GPU ``i`` is held by the process 100 + i. ``served``: by port the process of a server."""
    scene = Scene(dict(active), jobs=[Job(100 + i, [i]) for i in active], gpus=len(active))
    history, (*_, sample) = recorded(scene, 10)
    return node_answer.answer_of(sample, history, 5.0, [Server(f"127.0.0.{i}:{port}", pid=pid)
                                                        for i, (port, pid) in enumerate((served or {}).items())])


def test_a_worker_is_the_process_that_serves_its_port() -> None:
    by_port, only = of_answer(node({0: 0.5, 1: 0.7}, served={6009: 101, 6010: 100, 6011: 999}))
    assert {port: (own.means["sm_active"], own.gpus) for port, own in by_port.items()} == {
        6009: (0.7, "1"), 6010: (0.5, "0")}
    assert only is None, "there are two processes on GPUs"
    _, only = of_answer(node({0: 0.5}))
    assert only is not None and (only.means["sm_active"], only.seconds, only.gpus) == (0.5, 5.0, "0")


def test_a_port_that_two_processes_serve_is_nobodys() -> None:
    both = node({0: 0.5, 1: 0.7}, served={6009: 100})
    second = replace(both.gpus[1], holders=(replace(both.gpus[1].holders[0], ports=(6009,)),))
    assert set(of_answer(both)[0]) == {6009}
    assert of_answer(replace(both, gpus=(both.gpus[0], second)))[0] == {}


def test_what_no_gpu_measures_is_no_figure() -> None:
    one = node({0: 0.5}, served={6009: 100})
    at = node_answer.FIGURES.index("sm_active")
    for value in (1e308, -0.5, None):
        values = tuple(value if i == at else None for i in range(len(node_answer.FIGURES)))
        answer = replace(one, gpus=(replace(one.gpus[0], values=values),))
        assert of_answer(answer)[0][6009].means == {}


def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """An ssh that runs ``script`` with the node in $node."""
    (tmp_path / "ssh").write_text('#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nnode=$2\ncommand=$3\n'
                                  f'cd {tmp_path}\n{script}\n')
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(addresses, "is_local", lambda address: address.startswith("127."))


@pytest.fixture(scope="module")
def said() -> str:
    """What a node of 8 GPUs that one process holds says."""
    return codec.encode(node_answer.answer_of(node_sample(9), StillSession().feed.history, 5.0)).decode() + "\n"


def test_nodes_are_asked_for_some_seconds_and_those_that_fail_are_told_together(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    (tmp_path / "said").write_text(said)
    answers(tmp_path, monkeypatch, """\
read line
echo "$command $line" >> asked
case $node in n3|n4) echo "ssh: connect to host $node port 22: Connection refused" >&2; exit 255;; n5) echo hm;;
*) cat said;; esac""")
    workers = [Server(f"n{i}:6009") for i in range(1, 6)] + [Server(f"n6:{port}") for port in (1, 2)]
    workers += [Server("-n:6009"), Server("127.0.0.1:1"), Server("127.0.0.1:2", pid=7)]
    progress: list[tuple[int, int]] = []
    asked = by_ssh(workers, "/opt/gputop", NOBODY, lambda *state: progress.append(state))
    assert set(asked.by_address) == {"n1:6009", "n2:6009"} and asked.how == "asked by ssh"
    assert asked.by_address["n1:6009"].gpus == "0-7" and 0 < asked.by_address["n1:6009"].means["sm_active"] < 1
    (line,) = set((tmp_path / "asked").read_text().splitlines())
    assert line.startswith('/opt/gputop agent {"schema":"gputop.agent/1","seconds":5') and '"ports":true' in line
    assert progress[0] == (0, 6) and progress[-1] == (6, 6)
    notes = "\n".join(asked.notes)
    assert "n3, n4: it refuses connections" in notes and "n5: gputop there ended without an answer" in notes
    assert "n6:1, n6:2: gputop there finds no process on GPUs" in notes and "-n: ssh does not accept this name" in notes


def test_who_does_not_wait_has_what_has_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    (tmp_path / "said").write_text(said)
    answers(tmp_path, monkeypatch, "case $node in n4) exec sleep 60;; *) cat said;; esac")
    stop = threading.Event()
    asked = by_ssh([Server(f"n{i}:6009") for i in range(1, 5)], "gputop", stop,
                   lambda done, nodes: stop.set() if done == 3 else None)
    assert set(asked.by_address) == {"n1:6009", "n2:6009", "n3:6009"}
    assert asked.notes == ("n4: it had not answered when gputop stopped waiting.",)


def test_nobody_waits_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(tmp_path, monkeypatch, "exec sleep 60")
    monkeypatch.setattr(worker_figures, "_MAX_WAIT_S", 0.2)
    asked = by_ssh([Server("n1:1"), Server("n2:1")], "gputop", NOBODY)
    assert asked.by_address == {} and asked.notes == ("n1, n2: it had not answered when gputop stopped waiting.",)


def test_by_what_the_nodes_said_the_slowest_the_median_and_the_fastest_are_proposed() -> None:
    servers = [Server(f"n{i}:6009") for i in range(9)]
    figures = {f"n{i}:6009": WorkerFigures({"sm_active": level, "power_w": 300.0}, 5.0, "3")
               for i, level in enumerate((0.5, 0.9, 0.6, 0.1, 0.7, 0.55, 0.65, 0.8))}
    choice = choose(servers, None, None, AskedFigures(figures, "asked by ssh", 5.0, notes=("n8: it does not answer.",)))
    assert choice.chosen == ("n3:6009", "n2:6009", "n1:6009")
    assert choice.by == "SM active of the last 5 s, asked by ssh (1 has no figure)"
    assert choice.reasons[0] == "GPU 3: lowest, 10%" and choice.notes == ("n8: it does not answer.",)
    assert not choice.others_unasked and choose(servers, None, None).others_unasked
    assert not choose([Server("unix:/w1"), Server("127.0.0.1:1"), Server("n1:1", pid=7)], None, None).others_unasked
    few = choose(servers, None, None, AskedFigures({}, "asked by ssh", 5.0))
    assert few.reasons == ("first", "middle", "last") and "fewer than three" in few.by


def test_workers_of_this_node_are_compared_over_the_same_seconds() -> None:
    scene = Scene({i: lambda t: 0.2 if t < 80 else 0.9 for i in range(2)}, jobs=[Job(100 + i, [i]) for i in range(2)])
    history, (*_, sample) = recorded(scene, 100)
    servers = [Server("127.0.0.1:1", pid=100), Server("here:2"), Server("n1:1"), Server("n2:1")]
    others = {f"n{i}:1": WorkerFigures({"sm_active": 0.5}, 5.0) for i in (1, 2)}
    choice = choose(servers, sample, history, AskedFigures(others, "asked by ssh", 5.0, pids={"here:2": 101}))
    assert choice.chosen[2] == "here:2" and choice.reasons[2] == "GPU 1: highest, 90%" and "none" not in choice.by


def prometheus(monkeypatch: pytest.MonkeyPatch, answer: dict[str, dict[str, float]] | Exception) -> None:
    def node_means(client: object, window: str) -> dict[str, dict[str, float]]:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(prometheus_means, "node_means", node_means)
    monkeypatch.setattr(addresses, "is_local", lambda address: address.startswith("127."))


def asked_prometheus(workers: list[str], url: str = "http://127.0.0.1:9") -> AskedFigures:
    return by_prometheus([Server(address) for address in workers], node_means_by(url, {}), NOBODY)


def test_a_prometheus_knows_nodes_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    prometheus(monkeypatch, {"n1": {"sm_active": 0.9}, "n2": {"sm_active": 0.5}, "n3": {"sm_active": 0.1},
                             "10.0.0.4": {"sm_active": 0.7}})
    workers = ["n1.site:1", "n1.site:2", "N2:1", "n3:1", "10.0.0.4:1", "n5:1"]
    asked = asked_prometheus(workers)
    assert set(asked.by_address) == set(workers[:5])
    assert asked.notes == ("n5: Prometheus has no GPU of such a node, or several nodes of that name.",)
    choice = choose([Server(address) for address in workers], None, None, asked)
    assert choice.by.startswith("SM active of their nodes in the last 120 s, by Prometheus (1 has no figure")
    assert choice.chosen == ("n3:1", "10.0.0.4:1", "n1.site:2")


def test_fewer_than_three_nodes_do_not_tell_workers_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    prometheus(monkeypatch, {"n1": {"sm_active": 0.9}, "n2": {"sm_active": 0.5}})
    asked = asked_prometheus([f"n{i}:{port}" for i in (1, 2) for port in (1, 2, 3)])
    assert asked.by_address == {} and "has 2 of these workers' nodes" in asked.notes[0]


def test_power_where_the_activity_is_coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    prometheus(monkeypatch, {f"n{i}": {"util": 1.0, "power_w": 300.0 + i} for i in range(3)})
    choice = choose([Server(f"n{i}:1") for i in range(3)], None, None, asked_prometheus([f"n{i}:1" for i in range(3)]))
    assert choice.by.startswith("Power of their nodes") and choice.reasons[0] == "lowest, 300W"


@pytest.mark.parametrize(("answer", "url", "said"), [
    (GputopError("it is down", "Start it."), "http://127.0.0.1:9", "it is down. Start it."),
    (KeyError("x"), "http://127.0.0.1:9", "cannot be read (KeyError)"),
    ({}, "", "No address of Prometheus was given"), ({}, "no url", "is not the address of a Prometheus"),
    ({}, "http://192.0.2.1:9", "the credentials go to 192.0.2.1 unencrypted")])
def test_what_is_wrong_with_a_prometheus_is_told(monkeypatch: pytest.MonkeyPatch, answer: object, url: str,
                                                 said: str) -> None:
    monkeypatch.setenv("GPUTOP_PROMETHEUS_TOKEN", "secret")
    prometheus(monkeypatch, answer)  # type: ignore[arg-type]
    asked = asked_prometheus(["n1:1", "n2:1", "n3:1"], url)
    assert asked.by_address == {} and said in asked.notes[0] and "secret" not in str(asked)


def test_nobody_is_asked_without_a_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(tmp_path, monkeypatch, "echo $node >> asked")
    asked = ask([Server("n1:1"), Server("127.0.0.1:1")], FigureOptions(), NOBODY)
    assert asked.by_address == {} and asked.how == "" and not (tmp_path / "asked").exists()
