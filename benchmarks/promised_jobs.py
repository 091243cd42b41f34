"""What gputop promised against what the fix brought: real jobs with one known fault each, before and after.

    python benchmarks/promised_jobs.py JOBS FOLDER [--kinds KIND ...] [--tf-python PYTHON] [--jax-python PYTHON]
                                       [--torch-python PYTHON]

JOBS is loop_jobs.py, or a folder with zoo.py. The script runs as `SCRIPT KIND PORT LOG`, serves its profiler on PORT,
and writes the end of each step to LOG. CURE=1 in its environment runs the job with the fix. A job of PyTorch (t_*)
serves nothing: it is captured by its process id. The step is that of the log, without a capture: the mean of the six
seconds before it. FOLDER keeps captures and logs. A bound that says "at most" is passed if the fix brought more, one
that says "at least" if it brought less. Three points of a hundred are the jobs' own noise. "About" is kept if the fix
brought it within a third.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.loop_jobs import KINDS as LOOPS

ZOO = ("mapbatch", "pydataset", "predictcb", "fninloop", "gcpause", "jaxoptax", "jaxshapes")
_NOISE, _ABOUT_ERROR = 0.03, 1 / 3  # of the step, of the promise
_WARM_UP_STEPS, _SECONDS, _PATIENCE_S = 12, 6.0, 120.0


def step_ends(log: Path) -> list[float]:
    return [float(line.split()[0]) for line in log.read_text().splitlines() if line.endswith(" e")]


class Job:
    """One run of the job, ended with the context."""

    def __init__(self, options: argparse.Namespace, kind: str, *, fixed: bool) -> None:
        self.log = options.folder / f"{kind}{'-fixed' if fixed else ''}.log"
        self.log.write_text("")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        pythons = {"t_": options.torch_python, "j_": options.jax_python, "ja": options.jax_python}
        script = options.jobs / "zoo.py" if options.jobs.is_dir() else options.jobs
        environment = {**os.environ, **({"CURE": "1"} if fixed else {})}
        self._process = subprocess.Popen(
            [pythons.get(kind[:2], options.tf_python), str(script), kind, str(port), str(self.log)], env=environment,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.target = [str(self._process.pid), "--yes"] if kind.startswith("t_") else ["--attach", f"127.0.0.1:{port}"]

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def step_s(self) -> float:
        """The mean step by the log, once it is warm. Raises RuntimeError where the job does not run."""
        end = time.monotonic() + _PATIENCE_S
        while len(step_ends(self.log)) < _WARM_UP_STEPS:
            if time.monotonic() > end or self._process.poll() is not None:
                raise RuntimeError("the job makes no steps")
            time.sleep(0.2)
        first = len(step_ends(self.log))
        time.sleep(_SECONDS)
        ends = step_ends(self.log)[first - 1:]
        if len(ends) < 3:
            raise RuntimeError("the job makes too few steps")
        return statistics.fmean(b - a for a, b in itertools.pairwise(ends))


def captured(job: Job, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "gputop", "capture", *job.target, "--logdir", str(folder), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if not done.stdout.startswith("{"):
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no analysis")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def kept(gain: dict[str, Any], brought: float) -> str:
    promised, words = gain.get("step_time"), gain.get("claim")
    if promised is None:
        return "no figure"
    if words == "at least":
        return "kept" if brought >= promised - _NOISE else "passed"
    if words == "at most":
        return "kept" if brought <= promised + _NOISE else "passed"
    return "kept" if abs(brought - promised) <= _ABOUT_ERROR * promised else "missed"


def finding_of(jobs: Path, kind: str, document: dict[str, Any]) -> dict[str, Any] | None:
    """The first finding that is about the job's fault by truth.json beside zoo.py, else the first of all: a loaded
    machine is one of its own."""
    truth = json.loads((jobs / "truth.json").read_text()).get(kind, {}) if jobs.is_dir() else {}
    findings: list[dict[str, Any]] = document.get("findings") or []
    about = [finding for finding in findings if finding["id"] in truth.get("first", ())]
    return next(iter(about or findings), None)


def row(options: argparse.Namespace, kind: str) -> str:
    with Job(options, kind, fixed=False) as job:
        before = job.step_s()
        document = captured(job, options.folder / kind)
    with Job(options, kind, fixed=True) as job:
        after = job.step_s()
    brought = 1 - after / before
    found = finding_of(options.jobs, kind, document)
    if found is None:
        return f"| {kind} | {before * 1e3:.1f} ms | {after * 1e3:.1f} ms | {brought:.0%} | none | | |"
    gain = found.get("gain") or {}
    share = gain.get("step_time")
    promised = "no figure" if share is None else f"{gain['claim']} {share:.0%}"
    return (f"| {kind} | {before * 1e3:.1f} ms | {after * 1e3:.1f} ms | {brought:.0%} | {found['id']} | {promised} | "
            f"{kept(gain, brought)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kinds", nargs="*")
    parser.add_argument("--tf-python", default=sys.executable)
    parser.add_argument("--jax-python", default=sys.executable)
    parser.add_argument("--torch-python", default=sys.executable)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    print("| job | step before | with the fix | brought | finding | promised | bound |")
    print("|---|---:|---:|---:|---|---|---|", flush=True)
    for kind in options.kinds or (ZOO if options.jobs.is_dir() else LOOPS):
        try:
            print(row(options, kind), flush=True)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"| {kind} | {error} |", flush=True)


if __name__ == "__main__":
    main()
