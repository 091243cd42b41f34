"""The monitor in a browser: its command line, the terminal that textual-serve speaks to, and the address."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from gputop.cli import main
from gputop.commands.arguments import parse
from gputop.commands.serve import _words
from gputop.core.errors import EXIT_FAILED, EXIT_USAGE
from gputop.core.own_program import child_command
from gputop.launch import web_server


@pytest.mark.parametrize("options", [
    ["--attach", "a:1", "--attach", "it's; $(b):2", "--demo", "--on-dip", "tensor<10%", "--dip-max", "3",
     "--notify", "bell"],
    ["--gpus", "0,2-3", "--interval", "0.5", "--logdir", "a b", "--no-ascii", "--low-bandwidth", "--dcgm-watch",
     "--rules", "./-r.toml"],
    [],
])
def test_each_page_has_the_options_of_the_monitor(options: list[str]) -> None:
    shell = web_server.command_of(list(_words(parse(["serve", *options]))))
    words = subprocess.run(["sh", "-c", f"set -- {shell}; printf '%s\\n' \"$@\""], capture_output=True, text=True,
                           check=True).stdout.splitlines()
    assert words[:4] == ["exec", *child_command("gputop.launch.web_terminal:main")]
    assert parse(words[4:]) == parse(options)


def test_what_cannot_be_served_is_said_first(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--export", "0", "serve", "--demo"]) == EXIT_USAGE
    assert main(["serve", "--demo", "no-such"]) != 0
    monkeypatch.setattr(web_server, "find_spec", lambda _: None)
    assert main(["serve", "--demo", "--listen", "0.0.0.0:0"]) == EXIT_FAILED
    err = capsys.readouterr().err
    assert "no demo scenario" in err and "without encryption" in err and web_server.INSTALL in err
    monkeypatch.setattr(web_server, "find_spec", lambda _: object())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["serve", "--demo", "--listen", str(taken.getsockname()[1])]) == EXIT_FAILED
    assert "is taken" in capsys.readouterr().err


def test_the_way_there() -> None:
    assert "http://[::1]:8/t/" in web_server.where("::1", 8, "t", True)[0]
    assert web_server.where("127.0.0.1", 8, "t", True)[1].endswith(f"ssh -L 8:127.0.0.1:8 {socket.gethostname()}")
    assert len(web_server.where("0.0.0.0", 8, "t", False)) == 1


def _packets(process: subprocess.Popen[bytes]) -> Iterator[tuple[bytes, bytes]]:
    assert process.stdout is not None
    while head := process.stdout.read(5):
        yield head[:1], process.stdout.read(int.from_bytes(head[1:], "big"))


def _send(process: subprocess.Popen[bytes], kind: bytes, payload: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(kind + len(payload).to_bytes(4, "big") + payload)
    process.stdin.flush()


@pytest.mark.parametrize("end", ["q", "quit", "gone"])
def test_the_monitor_on_a_terminal_of_packets(end: str) -> None:
    process = subprocess.Popen(
        child_command("gputop.launch.web_terminal:main", "--demo", "healthy"), stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, env={**os.environ, "COLUMNS": "100", "ROWS": "20", "TERM": "dumb"})
    with process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == b"__GANGLION__\n"
        shown, packets = b"", _packets(process)
        while b"What to do" not in shown:  # a panel, which is not of the first frame
            shown += next(packets)[1]
        assert b"SIMULATED" in shown and b"\x1b[21;" not in shown, "it has 20 lines"
        _send(process, b"M", json.dumps({"type": "resize", "width": 120, "height": 30}).encode())
        shown = b""
        while not re.search(rb"\x1b\[(2[1-9]|30);", shown):
            shown += next(packets)[1]
        if end == "q":
            _send(process, b"D", b"q")
            assert (b"M", b'{"type": "exit"}') in list(packets)
        elif end == "quit":
            _send(process, b"M", b'{"type": "quit"}')
        else:
            process.stdin.close()
        assert process.wait(60) == 0


def test_served_is_what_lies_below_a_secret_path() -> None:
    pytest.importorskip("textual_serve", reason="textual-serve is not installed")
    with subprocess.Popen([sys.executable, "-m", "gputop", "serve", "--demo", "--listen", "0"],
                          stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        found = re.search(r"http://127\.0\.0\.1:\d+/[\w-]{32}/", process.stderr.readline())
        assert found is not None
        process.stderr.readline()
        port = int(found[0].split(":")[2].split("/")[0])
        while True:  # it is told when it is about to listen
            with socket.socket() as trial:
                if not trial.connect_ex(("127.0.0.1", port)):
                    break
        with urlopen(found[0]) as page:
            assert page.status == 200 and "default-src 'self'" in page.headers["Content-Security-Policy"]
            assert f'websocket-url="ws{found[0][4:]}ws"' in page.read().decode()
        for path in ("/", "/ws", "/static/js/textual.js"):
            with pytest.raises(HTTPError, match="404"):
                urlopen(found[0].rsplit("/", 2)[0] + path)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
