"""What a PyTorch job, or a process of its user in its place, sends and writes while it is captured."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import socket
import struct
from pathlib import Path, PurePosixPath

from gputop.core.files import Folder
from gputop.launch.serve import read_report
from gputop.profiler.kineto import protocol
from gputop.profiler.kineto.clients import client_of, find_clients
from gputop.profiler.kineto.daemon import Daemon
from gputop.profiler.kineto.folder import SocketFolder
from gputop.profiler.kineto.jobs import torch_version
from gputop.profiler.kineto.recorder import KinetoRecorder
from gputop.text import console
from tests.campaign.target import Target
from tests.profiler.kineto.fake_client import trace

_TOKEN = "0123456789abcdef"
_POLL = struct.pack("=Q32s", 28, b"req") + struct.pack("=iiq3i", 3, 3, 0, 7, 6, 1)
_DAEMON, _ANSWER_S = f"kineto/{protocol.DAEMON_NAME}", 60.0
_REPORT = json.dumps({"token": _TOKEN, "state": "on", "detail": "2.13.0+cpu"}).encode()
_TABLE = (b"Num       RefCount Protocol Flags    Type St Inode Path\n"
          b"0000000000000000: 00000002 00000000 00000000 0002 01 41 /tmp/kineto-0/dynoconfigclient717f161b-ee8f\n"
          b"0000000000000000: 00000002 00000000 00000000 0002 01 42 @dynoconfigclient717f161b-ee8f@\n"
          b"0000000000000000: 00000003 00000000 00000000 0001 03 43\n")


@functools.cache
def _daemon() -> tuple[Daemon, socket.socket]:
    """A daemon, and a client of it that polls. In the folder that the process works in: names of sockets are short."""
    place = Path("kineto")
    place.mkdir(mode=0o700)
    folder = SocketFolder(PurePosixPath(place), Folder(place), os.getpid(), os.geteuid())
    client = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    client.bind(f"{place}/dynoconfigclient0")
    client.settimeout(_ANSWER_S)
    return Daemon(folder, folder.bind()), client


def _served(data: bytes) -> None:
    """A process sends this to the daemon, which then still answers a poll with the config that is registered."""
    daemon, client = _daemon()
    for name in ("", "kineto/dynoconfigclient1"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, contextlib.suppress(OSError):  # it is too long
            sender.bind(name)
            sender.sendto(data, _DAEMON)
    Path("kineto/dynoconfigclient1").unlink(missing_ok=True)
    client.sendto(_POLL, _DAEMON)
    assert client.recv(4096)[40:] == b""  # all before it has been handled
    config = protocol.RecordingConfig(PurePosixPath("/tmp/x.json"), len(data))
    daemon.register(os.getpid(), config)
    client.sendto(_POLL, _DAEMON)
    lines = client.recv(4096)[40:].decode().split("\n")
    assert lines[:-1] == config.text().split("\n") and lines[-1].startswith("PROFILE_START_TIME=")


def _datagram(_: Path, data: bytes) -> None:
    _served(data)
    message = protocol.decode(data)
    if message is None:
        return
    assert protocol.encode(message.type, message.body)[40:] == message.body
    protocol.takes_config(message)
    report = read_report(message.body, _TOKEN)
    if report is not None:
        console.say(console.one_line(" ".join(report)))


def _table(folder: Path, data: bytes) -> None:
    """The kernel's table, with names that any user chose, and the version file of the job's torch."""
    proc = folder / "proc"
    shutil.rmtree(proc, ignore_errors=True)
    for pid, parent in ((7, 6), (6, 1)):
        own = proc / str(pid)
        (own / "net").mkdir(parents=True)
        (own / "fd").mkdir()
        (own / "stat").write_text(f"{pid} (python) S {parent} " + "1 " * 17 + "900 0\n")
        (own / "status").write_text(f"Uid:\t{os.geteuid()}\t{os.geteuid()}\t0\t0\nNSpid:\t{pid}\t1\n")
        (own / "net" / "unix").write_bytes(data)
        (own / "ns").mkdir()
        (own / "ns" / "net").write_text("")
    (proc / "7" / "fd" / "3").symlink_to("socket:[41]")
    (proc / "7" / "fd" / "4").symlink_to("socket:[42]")
    client = client_of(7, proc)
    if client is not None and client.folder is not None:
        try:
            text = protocol.RecordingConfig(client.folder / "gputop-trace-0.json", 1).text()
        except ValueError:
            text = ""
        assert text == "" or (text.count("\n") == 6 and protocol.encode_config(text))
    find_clients(proc)
    root = proc / "7" / "root" / "x" / "torch"
    root.mkdir(parents=True)
    (root / "version.py").write_bytes(data)
    (proc / "7" / "maps").write_text("1000-2000 r-xp 0 0:0 1 /x/torch/lib/libtorch_cpu.so\n")
    version = torch_version(7, proc)
    assert version is None or (version.isprintable() and len(version) <= 40)


def _scan(folder: Path, data: bytes) -> None:
    path = folder / "t.pt.trace.json"
    path.write_bytes(data)
    host, devices = KinetoRecorder(7).count_events(path)
    assert 0 <= host + devices <= len(data) / 16
    window = KinetoRecorder(7).window_ns(path)
    assert window is None or 0 <= window[0] < window[1]


TARGETS = (
    Target("kineto-datagram", "bytes", lambda _: [_POLL, protocol.encode("gputop", _REPORT), protocol.encode_config(
        protocol.RecordingConfig(PurePosixPath("/tmp/x.json"), 1).text())], _datagram),
    Target("kineto-sockets", "text", lambda _: [_TABLE, b"__version__ = '2.13.0+cpu'\n"], _table),
    Target("kineto-trace", "text", lambda _: [trace(0.05).encode(), trace(0.05, True).encode()], _scan),
)
