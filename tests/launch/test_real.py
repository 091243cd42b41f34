"""Against real TensorFlow and, where it is installed, JAX. One job of each kind: their start takes seconds.

``JAX_PYTHON`` may name a Python that has JAX, should the tests' own have none.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import subprocess
import sys
from collections.abc import Iterator

import pytest

from gputop.profiler.recording import EmptyTrace
from gputop.profiler.xprof.probe import probe
from tests import xspace_messages as messages
from tests.forked_processes import Forked
from tests.launch.jobs import GPUTOP, addresses, environment
from tests.profiler.capturing import capture

_JAX_PYTHON = os.environ.get("JAX_PYTHON") or (sys.executable if importlib.util.find_spec("jax") else "")
_needs_jax = pytest.mark.skipif(not _JAX_PYTHON, reason="JAX is not installed")

# Each starts a server of its own where it is given a port, says "ready", steps when a line comes on its standard
# input, and ends with status 7 when that closes.
_TENSORFLOW = """
import os, sys
import tensorflow as tf
import multiprocessing
cpu = tf.config.list_physical_devices("CPU")[0]
# Refused by a TensorFlow whose devices have been initialized.
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
with multiprocessing.get_context("fork").Pool(1) as pool:  # as data loaders do it
    print(*pool.map(abs, [-1]))
if sys.argv[1:]:
    tf.profiler.experimental.server.start(int(sys.argv[1]))
step = tf.function(lambda x: tf.reduce_sum(tf.matmul(x, x)))
value = tf.ones([64, 64])
step(value)
print("ready", len(tf.config.list_logical_devices()), flush=True)
for _ in sys.stdin:
    for _ in range(200):
        step(value).numpy()
    print("stepped", flush=True)
sys.exit(7)
"""
_JAX = """
import sys
import jax
from jax._src import xla_bridge
print("initialized" if xla_bridge._backends else "untouched")
if sys.argv[1:]:
    jax.profiler.start_server(int(sys.argv[1]))
step = jax.jit(lambda x: (x @ x).sum())
value = jax.numpy.ones((64, 64))
step(value).block_until_ready()
print("ready", flush=True)
for _ in sys.stdin:
    for _ in range(200):
        step(value).block_until_ready()
    print("stepped", flush=True)
sys.exit(7)
"""


@contextlib.contextmanager
def _job(command: list[str], *, forked: bool = False) -> Iterator[tuple[subprocess.Popen[str] | Forked, list[str]]]:
    """A started job that is ready, and what it had printed by then. ``forked``: from a process that has TensorFlow."""
    env = environment(None, {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1", "JAX_PLATFORMS": "cpu"})
    process = Forked(command, env, 2) if forked else subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    try:
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line.rstrip())
            if line.startswith("ready"):
                break
        else:
            raise AssertionError("the job ended:\n" + "\n".join(lines))
        yield process, lines
    finally:
        process.kill()
        if not process.stdout.closed:
            process.communicate()


def _step(process: subprocess.Popen[str] | Forked) -> None:
    assert process.stdin is not None and process.stdout is not None
    print("step", file=process.stdin, flush=True)
    while (line := process.stdout.readline()) != "stepped\n":
        assert line, "the job ended"


def _finish(process: subprocess.Popen[str] | Forked) -> int:
    process.communicate()
    return process.wait()


def _records(process: subprocess.Popen[str] | Forked, address: str, folder, event: str) -> bool:
    """Whether a trace of the job's steps has an event of that name; it is asked for steps while the recording runs.

    On a loaded machine a recording of half a second may begin late and hold no step: then there is another one.
    """
    for number in range(5):
        try:
            result = capture(address, seconds=0.5, logdir=folder / str(number),
                             on_progress=lambda p: p.phase == "recording" and _step(process))
        except EmptyTrace:
            continue
        space = messages.XSpace.FromString(result.path.read_bytes())
        if any(event in metadata.name for plane in space.planes for metadata in plane.event_metadata.values()):
            return True
    return False


def _free_port() -> int:
    from gputop.launch.inside.gputop_serve import free_port

    return free_port(0)


_JOBS = pytest.mark.parametrize(("python", "code", "event"), [
    pytest.param(sys.executable, _TENSORFLOW, "MatMul", marks=pytest.mark.tensorflow),
    pytest.param(_JAX_PYTHON, _JAX, "LoadedExecutable::Execute", marks=_needs_jax)], ids=["tensorflow", "jax"])


@_JOBS
def test_a_job_is_served_and_not_changed(python, code, event, tmp_path):
    port = _free_port()
    with _job([*GPUTOP, "run", "--headless", "--", python, "-c", code, str(port)]) as (job, lines):
        if code is _TENSORFLOW:
            assert lines[-1] == "ready 2", "its devices were its own to configure"
            assert "1" in lines, "and it could fork"
        else:
            assert "untouched" in lines, "jax.distributed.initialize() would still be possible"
        (address,) = addresses("\n".join(lines))
        assert _records(job, address, tmp_path, event)
        assert probe(f"127.0.0.1:{port}") > 0  # and start one itself
        assert _finish(job) == 7


def _attach(job: subprocess.Popen[str] | Forked) -> str:
    """Attach while the job steps: a thread that only waits for input never comes to a pending call."""
    with subprocess.Popen([*GPUTOP, "attach", str(job.pid), "--yes"], stdout=subprocess.PIPE, text=True) as attaching:
        while attaching.poll() is None:
            _step(job)
        assert attaching.returncode == 0
        return attaching.stdout.read()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64 only")
@_JOBS
def test_a_job_without_a_server_is_given_one(python, code, event, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(code)
    with _job([python, str(script)], forked=code is _TENSORFLOW) as (job, lines):
        assert addresses("\n".join(lines)) == []
        message = _attach(job)
        address = message.partition("profiler server at ")[2].partition(" ")[0]
        assert _records(job, address, tmp_path, event)
        assert f"already has a profiler server at {address}" in _attach(job)
        assert _finish(job) == 7
