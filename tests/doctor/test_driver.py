"""`gputop doctor` as a whole, and the child that asks the driver, over fake libraries in the driver's place."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gputop.cli import main
from gputop.doctor import driver, driver_facts
from gputop.doctor.driver_facts import ask_driver
from gputop.doctor.examine import examine
from tests.listening import free_port
from tests.nvml_fake import build, environment
from tests.waiting import until

H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


Configured = Callable[..., dict[str, str]]


@pytest.fixture
def configured(library: Path) -> Configured:
    return lambda *settings: environment(library, *settings)


def compiled(folder: Path, init: str) -> dict[str, str]:
    """An environment whose driver library has nothing but an nvmlInit with this body."""
    source = folder / "init.c"
    source.write_text("#include <stdlib.h>\n#include <sys/stat.h>\n#include <unistd.h>\n"
                      f"int nvmlInitWithFlags(unsigned f) {{ (void)f; {init} }}\n")
    subprocess.run([os.environ.get("CC", "gcc"), "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", source],
                   check=True)
    return {**os.environ, "LD_LIBRARY_PATH": str(folder)}


def test_asks_a_driver_that_works(configured: Configured, library: Path) -> None:
    facts = ask_driver(60, configured("gpus 3", "set mig 1 1", "process 2 4711 500 C 50", "process 2 4712 5 G 0"))
    assert (facts.nvml_path, facts.init_code, facts.count, facts.died) == (str(library), 0, 3, "")
    assert [gpu.code for gpu in facts.gpus] == [0, 0, 0] and facts.all_sm_active
    assert [gpu.mig for gpu in facts.gpus] == [False, True, False]
    assert facts.gpus[0].name == H100 and facts.pids == (4711,)


def test_sm_activity_is_really_read(configured: Configured) -> None:
    facts = ask_driver(60, configured("gpus 2", "refuse nvmlGpmSampleGet 4 0", "refuse gpm:2 3 1"))
    assert "no permission" in facts.gpus[0].sm_active_reason
    assert "not supported" in facts.gpus[1].sm_active_reason


def test_one_gpu_that_hangs_leaves_the_others_known(configured: Configured, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(process: subprocess.Popen[bytes], _: float) -> tuple[bytes, bytes, bool]:
        """As if the deadline passed once the others have answered."""
        said = b""
        while said.count(b'"code"') < 3:
            said += process.stdout.readline()  # type: ignore[union-attr]
        return said, b"", False

    monkeypatch.setattr(driver_facts, "_read", read)
    monkeypatch.setattr(driver_facts, "_MOST_STARVED", math.inf)
    facts = ask_driver(4, configured("gpus 4", "hang_after 0 1", "refuse nvmlDeviceGetHandleByIndex_v2 15 2"))
    assert [gpu.code for gpu in facts.gpus] == [0, None, 15, 0]
    assert [check.id for check in driver.gpus(facts)] == ["gpus", "gpu_1", "gpu_2"]


def test_a_library_that_crashes_is_a_fact(tmp_path: Path) -> None:
    facts = ask_driver(60, compiled(tmp_path, "abort();"))
    assert facts.died.startswith("by SIGABRT") and facts.init_code is None
    assert driver.nvml(facts, tmp_path).status == "fail"


def test_a_hanging_init_does_not_hang_doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, read = tmp_path / "hangs", driver_facts._read
    monkeypatch.setattr(driver_facts, "_read", lambda process, _: until(hangs.exists) and read(process, 1.0))
    monkeypatch.setattr(driver_facts, "_MOST_STARVED", math.inf)
    report = examine(tmp_path, env=compiled(tmp_path, f'mkdir("{hangs}", 0700); for (;;) pause();'), deadline_s=60)
    by_id = {check.id: check for check in report.checks}
    assert by_id["nvml"].status == "fail" and "nvmlInit did not return" in by_id["nvml"].detail
    assert by_id["python"].status == by_id["logdir"].status == "ok" and report.exit_code == 1


def test_json_document_and_success(configured: Configured, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "gputop", "doctor", "--json", "--logdir", str(tmp_path)], text=True,
                          env=configured("gpus 2"), cwd=Path(__file__).resolve().parents[2], capture_output=True)
    document = json.loads(done.stdout)
    assert done.stderr == "" and document["schema"] == "gputop.doctor/1"
    failed = [check for check in document["checks"] if check["status"] == "fail"]
    assert done.returncode == 0, failed
    assert all(set(check) == {"id", "status", "title", "detail", "fix"} for check in document["checks"])
    ids = [check["id"] for check in document["checks"]]
    assert ids[0] == "python" and {"nvml", "gpus", "sm_activity", "dcgm", "profiling_rights", "disk"} <= set(ids)
    assert len(ids) == len(set(ids)) and str(tmp_path) in json.dumps(document)


@pytest.mark.parametrize(("settings", "code", "words"), [
    (["init 18"], 1, "different"), (["init 9"], 3, "kernel module"), (["gpus 0"], 3, "cannot see any GPU"),
    (["gpus 2", "refuse nvmlDeviceGetUUID 16 1"], 1, "nvidia-smi --gpu-reset -i 1"),
])
def test_exit_status_over_the_fake(configured: Configured, settings: list[str], code: int, words: str,
                                   monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "environ", configured(*settings))
    assert main(["doctor"]) == code
    out, err = capsys.readouterr()
    assert words in out and err == ""
    assert ("gputop --demo" in out) == (code == 3)


def test_an_attached_server_that_is_missing_fails_and_a_wrong_address_is_usage(
        configured: Configured, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "environ", configured("gpus 1"))
    assert main(["doctor", "--attach", f"127.0.0.1:{free_port()}"]) == 1
    assert "nothing listens" in capsys.readouterr().out
    assert main(["doctor", "--attach", "no:port"]) == 2
