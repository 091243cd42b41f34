"""The monitor in a browser: its command line, the terminal that textual-serve speaks to, and the address."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

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


def test_the_monitor_on_a_terminal_of_packets() -> None:
    process = subprocess.Popen(
        child_command("gputop.launch.web_terminal:main", "--demo", "healthy"), stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, env={**os.environ, "COLUMNS": "100", "ROWS": "20", "TERM": "dumb"})
    with process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == b"__GANGLION__\n"
        shown, packets = b"", _packets(process)
        # A panel, which is not of the first frame; a packet may end anywhere in the picture.
        while b"What to do" not in shown or b"SIMULATED" not in shown:
            shown += next(packets)[1]
        assert b"\x1b[21;" not in shown, "it has 20 lines"
        for message in (b"{", b"\xff", b"[]", b"[" * 100_000, b'{"type": "resize", "width": [], "height": -5}',
                        '{"type": "resize", "width": "²", "height": "٣"}'.encode(),
                        b'{"type": "resize", "width": "%s"}' % (b"9" * 5000)):
            _send(process, b"M", message)  # whoever is at the page: it neither ends the monitor nor resizes it
        _send(process, b"M", json.dumps({"type": "resize", "width": 120, "height": 30}).encode())
        shown = b""
        while not re.search(rb"\x1b\[(2[1-9]|30);", shown):
            shown += next(packets)[1]
        _send(process, b"D", b"q")
        assert (b"M", b'{"type": "exit"}') in list(packets)
        assert process.wait(60) == 0


@pytest.mark.parametrize("end", ["quit", "gone"])
def test_a_monitor_that_does_not_read_its_keys_is_ended_all_the_same(end: str) -> None:
    with subprocess.Popen(child_command("gputop.launch.web_terminal:main", "--demo", "healthy"), stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"__GANGLION__\n"
        packets = _packets(process)
        next(packets)
        (monitor,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        terminal = os.open(f"/proc/{monitor}/fd/0", os.O_RDWR | os.O_NOCTTY)
        while termios.tcgetattr(terminal)[3] & termios.ICANON:  # until then it drops keys that nobody reads
            next(packets)
        os.close(terminal)
        os.kill(int(monitor), signal.SIGSTOP)
        _send(process, b"D", b"x" * 500_000)  # a terminal takes less than a tenth of it
        assert process.stdin is not None
        while any(fcntl.ioctl(process.stdin, termios.FIONREAD, bytes(4))):
            pass  # until it has taken all of that
        if end == "quit":
            _send(process, b"M", b'{"type": "quit"}')
        else:
            process.stdin.close()
        try:
            assert process.wait(60) == 0
        finally:
            process.kill()


# -- the server, and who comes to it -------------------------------------------------------------------

# As `gputop serve --demo`, with a deadline that a test can wait for, and few descriptors.
_SERVE = """
import sys
sys.path[:] = [sys.argv.pop(1), *filter(None, sys.path)]
import resource
from gputop.launch import web_server
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
web_server.REQUEST_S = float(sys.argv.pop(1))
from gputop.cli import command
command()
"""

Served = tuple[str, int, subprocess.Popen[str]]


@contextlib.contextmanager
def served(request_s: float = 10.0, folder: Path | None = None) -> Iterator[Served]:
    """The address that it prints, its port, and the process, which ends well at ctrl-c."""
    pytest.importorskip("textual_serve", reason="textual-serve is not installed")
    root = str(Path(__file__).parents[2])
    with subprocess.Popen([sys.executable, "-c", _SERVE, root, str(request_s), "serve", "--demo", "--listen", "0"],
                          stderr=subprocess.PIPE, text=True, cwd=folder) as process:
        try:
            assert process.stderr is not None
            found = re.search(r"http://127\.0\.0\.1:(\d+)/[\w-]{32}/", process.stderr.readline())
            assert found is not None
            process.stderr.readline()
            yield found[0], int(found[1]), process
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
            assert process.stderr.read() == "", "nothing is said about clients"
        finally:
            process.kill()


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """One that several tests ask."""
    with served() as there:
        yield there


@pytest.fixture(scope="module")
def impatient_server() -> Iterator[Served]:
    """One that closes requests soon which do not come to an end."""
    with served(0.3) as there:
        yield there


def asked(address: str, **headers: str) -> int:
    """The status of the answer."""
    request = Request(address, headers={name.replace("_", "-"): text for name, text in headers.items()})
    try:
        with urlopen(request) as page:
            return int(page.status)
    except HTTPError as error:
        with error:
            return error.code


def test_served_is_what_lies_below_a_secret_path(server: Served) -> None:
    address, _, _ = server
    with urlopen(address) as page:
        assert page.status == 200 and "default-src 'self'" in page.headers["Content-Security-Policy"]
        assert f'websocket-url="ws{address[4:]}ws"' in page.read().decode()
    assert asked(f"{address}static/js/textual.js") == 200
    for path in ("/", "/ws", "/static/js/textual.js"):
        assert asked(address.rsplit("/", 2)[0] + path) == 404


_UPGRADE = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec_WebSocket_Version": "13",
            "Sec_WebSocket_Key": "dGhlIHNhbXBsZSBub25jZQ=="}


def test_pages_of_other_sites_are_refused(server: Served) -> None:
    """A name of somebody else's that leads here (DNS rebinding), and a page that connects across sites."""
    address, port, _ = server
    assert asked(address, Host=f"localhost:{port}") == 200
    assert asked(address, Host="localhost:9999") == 200, "behind ssh -L the port is another one"
    assert asked(address, Host="rebound.example") == 403
    assert asked(address, Host=f"127.0.0.1.rebound.example:{port}") == 403
    assert asked(address, Origin=f"http://127.0.0.1:{port}") == 200
    for origin in ("http://evil.example", f"http://localhost:{port}", "null", f"http://127.0.0.1:{port + 1}"):
        assert asked(address, Origin=origin) == 403
        assert asked(f"{address}ws", Origin=origin, **_UPGRADE) == 403, "no monitor is started"


@pytest.mark.parametrize(("hosts", "origins", "fits"), [
    (["127.0.0.1:8"], [], True), (["LOCALHOST"], [], True), (["[::1]:8"], ["http://[::1]:8"], True),
    (["n07:8"], ["https://n07:8"], True), (["n07.:8"], [], True),
    ([], [], False), (["n07", "n07"], [], False), ([""], [], False), (["n07.evil"], [], False), (["[::1"], [], False),
    (["n07"], ["http://n07", "http://n07"], False), (["n07"], ["file://n07"], False), (["n07"], ["null"], False),
    (["10.0.0.7:8"], [], False), (["evil@n07"], ["http://evil"], False), (["n07"], ["http://[::1"], False),
])
def test_who_is_meant(hosts: list[str], origins: list[str], fits: bool) -> None:
    names = frozenset({"n07", "127.0.0.1", "::1", "localhost"})
    assert web_server.is_addressed(hosts, origins, names, every=False) == fits
    assert web_server.is_addressed(["10.0.0.7:8"], [], names, every=True), "an address cannot be rebound"
    assert not web_server.is_addressed(["evil"], [], names, every=True)


def test_the_monitor_of_a_page_imports_nothing_of_the_folder_it_is_served_from(tmp_path: Path) -> None:
    for name in ("contextlib", "json", "pty", "gputop"):
        (tmp_path / f"{name}.py").write_text("open('sprung', 'w').close()\n")

    async def shown(address: str) -> None:
        from aiohttp import ClientSession

        async with ClientSession() as session, session.ws_connect(f"{address}ws", origin=address[:-34]) as page:
            text = b""
            while b"SIMULATED" not in text:
                text += await page.receive_bytes()

    with served(folder=tmp_path) as (address, _, _):
        asyncio.run(asyncio.wait_for(shown(address), 60))
    assert not (tmp_path / "sprung").exists()


def test_silent_connections_hold_the_page_up_for_nobody(server: Served) -> None:
    """300 that say nothing, and with a limit of 256 descriptors."""
    address, port, process = server
    with contextlib.ExitStack() as opened:
        def connect() -> socket.socket:
            return opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))

        silent = [connect() for _ in range(300)]
        assert asked(address) == 200
        for _ in range(web_server.MAX_CONNECTIONS):  # those that know nothing of the path count as silent
            connect().sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert asked(address) == 200
        assert silent[0].recv(1) == b"", "the oldest was closed"
        descriptors = len(os.listdir(f"/proc/{process.pid}/fd"))  # noqa: PTH208
        assert descriptors < 2 * web_server.MAX_CONNECTIONS


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Slow: "])
def test_a_request_that_does_not_come_to_an_end_is_closed(impatient_server: Served, sent: bytes) -> None:
    address, port, _ = impatient_server
    with socket.create_connection(("127.0.0.1", port), timeout=60) as slow:
        slow.sendall(sent)
        with contextlib.suppress(ConnectionResetError):
            assert slow.recv(1) == b""
        assert asked(address) == 200


def test_what_is_no_request_says_nothing_on_the_terminal(server: Served) -> None:
    address, port, _ = server
    for words in (b"\x00" * 100, b"GET / HTTP/9.9\r\n\r\n", b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
                  b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 2000 + b"\r\n"):
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            client.sendall(words)
            with contextlib.suppress(ConnectionResetError):
                while client.recv(1 << 16):
                    pass
    assert asked(address) == 200
