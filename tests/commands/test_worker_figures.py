"""``gputop capture`` of many workers from outside: a real sshd, profiler servers, and what gputop says on a node."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.cluster_lab import free_port
from gputop.cli import main
from gputop.core import codec
from gputop.profiler import addresses
from gputop.profiler.capture.records import Server
from gputop.session import gpu_samples as counters
from gputop.session.capture import captures
from gputop.session.worker_figures import SECONDS
from gputop.telemetry.node_answer import answer_of
from tests.advice.live.scene import Job, Scene, recorded
from tests.cluster import engines
from tests.profiler.fake_server import FakeProfiler, serve

# Nodes whose addresses lead to this machine, and what gputop says of the GPUs of each: the slowest, the fastest, ...
ACTIVE = {"127.0.0.2": 0.7, "127.0.0.3": 0.1, "127.0.0.4": 0.6, "127.0.0.5": 0.95, "127.0.0.6": 0.5, "127.0.0.7": 0.55,
          "127.0.0.8": 0.65}
REFUSES, OLD = "127.0.0.9", "127.0.0.10"
_GPUTOP = f"""\
#!/bin/sh
[ "$*" = agent ] && read line || exit 2
case $LC_NODE in {OLD}) echo "gputop: there is no command 'agent'" >&2; exit 2;; esac
exec cat "$(dirname "$0")/said-$LC_NODE"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("ssh")
    with engines.sshd(folder, [*ACTIVE, OLD]) as programs:
        (programs / "gputop-there").write_text(_GPUTOP)
        (programs / "gputop-there").chmod(0o755)
        config = folder / "ssh_config"
        config.write_text(f"Host {REFUSES}\n  Port {free_port()}\n" + config.read_text())
        for node, active in ACTIVE.items():
            history, (*_, sample) = recorded(Scene(dict.fromkeys(range(8), active), jobs=[Job(100, range(8))]), 10)
            (programs / f"said-{node}").write_bytes(codec.encode(answer_of(sample, history, 5.0)) + b"\n")
        yield folder


@pytest.fixture
def workers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, FakeProfiler]]:
    """By address; the nodes are taken for other machines."""
    monkeypatch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")
    monkeypatch.setattr(addresses, "is_local", lambda address: False)
    with contextlib.ExitStack() as stack:
        servers = {}
        for node in (*ACTIVE, REFUSES, OLD):
            server = stack.enter_context(serve(host=node))
            servers[f"{node}:{server.address.rpartition(':')[2]}"] = server
        yield servers


def test_the_slowest_the_median_and_the_fastest_are_captured(
        folder: Path, workers: dict[str, FakeProfiler], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["capture", *workers, "--seconds", "0.3", "--logdir", str(tmp_path), "--worker-figures", "ssh",
             "--remote-command", f"{folder}/bin/gputop-there"]
    main(words)
    err = capsys.readouterr().err
    captured = {address.rpartition(":")[0] for address, server in workers.items() if server.requests}
    assert captured == {"127.0.0.3", "127.0.0.4", "127.0.0.5"}
    assert "asking 9 nodes by ssh for live figures" in err and "SM active of the last 5 s, asked by ssh (2 have" in err
    assert "lowest, 10%" in err and "median, 60%" in err and "highest, 95%" in err
    assert f"{REFUSES}: it refuses connections" in err and f"{OLD}: gputop there is older" in err
    log = (folder / "sshd.log").read_text()
    assert log.count("Accepted publickey") == 8


def test_nobody_logs_in_on_a_node_without_having_been_asked_to(
        folder: Path, workers: dict[str, FakeProfiler], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (folder / "sshd.log").read_text()
    main(["capture", *workers, "--seconds", "0.3", "--logdir", str(tmp_path)])
    assert (folder / "sshd.log").read_text() == before
    err = capsys.readouterr().err
    assert "by their order, because gputop has no live samples" in err
    assert "--worker-figures ssh asks their nodes for live figures" in err
    assert [bool(server.requests) for server in workers.values()] == [True, *[False] * 3, True, *[False] * 3, True]


def test_workers_of_this_machine_are_sampled_first(monkeypatch: pytest.MonkeyPatch,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    scene = Scene({i: 0.1 + i / 10 for i in range(8)}, jobs=[Job(100 + i, [i]) for i in range(8)])
    waited: list[float] = []

    class Watch:
        def __init__(self, *_: object) -> None:
            self.history, (*_, self.sample) = recorded(scene, 20)
            self.running = contextlib.nullcontext
            self.counters = None

        def wait(self, seconds: float) -> None:
            waited.append(seconds)

    def stop(servers: list[Server], *_: object, **__: object) -> None:
        raise KeyboardInterrupt(*[server.address for server in servers])

    monkeypatch.setattr(counters, "CounterWatch", Watch)
    monkeypatch.setattr("gputop.profiler.capture.footprint.job_pid", lambda address, pid: int(address[-3:]))
    monkeypatch.setattr(captures, "find_named_servers", lambda attach, *_, **__: (
        tuple(Server(address, asked=True) for address in attach), (), None))
    monkeypatch.setattr(captures, "capture_and_analyze", stop)
    addresses = [f"127.0.0.1:{6100 + i}" for i in (3, 0, 1, 2, 4, 5, 6, 7, 8)]
    main(["capture", "--attach", ",".join(addresses), "--source", "nvml"])
    err = capsys.readouterr().err
    assert waited == [SECONDS] and "SM active of the last 5 s (1 has no figure" in err
    assert "127.0.0.1:6100 (GPU 0: lowest, 10%), 127.0.0.1:6103 (GPU 3: median, 40%)" in err
    assert "127.0.0.1:6107 (GPU 7: highest, 80%)" in err and "--worker-figures" not in err
