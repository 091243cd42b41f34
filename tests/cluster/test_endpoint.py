"""Addresses, credentials that stay secret, and the way by ssh."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from pathlib import Path

import pytest

from gputop.cluster.endpoint import Credentials, Endpoint, Tunnel, credentials, parse_endpoint
from gputop.cluster.prometheus import connected
from gputop.core.errors import GputopError
from gputop.text.programs import run_on

# Plays ssh: says what it was asked, then listens on the socket of -L as ssh does, until it is ended.
_SSH = """#!{python}
import os, signal, socket, sys
open({log!r}, "w").write("\\0".join(sys.argv[1:]))
if "fails" in sys.argv[-1]:
    sys.exit("Permission denied (publickey).\\x1b[2J")
place = sys.argv[sys.argv.index("-L") + 1].split(":")[0]
own = socket.socket(socket.AF_UNIX)
own.bind(place)
own.listen()
signal.pause()
"""


@pytest.mark.parametrize(("text", "endpoint"), [
    ("http://prom:9090", Endpoint("http", "prom", 9090)),
    ("https://prom/thanos/", Endpoint("https", "prom", 443, "/thanos")),
    ("http://[::1]:9090", Endpoint("http", "::1", 9090)),
    ("ssh://ada@login/http://prom:9090", Endpoint("http", "prom", 9090, "", "ada@login")),
    ("ssh://login:2222/https://prom", Endpoint("https", "prom", 443, "", "login", 2222)),
])
def test_an_address_is_read_and_written_alike(text: str, endpoint: Endpoint) -> None:
    assert parse_endpoint(text) == endpoint
    assert parse_endpoint(endpoint.url) == endpoint


@pytest.mark.parametrize("text", [
    "prom:9090", "ftp://prom", "http://", "http://prom:x", "http://prom:99999", "ssh://-oProxyCommand=x/http://prom",
    "ssh:///http://prom", "ssh://login:0/http://prom", "http://prom/?token=x", "http://prom\x1b[2J", "ssh://login",
    "ssh://a b/http://prom", "http://prom/a b",
])
def test_what_is_no_address_is_wrong_usage(text: str) -> None:
    with pytest.raises(GputopError, match="is not a valid Prometheus address") as caught:
        parse_endpoint(text)
    assert caught.value.exit_code == 2 and caught.value.message.isprintable()


def test_a_password_on_the_command_line_is_refused_and_not_repeated() -> None:
    with pytest.raises(GputopError) as caught:
        parse_endpoint("https://ada:s3cret@prom")
    assert "s3cret" not in str(caught.value) and caught.value.exit_code == 2


def test_what_others_can_read_on_the_way() -> None:
    """ssh carries it to the login node, and from there it goes on as it is."""
    open_ones = ("http://prom:9090", "ssh://login/http://prom:9090", "ssh://prom@login:22/http://prom")
    assert not any(parse_endpoint(text).is_private for text in open_ones)
    assert all(parse_endpoint(text).is_private for text in (
        "https://prom", "http://localhost:9090", "ssh://login/https://prom", "ssh://login/http://localhost:9090",
        "ssh://ada@login/http://login:9090", "ssh://login:2222/http://[::1]:9090"))


@pytest.mark.parametrize(("url", "said"), [
    ("http://prom:9090", "credentials sent to prom are unencrypted: use https:// or ssh://prom/http://localhost:9090"),
    ("ssh://ada@{login}/http://prom:9090", "credentials sent from ada@{login} to prom are unencrypted: use https://"),
    ("ssh://{login}/https://prom", ""), ("https://prom", ""),
])
def test_a_token_in_the_clear_is_said_wherever_on_the_way(url: str, said: str, tmp_path: Path,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUTOP_PROMETHEUS_TOKEN", "s3cret")
    monkeypatch.setattr(Tunnel, "path", lambda self, **_: "")
    heard: list[str] = []
    with connected(url.format(login="login"), {}, heard.append):
        pass
    assert len(heard) == bool(said) and all(own.startswith(said.format(login="login")) for own in heard)
    assert "s3cret" not in str(heard)


def test_credentials_come_from_the_environment_or_from_files(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("abc\n")
    settings = {"prometheus_token_file": str(tmp_path / "token"), "prometheus_user": "ada"}
    assert credentials({}, settings).headers() == {"Authorization": "Bearer abc"}
    assert credentials({"GPUTOP_PROMETHEUS_TOKEN": "xyz"}, settings).headers() == {"Authorization": "Bearer xyz"}
    basic = credentials({"GPUTOP_PROMETHEUS_USER": "ada", "GPUTOP_PROMETHEUS_PASSWORD": "pw"}, {})
    assert basic.headers() == {"Authorization": "Basic YWRhOnB3"} and "pw" not in repr(basic)
    assert Credentials().headers() == {}


def test_a_secret_that_cannot_be_read_or_sent_is_said_without_it(tmp_path: Path) -> None:
    with pytest.raises(GputopError, match="cannot read the secret in"):
        credentials({}, {"prometheus_token_file": str(tmp_path / "absent")})
    with pytest.raises(GputopError, match="a newline or a control character") as caught:
        credentials({"GPUTOP_PROMETHEUS_TOKEN": "ab\r\nX-Evil: 1"}, {})
    assert "Evil" not in str(caught.value)


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that plays ssh; gives the file in which its arguments are."""
    program, log = tmp_path / "bin" / "ssh", tmp_path / "log"
    program.parent.mkdir()
    program.write_text(_SSH.format(python=sys.executable, log=str(log)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return log


def test_the_tunnel_is_the_systems_ssh_to_a_private_socket(ssh: Path) -> None:
    with contextlib.closing(Tunnel(parse_endpoint("ssh://ada@login:2222/http://prom:9090"))) as tunnel:
        path = tunnel.path()
        with socket.socket(socket.AF_UNIX) as own:
            own.connect(path)
        assert tunnel.path() == path and Path(path).parent.stat().st_mode & 0o777 == 0o700
    words = ssh.read_text().split("\0")
    assert words[-2:] == ["--", "ada@login"] and f"{path}:prom:9090" in words and "BatchMode=yes" in words
    assert words[words.index("-p") + 1] == "2222" and not Path(path).exists()


def test_what_ssh_says_is_the_cause(ssh: Path) -> None:
    with (contextlib.closing(Tunnel(parse_endpoint("ssh://fails/http://prom"))) as tunnel,
          pytest.raises(GputopError, match=r"ssh to fails failed: Permission denied \(publickey\)") as caught):
        tunnel.path()
    assert "\x1b" not in str(caught.value)


def test_a_program_is_bounded_in_time_and_size() -> None:
    assert run_on("", None, ["echo", "hi"], 10.0, 100) == b"hi\n"
    with pytest.raises(GputopError, match="printed more than"):
        run_on("", None, ["yes"], 10.0, 1000)
    with pytest.raises(GputopError, match="did not finish within"):
        run_on("", None, ["sleep", "60"], 0.1, 1000)
    with pytest.raises(GputopError, match="sh failed: no such queue"):
        run_on("", None, ["sh", "-c", "echo no such queue >&2; exit 3"], 10.0, 1000)
    with pytest.raises(FileNotFoundError):
        run_on("", None, ["no-such-squeue"], 10.0, 1000)
