from __future__ import annotations

import socket
import sys
from importlib import metadata

import pytest

from gputop.core.errors import GputopError, NoDataError
from gputop.launch import xprof


@pytest.fixture
def logdir(tmp_path):
    run = tmp_path / "logs" / "plugins" / "profile" / "run 1"
    run.mkdir(parents=True)
    (run / "host.xplane.pb").write_bytes(b"")
    return tmp_path / "logs"


def test_trace_run_and_logdir_are_all_understood(logdir):
    run = logdir / "plugins" / "profile" / "run 1"
    for path in (logdir, logdir / "plugins" / "profile", run, run / "host.xplane.pb"):
        assert xprof.logdir_of(path) == logdir
    assert xprof.logdir_of(logdir.parent) == logdir.parent  # TensorBoard looks in folders of folders


def test_what_is_no_logdir(tmp_path):
    with pytest.raises(NoDataError, match="does not exist"):
        xprof.logdir_of(tmp_path / "none")
    with pytest.raises(NoDataError, match="no traces in TensorBoard's layout"):
        xprof.logdir_of(tmp_path)


def test_the_command_fits_what_is_installed(logdir, monkeypatch):
    there: set[str] = set()

    def version(name):
        if name not in there:
            raise metadata.PackageNotFoundError(name)
        return "2.21"

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(xprof.shutil, "which", lambda name: name if f"{name} command" in there else None)
    folder = str(logdir)
    assert xprof.open_command(logdir) == f"{xprof.INSTALL} && gputop xprof {folder}"
    there |= {"tensorboard command"}
    assert xprof.open_command(logdir).startswith(xprof.INSTALL)  # a TensorBoard that shows no profiles
    there |= {"tensorboard-plugin-profile"}
    assert xprof.open_command(logdir) == f"tensorboard --logdir {folder}"
    there |= {"xprof command"}
    assert xprof.open_command(logdir) == f"xprof --logdir {folder}"
    there |= {"xprof"}
    assert xprof.open_command(logdir / "a b") == f"gputop xprof '{folder}/a b'"


def test_not_installed_says_how(logdir, monkeypatch):
    monkeypatch.setattr(metadata, "entry_points", lambda **_: ())
    with pytest.raises(GputopError) as caught:
        xprof.serve(logdir, 8791)
    assert xprof.INSTALL in caught.value.fix


def test_a_port_that_is_taken(logdir, monkeypatch):
    monkeypatch.setattr(metadata, "entry_points", lambda **_: [metadata.EntryPoint("xprof", "builtins:print", "")])
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        with pytest.raises(GputopError, match="is in use"):
            xprof.serve(logdir, taken.getsockname()[1])


def test_its_server_is_taken_to_the_loopback(logdir, monkeypatch, tmp_path, capsys):
    # The entry point of a server as XProf's is, on all interfaces; it ends once it has been confined.
    (tmp_path / "server_like_xprof.py").write_text(
        "import socket, sys\nfrom gputop.launch.inside.gputop_serve import listening_sockets\n"
        "def main():\n"
        "    with socket.socket() as server:\n"
        "        server.bind(('', int(sys.argv[4])))\n"
        "        server.listen()\n"
        "        while not server.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).startswith(b'lo'): pass\n"
        "        sys.arguments = sys.argv\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    entry = metadata.EntryPoint("xprof", "server_like_xprof:main", "console_scripts")
    monkeypatch.setattr(metadata, "entry_points", lambda **_: [entry])
    port = xprof.free_port(0)
    assert xprof.serve(logdir, port) == 0
    assert sys.arguments == ["xprof", "--logdir", str(logdir), "--port", str(port)]  # type: ignore[attr-defined]
    assert capsys.readouterr().out == ""
