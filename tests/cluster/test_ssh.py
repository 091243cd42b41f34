"""Asking nodes by ssh: names, what ssh and logins print, and a real sshd."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from gputop.cluster import ssh
from gputop.cluster.ssh import NodeProblem, Ssh, document_in, parse_nodes
from gputop.core.errors import GputopError
from gputop.core.samples import NodeSample
from gputop.text.programs import run_program
from tests.cluster import engines
from tests.fakes import node_sample


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


@pytest.mark.parametrize(("out", "document"), [
    (b'{\n "a": 1\n}\n', b'{\n "a": 1\n}'), (b'Welcome {user}!\n{\n "a": {}\n}\nbye\n', b'{\n "a": {}\n}'),
    (b"", b""), (b"}\n{", b"}\n{"), (b"no json", b"no json")])
def test_the_document_in_what_a_login_prints(out: bytes, document: bytes) -> None:
    assert document_in(out) == document


def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    (tmp_path / "ssh").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


def read(document: bytes) -> NodeSample:
    if document != b'{\n "a": 1\n}':
        raise GputopError("it is not JSON")
    return node_sample(1)


@pytest.mark.parametrize(("script", "cause", "fix"), [
    ("echo 'Host key verification failed.' >&2; exit 255", "does not know its host key", "fingerprint"),
    ("echo '@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.' >&2; exit 255",
     "host key differs", "ssh-keygen -R NODE"),
    ("echo 'me@n1: Permission denied (publickey,password).' >&2; exit 255", "password", "ssh-copy-id"),
    ("echo 'ssh: Could not resolve hostname n1: Name or service not known' >&2; exit 255", "name", "ssh NODE"),
    ("echo 'ssh: connect to host n1 port 22: Connection timed out' >&2; exit 255", "does not answer", "up"),
    ("printf 'kex: \\033[2Jodd\\n' >&2; exit 255", "ssh fails (kex: \ufffd[2Jodd)", "yourself"),
    ("echo 'sh: gputop: not found' >&2; exit 127", "gputop is not installed there", "--remote-command"),
    ("echo 'gputop: no NVIDIA driver' >&2; exit 3", "gputop there fails: gputop: no NVIDIA driver", "doctor"),
    ("echo hello", "its answer is not a snapshot", "gputop --version"),
    ("yes '{'", "more than", "login"),
    ("exec sleep 60", "within", "snapshot"),
])
def test_what_goes_wrong_with_a_node_has_a_cause_and_a_cure(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, cause: str, fix: str) -> None:
    fake(tmp_path, monkeypatch, script)
    monkeypatch.setattr(ssh, "MAX_BYTES", 1 << 16)
    monkeypatch.setattr(ssh, "TIMEOUT_S", 0.3 if "sleep" in script else 20.0)
    with pytest.raises(NodeProblem) as caught:
        Ssh("gputop", read, shared=False).ask("n1")
    assert cause in caught.value.message and fix in caught.value.fix


def test_ssh_is_asked_for_no_password_and_ends_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path, monkeypatch, 'printf \'%s\\n\' "$@" > "$(dirname "$0")/words"; printf \'{\\n "a": 1\\n}\\n\'')
    sample, count = Ssh("gputop", read, shared=False).ask("n1")
    words = (tmp_path / "words").read_text().splitlines()
    assert sample.gpus and count == 12
    assert words[-3:] == ["--", "n1", "gputop snapshot --format json --seconds 1"] and "BatchMode=yes" in words
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    with pytest.raises(NodeProblem, match="cannot be started"):
        Ssh("gputop", read, shared=False).ask("n1")


@pytest.mark.parametrize(("folder", "shared"), [("t", True), ("with space", False), ("x" * 100, False)])
def test_connections_are_kept_where_a_socket_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str,
                                                    shared: bool) -> None:
    fake(tmp_path, monkeypatch, 'printf \'%s\\n\' "$@" >> "$(dirname "$0")/words"; printf \'{\\n "a": 1\\n}\\n\'')
    short = Path(tempfile.mkdtemp())
    (short / folder).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(short / folder))
    asked = Ssh("gputop", read, shared=True)
    asked.ask("n1")
    asked.close()
    assert ("ControlPersist" in (tmp_path / "words").read_text()) == shared
    shutil.rmtree(short)


def test_a_real_sshd_is_asked_over_one_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engines.sshd(tmp_path, ["n1"]) as programs:
        monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
        asked = Ssh("""printf '{\n "a": 1\n}\n'; #""", read, shared=True)
        try:
            assert asked.ask("n1")[1] == asked.ask("n1")[1] == 12
            for name, cause in (("stranger", "does not know its host key"), ("locked", "password or refuses"),
                                ("closed", "refuses connections")):
                with pytest.raises(NodeProblem, match=cause):
                    asked.ask(name)
            log = (tmp_path / "sshd.log").read_text()
            assert log.count("Accepted publickey") == 1
        finally:
            asked.close()
        missing = Ssh("no-such-gputop", read, shared=False)
        with pytest.raises(NodeProblem, match="is not installed there"):
            missing.ask("n1")


def test_what_runs_is_ended_with_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path, monkeypatch, "exec sleep 60")
    asked = Ssh("gputop", read, shared=False)
    asked.close()
    with pytest.raises(NodeProblem):
        asked.ask("n1")
    assert run_program(["true"], 10.0, 10).status == 0
