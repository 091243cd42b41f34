"""The main job on a real terminal, key by key: from the demo to its cause, and after a lost session to it again; a
real job without a profiler server, with one, and where no driver is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests import nvml_fake
from tests.processes import once_ready
from tests.tui.terminals import Terminal, terminal

CAUSE = "Input wait takes"
TRAIN = """
import time
import tensorflow as tf
train_step = tf.function(lambda x: tf.reduce_sum(tf.matmul(x, x)))
batch = tf.ones([256, 256])
train_step(batch)
print("ready", flush=True)
while True:
    train_step(batch).numpy()
    time.sleep(0.02)
"""


@pytest.mark.parametrize("size", [(80, 24)])
def test_from_the_demo_to_the_cause_and_back_after_a_lost_session(size: tuple[int, int], tmp_path: Path) -> None:
    logdir = ("--demo", "input-bound", "--logdir", str(tmp_path))
    with terminal(size, *logdir) as there:
        there.until(lambda text: "c: capture a trace" in text and "c capture  a attach" in text)
        there.press("c")
        there.until("x stop")
        there.until(lambda text: re.search(r" [2-9]\.\d of ", text))
        there.press("x")
        found = there.until(lambda text: CAUSE in text and "step time" in text)
        assert re.search(r"fix: [\d.]+ → [\d.]+ ms", found) and "t timeline  T tables" in found
        there.press("\r")
        there.until(lambda text: f"─ SIMULATED · {CAUSE}" in text and "Evidence" in text)
        there.press("\x1b")
        there.until(lambda text: "Evidence" not in text and "t timeline" in text)
        there.press("t")
        there.until(lambda text: "gputop  SIMULATED  timeline" in text and "events" in text and "Reading" not in text)
        there.press("q")
        there.until("t timeline")
        there.press("T")
        there.until("1 Kernels")
        there.press("q")
        there.until("t timeline")
        there.press("J")
        there.until(lambda text: re.search(rf"● \d\d:\d\d:\d\d +\S+ ms/step +{CAUSE}", text))
        there.program.kill()  # the line was lost
    with terminal(size, *logdir) as there:
        there.until("c capture  a attach")
        there.press("J")
        there.until(lambda text: re.search(rf"\d\d:\d\d:\d\d +\S+ ms/step +{CAUSE}", text))
        there.press("\r")
        # The demo's job of then has ended: its verdict is not on the line of the job that runs now.
        there.until(lambda text: "from an earlier job" in text and CAUSE in text and "c: capture a trace" in text)
        there.press("q")
        assert there.ended() == 0 and there.given_back()


def training(folder: Path) -> AbstractContextManager[subprocess.Popen[str]]:
    """A TensorFlow job that steps, without a profiler server."""
    script = folder / "train.py"
    script.write_text(TRAIN)
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    command = [sys.executable, str(script), "--lr", "1"]
    return once_ready(*command, env=env)


def captured(there: Terminal) -> str:
    """The screen once the capture under way has recorded a second, was stopped and analyzed."""
    there.until(lambda text: re.search(r" [1-9]\.\d of ", text))
    there.press("x")
    return there.until(lambda text: "What to do · capture" in text and "step time" in text)


@pytest.mark.tensorflow
def test_a_real_job_without_a_server_with_one_and_where_no_driver_is(tmp_path: Path) -> None:
    library = nvml_fake.build(tmp_path)
    without_driver = nvml_fake.environment(library, "init 9")
    with training(tmp_path) as job:
        env = nvml_fake.environment(library, "gpus 2", f"process 0 {job.pid} 5000 C 50")
        # Named, so that servers of other tests on this machine are none of it; nothing listens there.
        with terminal((80, 24), "--logdir", str(tmp_path), "--attach", "127.0.0.1:1", env=env) as there:
            shown = there.until("Press c to start one in the running job")
            assert "No profiler server found" in shown and f"{job.pid} " in shown and " train.py --lr 1" in shown
            there.press("c")
            assert "Start one? y/N" in there.until(f"train.py (pid {job.pid}) has no profiler server")
            there.press("y")
            captured(there)
            there.press("i")
            # Those of other tests are listed, too.
            own = re.compile(rf"● (127\.0\.0\.1:\d+)[^●]*PID {job.pid}\b")
            found = own.search(there.until(own.search))
            address = found[1]
            there.press("\x1b")
            there.until(lambda text: "Profiler servers" not in text)
            there.press("q")
            assert there.ended() == 0 and there.given_back() and "gputop --logdir" in there.raw.decode()
        with terminal((80, 24), "--logdir", str(tmp_path), "--attach", address, env=without_driver) as there:
            shown = there.until(lambda text: "no GPU" in text and "c: capture a trace" in text)
            assert "There is no GPU here. The NVIDIA dr" in shown
            assert f"● {address}" in shown
            there.press("c")
            captured(there)
            there.press("t")
            there.until(lambda text: "  timeline  " in text and "events" in text and "Reading" not in text)
            there.press("\x1b")
            there.until("t timeline")
            job.kill()
            assert "train.py" in there.until(f"process {job.pid} has ended")
            there.press("q")
            assert there.ended() == 0 and there.given_back()
