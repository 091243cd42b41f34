"""Everything gputop can learn from one machine with a GPU, in one run: calls, recordings, traces, fixes.

    python benchmarks/h200/collect.py OUT [--jobs jax/fp32,torch/launches] [--scale 1.0] [--seconds 2] [--limit 300]

Runs the programs of ``jax_jobs.py`` and ``torch_jobs.py`` one after the other, and while each trains records the
telemetry at 10 Hz and captures a trace, both with gputop as a user would: a JAX job by its profiler server, a PyTorch
job unprepared, by its PID. Written into OUT:

- ``doctor.json``, ``snapshot.json``, ``snapshot.txt``, ``nvml_calls.md``: the machine and its driver
- ``JOB.gputop``, ``JOB.json`` and the trace: recording and findings
- ``summary.md``: for each fault what gputop named, the gain it promised and the gain its fix brought, and what the
  capture cost, all by the clock of the job itself
- ``LOG``: what failed, and how

What fails is written down and the rest goes on. Needs gputop, and jax or torch.
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
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax_jobs
import torch_jobs

HERE = Path(__file__).resolve().parent
JOBS = {f"jax/{name}": job for name, job in jax_jobs.JOBS.items()} | {
    f"torch/{name}": job for name, job in torch_jobs.JOBS.items()}
GPUTOP = (sys.executable, "-m", "gputop")
START_TIMEOUT_S = 60.0  # of a job: importing and compiling
ALONE_S = 2.5  # of every job's time undisturbed, for its own step time
AFTER_S = 1.0  # of its time after the capture
CAPTURE_TIMEOUT_S = 60.0
ALSO = {"torch/cuda_graph"}  # fixes of which a trace is wanted, too
AHEAD = 8  # jobs that import while another one trains


@dataclass
class Window:
    """Steps of a job between two moments."""

    steps: int
    mean_s: float
    longest_s: float


@dataclass
class Seen:
    """What one job and gputop said of it."""

    windows: dict[str, Window] = field(default_factory=dict)  # alone, capture, after
    document: dict[str, Any] | None = None
    took_s: float | None = None

    @property
    def analysis(self) -> dict[str, Any]:
        document = self.document or {}
        return document.get("analysis") or document

    @property
    def trace_step_s(self) -> float | None:
        return (self.analysis.get("steps") or {}).get("median_s")

    @property
    def alone_s(self) -> float | None:
        return self.windows["alone"].mean_s if "alone" in self.windows else None

    def findings(self) -> Iterator[dict[str, Any]]:
        """All findings, those folded under another one included."""
        for finding in self.analysis.get("findings", ()):
            yield finding
            yield from finding.get("consequences", ())


def window(ends: list[float], begin: float, end: float) -> Window | None:
    """The steps whose both ends lie between two Unix times; None with less than one."""
    within = [t for t in ends if begin <= t <= end]
    if len(within) < 2:
        return None
    return Window(len(within) - 1, (within[-1] - within[0]) / (len(within) - 1),
                  max(b - a for a, b in itertools.pairwise(within)))


class Program:
    """A job's process: imports at once, and leaves the GPU alone until it is begun."""

    def __init__(self, job: str, out: Path, scale: float) -> None:
        framework, name = job.split("/")
        self.log, self.errors = out / f"{file_of(job)}.steps.json", out / f"{file_of(job)}.err"
        self.port: int | None = None
        command = [sys.executable, str(HERE / f"{framework}_jobs.py"), name, "--scale", str(scale),
                   "--log", str(self.log)]
        if framework == "jax":
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                self.port = free.getsockname()[1]
            command += ["--port", str(self.port)]
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                                            text=True, start_new_session=True)

    def begin(self) -> None:
        """Let it train; return when it does."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write("begin\n")
            self.process.stdin.flush()
        late = threading.Timer(START_TIMEOUT_S, self.process.kill)
        late.start()
        lines = iter(self.process.stdout.readline, "")
        ready = any(line.strip() == "ready" for line in lines)
        late.cancel()
        if not ready:
            raise RuntimeError(f"it did not start: {self.errors.read_text()[-1500:]}")

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def ends(self) -> list[float]:
        return list(json.loads(self.log.read_text())["step_ends_s"]) if self.log.exists() else []


def file_of(job: str) -> str:
    return job.replace("/", "_")


class Collector:
    """One run into one folder."""

    def __init__(self, out: Path, scale: float, seconds: float) -> None:
        self.out, self.scale, self.seconds = out, scale, seconds
        self.seen: dict[str, Seen] = {}
        self.began = time.monotonic()
        self.analyses: list[threading.Thread] = []  # of captures whose job has ended

    def note(self, text: str) -> None:
        line = f"{time.monotonic() - self.began:6.1f} s  {text}"
        print(line, flush=True)
        with (self.out / "LOG").open("a") as log:
            log.write(line + "\n")

    def run(self, name: str, command: tuple[str, ...], timeout_s: float) -> str | None:
        """Its stdout; a failure is noted and None."""
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.note(f"{name}: not done after {timeout_s:.0f} s")
            return None
        if done.returncode:
            self.note(f"{name}: exit status {done.returncode}\n{done.stderr[-1500:]}")
        if done.stderr:
            (self.out / f"{name}.stderr").write_text(done.stderr)
        return done.stdout or None

    def machine(self) -> None:
        """The driver, what it allows, and what its calls cost."""
        for file, command in (
            ("doctor.json", (*GPUTOP, "doctor", "--json")),
            ("doctor.txt", (*GPUTOP, "doctor")),
            ("snapshot.json", (*GPUTOP, "snapshot", "--format", "json")),
            ("snapshot.txt", (*GPUTOP, "snapshot", "--format", "text")),
            ("nvml_calls.md", (sys.executable, str(HERE.parent / "nvml_calls.py"))),
            ("nvidia-smi.txt", ("nvidia-smi", "-q")),
        ):
            if shutil.which(command[0]) is None:
                self.note(f"{file}: there is no {command[0]}")
            elif (text := self.run(file, command, 60.0)) is not None:
                (self.out / file).write_text(text)

    def job(self, job: str, program: Program) -> None:
        """Train, record, capture; what came of it in ``seen``."""
        seen = self.seen[job] = Seen()
        file = file_of(job)
        moments: dict[str, tuple[float, float]] = {}
        try:
            program.begin()
            begun = time.time()
            is_fix = any(other.fix == job.split("/")[1] for name, other in JOBS.items()
                         if name.split("/")[0] == job.split("/")[0])
            if is_fix and JOBS[job].fault is None and job not in ALSO:
                time.sleep(ALONE_S)
                moments["alone"] = begun, time.time()
            else:
                moments = self.capture(job, program, seen, self.out / file)
        finally:
            program.end()
        ends = program.ends()
        for name, moment in moments.items():
            if (steps := window(ends, *moment)) is not None:
                seen.windows[name] = steps

    def capture(self, job: str, program: Program, seen: Seen, base: Path) -> dict[str, tuple[float, float]]:
        """Record the telemetry, and in the middle of it a trace; the moments of both. The analysis goes on after it."""
        target = (str(program.process.pid), "--yes") if program.port is None else (
            "--attach", f"127.0.0.1:{program.port}")
        traces = Path(f"{base}.traces")
        begun = time.time()
        record = subprocess.Popen((*GPUTOP, "record", "-o", f"{base}.gputop", "--interval", "0.1"),
                                  stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            time.sleep(ALONE_S)  # the job alone: this is what is measured
            asked = time.time()
            command = (*GPUTOP, "capture", *target, "--seconds", str(self.seconds), "--json", "--logdir", str(traces))
            with Path(f"{base}.json").open("w") as document:
                capture = subprocess.Popen(command, stdout=document, stderr=subprocess.PIPE, text=True)
            late = threading.Timer(CAPTURE_TIMEOUT_S, capture.kill)
            late.start()
            assert capture.stderr is not None
            lines = []
            for line in capture.stderr:
                lines.append(f"{time.time() - asked:6.2f} s  {line}")
                if "analyzing" in line:
                    break
            done = time.time()
            seen.took_s = done - asked
            time.sleep(AFTER_S)
        finally:
            record.send_signal(signal.SIGINT)
            _, errors = record.communicate(timeout=60)
            if record.returncode:
                self.note(f"{job}: record: {errors[-500:]}")

        def analyze() -> None:
            assert capture.stderr is not None
            lines.extend(f"{time.time() - asked:6.2f} s  {line}" for line in capture.stderr)
            capture.wait()
            late.cancel()
            Path(f"{base}.stderr").write_text("".join(lines))
            with contextlib.suppress(ValueError):
                seen.document = json.loads(Path(f"{base}.json").read_text())
            for trace in (path for path in traces.rglob("*") if path.is_file()):
                if trace.suffix == ".gz":
                    shutil.copy(trace, f"{base}.{trace.name}")
                else:
                    with trace.open("rb") as raw, gzip.open(f"{base}.{trace.name}.gz", "wb", 3) as packed:
                        shutil.copyfileobj(raw, packed)
            shutil.rmtree(traces, ignore_errors=True)

        self.analyses.append(threading.Thread(target=analyze))
        self.analyses[-1].start()
        return {"alone": (begun + 1.0, asked), "capture": (asked, done), "after": (done, time.time())}

    def summary(self) -> str:
        """The tables of faults, promises, fixes and costs."""
        lines = [f"# {platform.node()}, {time.strftime('%Y-%m-%d')}, scale {self.scale:g}", "",
                 "| job | step by its own clock | by the trace | findings, the costliest first |", "|---|---|---|---|"]
        for job, seen in self.seen.items():
            findings = [f"{f['id']} ({f['severity']})" for f in seen.analysis.get("findings", ())]
            lines.append(f"| {job} | {_ms(seen.alone_s)} | {_ms(seen.trace_step_s)} | {', '.join(findings) or '–'} |")
        lines += ["", "| fault | named | promised step | step after the fix |", "|---|---|---|---|"]
        for job, seen in self.seen.items():
            fault, fix = JOBS[job].fault, JOBS[job].fix
            if fault is None or fix is None:
                continue
            finding = next((f for f in seen.findings() if f["id"] == fault), None)
            promised = (finding or {}).get("gain", {}).get("step_time")
            after = self.seen.get(f"{job.split('/')[0]}/{fix}")
            lines.append(f"| {job} | {fault + (' yes' if finding else ' **no**')} | {_ms(seen.alone_s)} → "
                         f"{_after(seen, promised)} | {_ms(after.alone_s if after else None)} |")
        lines += ["", "| captured | took | mean step alone, in the capture, after it | longest step of each |",
                  "|---|---|---|---|"]
        for job, seen in self.seen.items():
            if seen.took_s is None:
                continue
            windows = [seen.windows.get(name) for name in ("alone", "capture", "after")]
            means, longest = (", ".join(_ms(w and value(w)) for w in windows)
                              for value in (lambda w: w.mean_s, lambda w: w.longest_s))
            lines.append(f"| {job} | {seen.took_s:.1f} s | {means} | {longest} |")
        return "\n".join(lines) + "\n"


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1e3 * seconds:.2f} ms"


def _after(seen: Seen, saved_share: float | None) -> str:
    """``gain.step_time`` is the share of the step that the fix saves."""
    return "–" if saved_share is None or seen.alone_s is None else _ms(seen.alone_s * (1 - saved_share))


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("out", type=Path)
    arguments.add_argument("--jobs", default=",".join(JOBS), help="some of: " + ", ".join(JOBS) + "; or jax, or torch")
    arguments.add_argument("--scale", type=float, default=1.0, help="of the arrays; 0.02 for a machine without a GPU")
    arguments.add_argument("--seconds", type=float, default=2.0, help="of every capture")
    arguments.add_argument("--limit", type=float, default=3600.0, help="seconds after which no job is begun")
    arguments.add_argument("--no-machine", action="store_true", help="only the jobs")
    options = arguments.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    collector = Collector(options.out, options.scale, options.seconds)
    jobs = [name for wanted in options.jobs.split(",") for name in JOBS if wanted in (name, name.split("/")[0])]
    programs: list[tuple[str, Program]] = []
    waiting = iter(jobs)

    def more() -> None:
        programs.extend((job, Program(job, options.out, options.scale)) for job in itertools.islice(
            waiting, AHEAD - len(programs)))

    more()
    if not options.no_machine:
        collector.machine()
    while programs:
        job, program = programs.pop(0)
        more()
        begun = time.monotonic()
        if begun - collector.began > options.limit:
            collector.note(f"{job}: not begun, the time is over")
            program.end()
            continue
        try:
            collector.job(job, program)
        except (OSError, ValueError, RuntimeError, subprocess.SubprocessError) as error:
            collector.note(f"{job}: {error}")
        collector.note(f"{job}: {time.monotonic() - begun:.0f} s")
        (options.out / "summary.md").write_text(collector.summary())  # after each: a limit may end the run
    for analysis in collector.analyses:
        analysis.join()
    (options.out / "summary.md").write_text(collector.summary())
    print(collector.summary())
    return 0


if __name__ == "__main__":
    sys.exit(main())
