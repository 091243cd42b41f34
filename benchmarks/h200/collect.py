"""Everything gputop can learn from one machine with a GPU, in one run: calls, recordings, traces, cures.

    python benchmarks/h200/collect.py OUT [--jobs fp32,tf32] [--scale 1.0] [--seconds 2]

Runs the JAX programs of ``jobs.py`` one after the other, each with its profiler server, and while
it trains records the telemetry at 10 Hz and captures a trace, both with gputop as a user would.
Written into OUT:

- ``doctor.json``, ``snapshot.json``, ``snapshot.txt``, ``nvml_calls.md``: the machine and its driver
- ``JOB.gputop``, ``JOB.xplane.pb.gz``, ``JOB.json``: recording, trace and its findings
- ``summary.md``: for each fault what gputop named, the gain it promised and the gain its cure brought,
  by the clock of the job itself
- ``LOG``: what failed, and how

What fails is written down and the rest goes on. Needs gputop and jax (with its CUDA plugin for a GPU).
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import itertools
import json
import platform
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from jobs import JOBS  # noqa: E402

GPUTOP = (sys.executable, "-m", "gputop")
START_TIMEOUT_S = 120.0  # of a job: importing JAX and compiling
ALONE_S = 4.0  # of every job's time undisturbed, for its own step time


@dataclass
class Seen:
    """What one job and gputop said of it."""

    own_step_s: float | None = None
    document: dict[str, Any] | None = None

    @property
    def step_s(self) -> float | None:
        return ((self.document or {}).get("steps") or {}).get("median_s")

    def finding(self, name: str) -> dict[str, Any] | None:
        """A finding by its id, a folded one included."""
        for finding in (self.document or {}).get("findings", ()):
            for one in (finding, *finding.get("consequences", ())):
                if one["id"] == name:
                    return dict(one)
        return None


class Collector:
    """One run into one folder."""

    def __init__(self, out: Path, scale: float, seconds: float) -> None:
        self.out, self.scale, self.seconds = out, scale, seconds
        self.seen: dict[str, Seen] = {}

    def note(self, text: str) -> None:
        print(text, flush=True)
        with (self.out / "LOG").open("a") as log:
            log.write(text + "\n")

    def run(self, name: str, command: tuple[str, ...], timeout_s: float) -> str | None:
        """Its stdout; a failure is noted and None."""
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.note(f"{name}: not done after {timeout_s:.0f} s")
            return None
        if done.returncode:
            self.note(f"{name}: exit status {done.returncode}\n{done.stderr[-1500:]}")
        return done.stdout or None

    def machine(self) -> None:
        """The driver, what it allows, and what its calls cost."""
        for file, command in (
            ("doctor.json", (*GPUTOP, "doctor", "--json")),
            ("snapshot.json", (*GPUTOP, "snapshot", "--format", "json")),
            ("snapshot.txt", (*GPUTOP, "snapshot", "--format", "text")),
            ("nvml_calls.md", (sys.executable, str(HERE.parent / "nvml_calls.py"))),
            ("nvidia-smi.txt", ("nvidia-smi", "-q")),
        ):
            if shutil.which(command[0]) is None:
                self.note(f"{file}: there is no {command[0]}")
            elif (text := self.run(file, command, 180.0)) is not None:
                (self.out / file).write_text(text)

    @contextlib.contextmanager
    def training(self, job: str, port: int) -> Iterator[None]:
        """The job, up and running; ended by SIGTERM so that it writes its log."""
        command = (sys.executable, str(HERE / "jobs.py"), job, "--port", str(port), "--scale", str(self.scale),
                   "--log", str(self.out / f"{job}.steps.json"))
        with (self.out / f"{job}.err").open("w") as errors, subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            try:
                assert process.stdout is not None
                if process.stdout.readline().strip() != "ready":
                    raise RuntimeError(f"{job} did not start: see {job}.err")
                yield
            finally:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()

    def job(self, job: str) -> None:
        """Train, record, capture; what came of it in ``seen``."""
        seen = self.seen[job] = Seen()
        recording, traces = self.out / f"{job}.gputop", self.out / f"{job}.traces"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        with self.training(job, port):
            alone = (time.time(), time.time() + ALONE_S)
            record = subprocess.Popen((*GPUTOP, "record", "-o", str(recording), "--interval", "0.1", "--seconds",
                                       str(ALONE_S + self.seconds + 4)), stdout=subprocess.DEVNULL,
                                      stderr=subprocess.PIPE, text=True)
            time.sleep(ALONE_S)  # the job alone: this is what is measured
            text = self.run(f"{job}: capture", (*GPUTOP, "capture", "--attach", f"127.0.0.1:{port}", "--seconds",
                                                str(self.seconds), "--json", "--logdir", str(traces)), 240.0)
            _, errors = record.communicate(timeout=60)
            if record.returncode:
                self.note(f"{job}: record: {errors[-500:]}")
        if text:
            (self.out / f"{job}.json").write_text(text)
            seen.document = json.loads(text)
        for trace in traces.rglob("*.xplane.pb"):
            with trace.open("rb") as raw, gzip.open(self.out / f"{job}.xplane.pb.gz", "wb", 9) as packed:
                shutil.copyfileobj(raw, packed)
        shutil.rmtree(traces, ignore_errors=True)
        ends = json.loads((self.out / f"{job}.steps.json").read_text())["step_ends_s"]
        apart = [b - a for a, b in itertools.pairwise(ends) if alone[0] <= a and b <= alone[1]]
        seen.own_step_s = median(apart) if apart else None

    def summary(self) -> str:
        """The table of faults, promises and cures."""
        lines = [f"# {platform.node()}, {time.strftime('%Y-%m-%d')}, scale {self.scale:g}", "",
                 "| job | step by its own clock | by the trace | findings, the costliest first |", "|---|---|---|---|"]
        for job, seen in self.seen.items():
            found = [f"{f['id']} ({f['severity']})" for f in (seen.document or {}).get("findings", ())]
            lines.append(f"| {job} | {_ms(seen.own_step_s)} | {_ms(seen.step_s)} | {', '.join(found) or '–'} |")
        lines += ["", "| fault | named | promised step | step after the cure |", "|---|---|---|---|"]
        for job, seen in self.seen.items():
            fault, cure = JOBS[job].fault, JOBS[job].cure
            if fault is None or cure is None:
                continue
            finding = seen.finding(fault)
            promised = (finding or {}).get("gain", {}).get("step_time")
            after = self.seen[cure].own_step_s if cure in self.seen else None
            lines.append(f"| {job} | {fault + (' yes' if finding else ' no')} | {_ms(seen.own_step_s)} → "
                         f"{_after(seen, promised)} | {_ms(after)} |")
        return "\n".join(lines) + "\n"


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1e3 * seconds:.2f} ms"


def _after(seen: Seen, saved_share: float | None) -> str:
    """``gain.step_time`` is the share of the step that the cure saves."""
    return "–" if saved_share is None or seen.own_step_s is None else _ms(seen.own_step_s * (1 - saved_share))


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("out", type=Path)
    arguments.add_argument("--jobs", default=",".join(JOBS), help="some of: " + ", ".join(JOBS))
    arguments.add_argument("--scale", type=float, default=1.0, help="of the arrays; 0.02 for a machine without a GPU")
    arguments.add_argument("--seconds", type=float, default=2.0, help="of every capture")
    options = arguments.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    collector = Collector(options.out, options.scale, options.seconds)
    collector.machine()
    for job in options.jobs.split(","):
        begun = time.monotonic()
        try:
            collector.job(job)
        except (OSError, ValueError, RuntimeError, subprocess.SubprocessError) as error:
            collector.note(f"{job}: {error}")
        collector.note(f"{job}: {time.monotonic() - begun:.0f} s")
        (options.out / "summary.md").write_text(collector.summary())  # after each: a limit may end the run
    print(collector.summary())
    return 0


if __name__ == "__main__":
    sys.exit(main())
