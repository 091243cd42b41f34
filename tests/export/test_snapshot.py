from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gputop.errors import GputopError
from gputop.export.files import unused, write_private
from gputop.export.snapshot import document, to_json, to_text, write_snapshot
from gputop.samples import LOST, GpuSample
from tests.fakes import StillSession


def test_unknown_is_null_with_its_reason_and_never_zero() -> None:
    doc = json.loads(to_json(document(StillSession(fine=False))))
    sm = doc["gpus"][0]["readings"]["sm_active"]
    assert sm["value"] is None and "Hopper" in sm["reason"]
    util = doc["gpus"][0]["readings"]["gpu_util"]
    assert util["coarse"] is True and util["unit"] == "ratio" and 0 <= util["value"] <= 1
    assert doc["gpus"][0]["readings"]["fp64_active"] == {
        "value": None, "unit": "ratio", "source": None, "reason": "not sampled", "coarse": False}
    assert doc["host"]["readings"]["net_tx_bytes_per_s"]["value"] is None


def test_history_holds_the_lanes_and_null_where_nothing_was_measured() -> None:
    doc = document(StillSession(ticks=100))
    lane = doc["history"]["gpus"]["GPU-test-0"]["sm_active"]["mean"]
    assert len(lane) == doc["history"]["slices"]
    assert lane[0] is None and lane[-1] is not None
    assert all(v is None or 0 <= v <= 1 for v in lane)


def test_text_names_the_coarse_and_the_lost() -> None:
    def lose(gpu: GpuSample, tick: int) -> GpuSample:
        return replace(gpu, state=LOST, readings={}, message="fell off the bus\x1b[2J") if gpu.info.index == 1 else gpu

    text = to_text(StillSession(fine=False, change=lose))
    assert "lost: fell off the bus�[2J" in text and "\x1b" not in text
    assert "~" in text and "coarse utilization" in text
    assert "0B" not in text.split("Host")[0]


def test_a_simulated_snapshot_says_so_in_name_text_and_json(tmp_path: Path) -> None:
    session = StillSession()
    assert session.sample is not None
    session.sample = replace(session.sample, simulated=True)
    paths = write_snapshot(session, tmp_path)
    assert all("SIMULATED" in p.name for p in paths)
    assert paths[1].read_text().startswith("*** SIMULATED")
    assert json.loads(paths[0].read_text())["simulated"] is True


def test_before_the_first_sample_there_is_nothing_to_write() -> None:
    with pytest.raises(GputopError, match="nothing was sampled"):
        document(StillSession(ticks=0))
    with pytest.raises(GputopError, match="nothing was sampled"):
        to_text(StillSession(ticks=0))


def test_files_are_private_and_never_overwritten(tmp_path: Path) -> None:
    first = write_snapshot(StillSession(), tmp_path)
    second = write_snapshot(StillSession(), tmp_path)
    assert not {p.name for p in first} & {p.name for p in second}
    assert stat.S_IMODE(first[0].stat().st_mode) == 0o600
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(GputopError, match=r"cannot write .*file/x") as caught:
        write_private(tmp_path / "file" / "x", b"")
    assert "--logdir" in caught.value.fix


def test_a_full_disk_leaves_no_partial_file(tmp_path: Path) -> None:
    # A file size limit stands in for the full disk: the write fails half-way in the same place.
    program = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "from gputop.errors import GputopError\n"
        "from gputop.export.files import write_private\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))\n"
        "try:\n"
        "    write_private(Path(sys.argv[1]), b'x' * 100_000)\n"
        "except GputopError as error:\n"
        "    print(error.message)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "big.json")], capture_output=True, text=True,
                          env={**os.environ}, check=True)
    assert "cannot write" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_unused_counts_up(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    assert unused(path) == path
    path.touch()
    (tmp_path / "a-2.json").touch()
    assert unused(path).name == "a-3.json"


def test_a_device_is_written_to_and_never_replaced() -> None:
    write_private(Path("/dev/null"), b"x")
    assert Path("/dev/null").is_char_device()
    with pytest.raises(GputopError, match="No space left"):
        write_private(Path("/dev/full"), b"x")
    assert Path("/dev/full").is_char_device()
