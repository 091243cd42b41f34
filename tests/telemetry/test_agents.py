"""Asking nodes by ssh: names, what ssh and logins print, and gputop's agent behind a real sshd."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path

import pytest

from gputop.core import codec
from gputop.core.errors import GputopError
from gputop.core.version import __version__
from gputop.telemetry import agents
from gputop.telemetry.agents import SCHEMA, NodeAnswer, NodeProblem, Request, Ssh, parse_nodes
from tests.cluster import engines
from tests.waiting import PATIENCE_S, until

ROOT = Path(__file__).parents[2]


def test_names_of_nodes(tmp_path: Path) -> None:
    assert parse_nodes("n[01-03],ada@login.example,10.0.0.7") == ["n01", "n02", "n03", "ada@login.example", "10.0.0.7"]
    (tmp_path / "nodes").write_text("n[1-2]  # the old ones\n\n# none\nn7\n")
    assert parse_nodes(f"@{tmp_path}/nodes") == ["n1", "n2", "n7"]


@pytest.mark.parametrize("text", [
    "-oProxyCommand=id", "n1 n2", "n1;id", "$(id)", "n1,-v", "a@-b", "@a", "", "n[1-99999]", "n1\n-v", "`id`",
    "@/no/such/file", "@/dev/zero", "ssh://n1", "n/1"])
def test_what_ssh_or_a_shell_could_misread_is_no_name(text: str) -> None:
    with pytest.raises(GputopError) as caught:
        parse_nodes(text)
    assert caught.value.exit_code == 2 and caught.value.fix


def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    (tmp_path / "ssh").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


ANSWER = '{"hostname":"n1","gpus":[]}'
QUESTION = Request(SCHEMA, 1.0)


def asked(command: str = "gputop", node: str = "n1") -> NodeAnswer:
    """Answer of a node; raises NodeProblem."""
    with contextlib.closing(Ssh(command, QUESTION)) as asking:
        return answer_of(asking, node)


def answer_of(asking: Ssh, node: str) -> NodeAnswer:
    asking.ask([node])
    taken = asking.take(60.0)
    assert taken is not None and taken[0] == node
    if isinstance(taken[1], NodeProblem):
        raise taken[1]
    return taken[1]


@pytest.mark.parametrize(("script", "cause", "fix"), [
    ("echo 'Host key verification failed.' >&2; exit 255", "host key is unknown", "fingerprint"),
    ("echo '@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.' >&2; exit 255",
     "host key differs", "ssh-keygen -R NODE"),
    ("echo 'me@n1: Permission denied (publickey,password).' >&2; exit 255", "password", "ssh-copy-id"),
    ("echo 'ssh: Could not resolve hostname n1: Name or service not known' >&2; exit 255", "name", "ssh NODE"),
    ("echo 'ssh: connect to host n1 port 22: Connection timed out' >&2; exit 255", "does not answer", "up"),
    ("printf 'kex: \\033[2Jodd\\n' >&2; exit 255", "ssh fails (kex: \ufffd[2Jodd)", "manually"),
    ("echo 'sh: gputop: not found' >&2; exit 127", "gputop is not installed on the node", "--remote-command"),
    ("echo 'gputop: no NVIDIA driver' >&2; exit 3", "gputop on the node failed: gputop: no NVIDIA driver", "doctor"),
    ("echo hello", "exited without an answer", "gputop --version"),
    ("echo '{\"hostname\":[]}'", "exited without an answer", "login"),
    ("yes '{'", "exited without an answer", "login"),
    ("head -c 20000000 /dev/zero", "exited without an answer", "login"),
    ("echo \"gputop: there is no command 'agent'. For a list: gputop --help\" >&2; exit 2",
     f"older than gputop {__version__} here", "Install the same version"),
    ("exec sleep 60", "in time", "snapshot"),
])
def test_what_goes_wrong_with_a_node_has_a_cause_and_a_cure(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, cause: str, fix: str) -> None:
    fake(tmp_path, monkeypatch, script)
    monkeypatch.setattr(agents, "TIMEOUT_S", 0.3 if "sleep" in script else 20.0)
    with pytest.raises(NodeProblem) as caught:
        asked()
    assert cause in caught.value.message and fix in caught.value.fix


def test_ssh_is_asked_for_no_password_and_ends_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path, monkeypatch, f"""cd {tmp_path}; printf '%s\\n' "$@" > words; read line; echo "$line" > question
echo Welcome; echo '{ANSWER}'; exec cat""")
    assert asked("/opt/gputop").hostname == "n1"
    words = (tmp_path / "words").read_text().splitlines()
    assert words[-3:] == ["--", "n1", "/opt/gputop agent"] and "BatchMode=yes" in words
    assert codec.convert(codec.parse((tmp_path / "question").read_bytes()), Request) == QUESTION
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    with pytest.raises(NodeProblem, match="cannot start ssh"):
        asked()


def test_at_most_so_many_nodes_are_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    running, most, lock, together = 0, 0, threading.Lock(), threading.Barrier(2)

    class Counted(Ssh):
        def _answer(self, node: str) -> tuple[NodeAnswer, int]:
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            together.wait(PATIENCE_S)
            with lock:
                running -= 1
            return NodeAnswer(hostname=node, gpus=()), 1

    monkeypatch.setattr(agents, "AT_ONCE", 2)
    names = [f"n{i}" for i in range(8)]
    with contextlib.closing(Counted("gputop", QUESTION)) as asking:
        asking.ask(names)
        came = [taken[0] for _ in names if (taken := asking.take(60.0)) is not None]
    assert sorted(came) == names and most == 2


def test_an_answer_that_cannot_be_read_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(Ssh):
        def _answer(self, node: str) -> tuple[NodeAnswer, int]:
            raise RecursionError

    with contextlib.closing(Odd("gputop", QUESTION)) as asking, pytest.raises(NodeProblem, match="RecursionError"):
        answer_of(asking, "n1")


def test_the_agent_of_a_real_sshd_answers_again_over_one_connection(tmp_path: Path,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    with engines.sshd(tmp_path, ["n1"]) as programs:
        monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
        command = f"PYTHONPATH={ROOT} {sys.executable} -m gputop --source simulated"
        with contextlib.closing(Ssh(command, Request(SCHEMA, 0.2))) as asking:
            first, again = answer_of(asking, "n1"), answer_of(asking, "n1")
            assert first.simulated and len(first.gpus) == len(again.gpus) == 8
            assert first.gpus[0].uuid == again.gpus[0].uuid and first.gpus[0].holders[0].pid
            agent = asking._agents["n1"].process
            for name, cause in (("stranger", "host key is unknown"), ("locked", "password or rejects"),
                                ("closed", "refuses connections")):
                with pytest.raises(NodeProblem, match=cause):
                    answer_of(asking, name)
            assert (tmp_path / "sshd.log").read_text().count("Accepted publickey") == 1
            agent.kill()  # the connection breaks off: the next question goes over another one
            agent.wait()
            assert answer_of(asking, "n1").simulated
        with pytest.raises(NodeProblem, match="is not installed on the node"):
            asked("no-such-gputop")


def test_what_runs_is_ended_with_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path, monkeypatch, f"echo x > {tmp_path}/began; exec sleep 60")
    asking = Ssh("gputop", QUESTION)
    asking.ask(["n1"])
    until(lambda: "n1" in asking._agents and (tmp_path / "began").exists(), "the question")
    asking.close()
    taken = asking.take(PATIENCE_S)
    assert taken is not None and isinstance(taken[1], NodeProblem)
    asking.ask(["n2"])
    assert asking.take(0.1) is None
