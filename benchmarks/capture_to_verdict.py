"""From the end of a recording to the verdict: gputop beside TensorFlow's client and XProf, on one real job.

    python benchmarks/capture_to_verdict.py [--job "slow input" --job "small layers"] [--seconds 2] [--rounds 5]

Needs TensorFlow and xprof in this environment. The job (tests/tf_job.py, on the CPU) trains on meanwhile, as it does
when somebody looks at it, and takes its share of the processors from whoever analyzes. By turns one asks its
profiler server for the same number of seconds:

- gputop as the monitor does at the key ``c`` (gputop.session.capture.captures.capture_and_analyze): request, trace on
  disk, analysis in a worker process that is started for it, findings;
- TensorFlow's client, and then XProf's overview page of the file, in a process that has imported and used both before,
  as TensorBoard has.

What counts is the time from the end of the seconds that were asked for to the findings or the page; the parts are how
long the trace took to arrive and how long it took to be analyzed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from gputop.profiler.capture.records import CaptureStatus, Server  # noqa: E402
from gputop.profiler.capture.request import CaptureRequest  # noqa: E402
from gputop.session.capture.captures import CaptureRun, capture_and_analyze  # noqa: E402
from tests.tf_job import MODES, TfJob, start_tf_job  # noqa: E402

_PEER = """
import json, pathlib, sys, time
import tensorflow as tf
from xprof.convert import raw_to_tool_data
print("ready", flush=True)
for line in sys.stdin:
    address, logdir, seconds = json.loads(line)
    began_s = time.time()
    tf.profiler.experimental.client.trace("grpc://" + address, logdir, int(1000 * seconds))
    arrived_s = time.time()
    (path,) = pathlib.Path(logdir).rglob("*.xplane.pb")
    page, _ = raw_to_tool_data.xspace_to_tool_data([str(path)], "overview_page", {})
    print(json.dumps([arrived_s - began_s - seconds, time.time() - arrived_s, path.stat().st_size]), flush=True)
"""


class Taken(NamedTuple):
    """Seconds after the end of the recording until the trace was there, and from then to what it says."""

    arrived_s: float
    analyzed_s: float
    trace_bytes: int

    @property
    def all_s(self) -> float:
        return self.arrived_s + self.analyzed_s


def by_gputop(job: TfJob, seconds: float) -> Taken:
    began_s = 0.0
    analyzing_s = 0.0

    def status(now: CaptureStatus) -> None:
        nonlocal began_s, analyzing_s
        if now.phase == "recording":
            began_s = time.time() - now.elapsed_s
        elif now.phase == "analyzing" and not analyzing_s:
            analyzing_s = time.time()

    with tempfile.TemporaryDirectory() as logdir:
        record = capture_and_analyze(
            (Server(job.address, pid=job.pid),), CaptureRequest(seconds, Path(logdir), force=True),
            CaptureRun(threading.Event(), threading.Event(), status))
        ended_s = time.time()
        assert record.analysis is not None, record.problem
        return Taken(analyzing_s - began_s - seconds, ended_s - analyzing_s, record.path.stat().st_size)


def by_xprof(peer: subprocess.Popen[str], job: TfJob, seconds: float) -> Taken:
    assert peer.stdin is not None and peer.stdout is not None
    with tempfile.TemporaryDirectory() as logdir:
        peer.stdin.write(json.dumps([job.address, logdir, seconds]) + "\n")
        peer.stdin.flush()
        return Taken(*json.loads(next(line for line in peer.stdout if line.startswith("["))))  # the client talks, too


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", action="append", choices=MODES, help="what the job does; may be repeated")
    parser.add_argument("--seconds", type=float, default=2.0, help="recorded each time")
    parser.add_argument("--rounds", type=int, default=5, help="captures by each, after one that does not count")
    options = parser.parse_args()
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    with subprocess.Popen([sys.executable, "-c", _PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL, text=True, env=env) as peer:
        assert peer.stdout is not None and peer.stdout.readline().strip() == "ready", "TensorFlow or xprof is missing"
        for mode in options.job or ("slow input", "small layers"):
            with start_tf_job(mode) as job:
                runs = [(by_gputop(job, options.seconds), by_xprof(peer, job, options.seconds))
                        for _ in range(options.rounds + 1)][1:]
            print(f"{mode}: a trace of {statistics.median(own.trace_bytes for own, _ in runs) / 1e6:.1f} MB, "
                  f"medians of {options.rounds}")
            for name, taken in zip(("gputop", "TensorFlow's client and XProf"), zip(*runs, strict=True), strict=True):
                print(f"  {name:<30}{statistics.median(t.all_s for t in taken):6.2f} s: trace there after "
                      f"{statistics.median(t.arrived_s for t in taken):.2f}, analyzed in "
                      f"{statistics.median(t.analyzed_s for t in taken):.2f}; at most "
                      f"{max(t.all_s for t in taken):.2f}")
            ratio = statistics.median(own.all_s / other.all_s for own, other in runs)
            print(f"  gputop takes {ratio:.2f} times as long")
        peer.communicate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
