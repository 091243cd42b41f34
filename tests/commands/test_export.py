"""``gputop export`` and the monitor's ``--export``, from outside: a real Prometheus, the file for node_exporter."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gputop.cli import main
from gputop.commands import export
from gputop.commands.arguments import parse
from gputop.commands.common import check_metrics
from gputop.core.files import Folder
from gputop.export.openmetrics import Exporter
from tests.fakes import StillSession
from tests.listening import free_port
from tests.nvml_fake import build, environment
from tests.tui.terminals import Terminal
from tests.waiting import PATIENCE_S, until

ROOT = Path(__file__).resolve().parents[2]
_PROMETHEUS = """\
global: {scrape_interval: 250ms}
scrape_configs:
  - job_name: gputop
    static_configs: [{targets: ["ADDRESS"]}]
"""


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Eight GPUs of the fake driver."""
    folder = tmp_path_factory.mktemp("node")
    return {**environment(build(folder), "gpus 8", "set power_w 431"), "PYTHONPATH": str(ROOT), "HOME": str(folder)}


@contextlib.contextmanager
def running(*command: str, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def get(address: str, path: str) -> str:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=PATIENCE_S) as answer:
            return str(answer.read().decode())
    except urllib.error.URLError:
        return ""


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed (Debian: prometheus)")
def test_a_real_prometheus_scrapes_it_and_term_ends_it(tmp_path: Path, settings: dict[str, str]) -> None:
    with running(sys.executable, "-m", "gputop", "export", "--source", "nvml", "--listen", "0", env=settings) as gputop:
        told = gputop.stderr.readline()
        address = re.fullmatch(r"gputop: metrics at http://(127\.0\.0\.1:\d+)/metrics\n", told)[1]
        (tmp_path / "prom.yml").write_text(_PROMETHEUS.replace("ADDRESS", address))
        own = f"127.0.0.1:{free_port()}"
        with running("prometheus", f"--config.file={tmp_path}/prom.yml", f"--storage.tsdb.path={tmp_path}/data",
                     f"--web.listen-address={own}"):
            def ask(query: str) -> list[tuple[dict[str, str], float]]:
                answer = get(own, f"/api/v1/query?query={query}")
                found = json.loads(answer)["data"]["result"] if answer else []
                return [(series["metric"], float(series["value"][1])) for series in found]

            until(lambda: ask("gputop_sample_timestamp_seconds") and len(ask("gputop_gpu_power_watts")) == 8)
            assert {value for _, value in ask("gputop_gpu_power_watts")} == {431.0}
            assert [value for _, value in ask("up")] == [1.0]
            assert {labels["gpu"] for labels, _ in ask("gputop_gpu_up")} == set("01234567")
            assert ask("gputop_build_info")[0][0]["source"].startswith("NVML")
            told = json.loads(get(own, "/api/v1/metadata?metric=gputop_gpu_power_watts"))["data"]
            assert [(m["type"], m["help"]) for m in told["gputop_gpu_power_watts"]] == [("gauge", "Power: board power")]
            (target,) = json.loads(get(own, "/api/v1/targets"))["data"]["activeTargets"]
            assert (target["health"], target["lastError"]) == ("up", "")
        gputop.terminate()
        assert gputop.wait(PATIENCE_S) == 0


def test_the_monitor_serves_them_while_it_runs(settings: dict[str, str]) -> None:
    address = f"127.0.0.1:{free_port()}"
    monitor = Terminal((120, 40), [sys.executable, "-m", "gputop", "--source", "nvml", "--export", address], settings)
    try:
        monitor.until("H100")
        until(lambda: get(address, "/metrics").count("\ngputop_gpu_power_watts{") == 8)
        monitor.press("q")
        assert monitor.ended() == 0
    finally:
        monitor.close()


def test_a_taken_port_is_told_and_the_terminal_given_back(settings: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        command = [sys.executable, "-m", "gputop", "--source", "nvml", "--export", address]
        monitor = Terminal((120, 40), command, settings)
        try:
            assert monitor.ended() == 2
            assert f"cannot listen on {address}" in monitor.raw.decode()
        finally:
            monitor.close()


# -- the file -----------------------------------------------------------------------------------------


def test_the_file_can_be_read_by_others_and_goes_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, stop = StillSession(gpus=2, ticks=2), threading.Event()
    exporter = Exporter(session)
    (tmp_path / "elsewhere").write_text("mine")
    (tmp_path / export.TEXTFILE_NAME).symlink_to("elsewhere")
    monkeypatch.setattr(stop, "wait", lambda timeout: bool(timeout))  # written once
    before = os.umask(0o077)
    try:
        with export._textfile_folder(tmp_path, session) as folder:
            export._write_until(stop, folder, exporter)
            written = tmp_path / export.TEXTFILE_NAME
            assert not written.is_symlink() and written.stat().st_mode & 0o777 == 0o644
            families = {f.name for f in text_string_to_metric_families(written.read_text())}
            assert "gputop_gpu_power_watts" in families
            assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "gputop.prom"]
    finally:
        os.umask(before)
    assert not written.exists() and (tmp_path / "elsewhere").read_text() == "mine"


def test_what_cannot_be_written_is_said_once_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                             capsys: pytest.CaptureFixture[str]) -> None:
    session, stop, waits = StillSession(gpus=1, ticks=2), threading.Event(), []
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr(stop, "wait", lambda timeout: waits.append(timeout) or len(waits) > 3)
    with Folder(tmp_path / "folder") as folder:
        (tmp_path / "folder").rmdir()
        export._write_until(stop, folder, Exporter(session))
    assert capsys.readouterr().err.count("cannot write") == 1 and waits == [0.0, 15.0, 15.0, 15.0]


@pytest.mark.parametrize(("arguments", "message"), [
    (["--demo", "--textfile", "."], "does not write simulated values for node_exporter"),
    (["--source", "nvml", "--textfile", "/nowhere"], "cannot write to /nowhere: No such file"),
    (["--demo", "--listen", "192.0.2.1:1"], "cannot listen on 192.0.2.1:1"),
])
def test_what_cannot_be_exported_is_wrong_usage(arguments: list[str], message: str,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_without_prometheus_client_the_cure_is_named(monkeypatch: pytest.MonkeyPatch,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for arguments in (["export", "--demo"], ["--demo", "--export", "0"]):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("gputop.commands.monitor.unfit_terminal", lambda: "")
            assert main(arguments) == 1
        err = capsys.readouterr().err
        assert "which writes the metrics, is not installed" in err and "pip install prometheus-client" in err


# -- addresses ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "address"), [
    ("9810", ("127.0.0.1", 9810)), ("0", ("127.0.0.1", 0)), ("0.0.0.0:9810", ("0.0.0.0", 9810)),
    ("[::1]:9810", ("::1", 9810)), ("node-7:9810", ("node-7", 9810)),
])
def test_an_address_without_a_host_is_this_machine(text: str, address: tuple[str, int]) -> None:
    assert parse(["export", "--listen", text]).listen == address
    assert parse(["--export", text]).export == address


@pytest.mark.parametrize("text", ["", ":9810", "node:", "::1:9810", "::1", "65536", "-1", "[node]:1", "9810x", "٣",
                                  pytest.param("1" * 5000, id="long")])
def test_what_is_no_address_is_wrong_usage(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["export", f"--listen={text}"])
    assert caught.value.code == 2 and "is not PORT, HOST:PORT or [IPv6]:PORT" in capsys.readouterr().err


@pytest.mark.parametrize(("host", "exposed"), [
    ("127.0.0.1", False), ("127.8.9.1", False), ("::1", False), ("localhost", False),
    ("0.0.0.0", True), ("::", True), ("127.evil.example", True), ("10.0.0.7", True),
])
def test_an_address_that_others_reach_is_said(host: str, exposed: bool, capsys: pytest.CaptureFixture[str]) -> None:
    check_metrics((host, 9810))
    assert (f"anyone who can reach {host} can read the metrics without a "
            "password" in capsys.readouterr().err) == exposed
