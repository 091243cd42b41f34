"""``make soak``: the monitor, a session without a screen and a recording, at 10 Hz, over a driver with faults.

    python -m tests.campaign.soak --minutes 60 [--gpus 8] [--rows 20]
    python -m tests.campaign.soak --replay 10 [--speed 100] [--gpus 16]   # hours at one sample a second, replayed

Prints a table over time: memory, descriptors, threads and CPU of each process, and how many of the samples that were
due have come. Ends with 1 where memory grew by more than docs/project/cost.md allows, descriptors or threads
became more, or samples did not come.

The memory that counts is what nobody shares (VmRSS less file and shared pages). What the history may take is known:
the tables of its rings, filled within a day and for the greater part within an hour. All else has to stay level.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import json
import os
import pty
import select
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
import tracemalloc
from dataclasses import dataclass, field
from pathlib import Path

from gputop.core.samples import NodeSample
from gputop.telemetry.ring_buffers import _Table
from tests.fakes import node_sample
from tests.nvml_fake import build, environment
from tests.records import replace

ROOT = Path(__file__).resolve().parents[2]
INTERVAL_S = 0.1
# docs/project/cost.md, "Memory over time".
HISTORY_BYTES_PER_GPU = 1.6e6  # full after a day; 1.3 MB of it within the first hour at 10 Hz
MISSED_RATIO = 0.05  # of the samples that are due; half a percent on a loaded machine
OTHER_GROWTH_BYTES = 8e6  # what allocators, caches and the recording's dictionary may take after the first minute
# One GPU that answers garbage now and then, one whose calls fail in turn, one that is lost after a while.
FAULTS = ("fault nvmlDeviceGetUtilizationRates 1 5 3 garbage random", "fault nvmlDeviceGetPowerUsage 2 3 2 code 999",
          "fault field:197 2 7 5 code 6", "lost_after 4000 3", "process 0 20 1000 C 40", "process 1 21 1000 C 40")


@dataclass(frozen=True)
class Row:
    """One process at one time."""

    minutes: float
    memory_bytes: int
    descriptors: int
    threads: int
    cpu_s: float
    samples: int | None  # that have come since the start; None where that cannot be counted


@dataclass
class Subject:
    """A process that is watched. ``history``: whether it keeps one, which may grow to its bound."""

    name: str
    process: subprocess.Popen[bytes]
    history: bool
    samples_file: Path | None = None
    rows: list[Row] = field(default_factory=list)

    def measure(self, minutes: float) -> Row:
        """What it takes now; raises RuntimeError where it has ended."""
        if self.process.poll() is not None:
            raise RuntimeError(f"{self.name} ended with {self.process.returncode}")
        folder = Path(f"/proc/{self.process.pid}")
        status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        stat = (folder / "stat").read_text().rpartition(")")[2].split()
        row = Row(minutes, int(status["RssAnon"].split()[0]) * 1024, len(list((folder / "fd").iterdir())),
                  int(status["Threads"]), (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK"), self._samples())
        self.rows.append(row)
        return row

    def _samples(self) -> int | None:
        if self.samples_file is None or not self.samples_file.exists():
            return None
        if self.samples_file.suffix != ".gputop":
            return int(self.samples_file.read_text() or 0)
        from gputop.core.errors import GputopError
        from gputop.replay.reader import Recording

        try:
            with Recording(self.samples_file) as recording:
                return len(recording)
        except GputopError:  # no sample yet
            return 0


def problems(subject: Subject, gpus: int) -> list[str]:
    """What is wrong with how a process grew after its first row, at which all of it has begun."""
    first, last = subject.rows[0], subject.rows[-1]
    found = []
    allowed = OTHER_GROWTH_BYTES + (HISTORY_BYTES_PER_GPU * gpus if subject.history else 0.0)
    if last.memory_bytes - first.memory_bytes > allowed:
        found.append(f"{subject.name}: memory grew by {(last.memory_bytes - first.memory_bytes) / 1e6:.1f} MB, "
                     f"{allowed / 1e6:.0f} MB are allowed")
    if subject.samples_file is not None:
        before = subject.rows[-2] if len(subject.rows) > 1 else first
        if last.samples is None or (last is not first and last.samples == before.samples):
            found.append(f"{subject.name}: no sample came in the last {last.minutes - before.minutes:.1f} min")
        elif (share := missed(first, last)) is not None and share > MISSED_RATIO:
            found.append(f"{subject.name}: {share:.1%} of the samples that were due did not come, {MISSED_RATIO:.0%} "
                         "are allowed")
    for what in ("descriptors", "threads"):
        early = max(getattr(row, what) for row in subject.rows[:max(1, len(subject.rows) // 2)])
        late = min(getattr(row, what) for row in subject.rows[len(subject.rows) // 2:])
        if late > early:
            found.append(f"{subject.name}: never fewer than {late} {what} in the second half, at most {early} before")
    return found


def missed(first: Row, row: Row) -> float | None:
    """The share of the samples that were due between two rows and have not come; None where that cannot be said."""
    if row.samples is None or first.samples is None or row is first:
        return None
    due = (row.minutes - first.minutes) * 60 / INTERVAL_S
    return max(0.0, due - (row.samples - first.samples)) / due


class Terminal:
    """A pseudo-terminal whose output is read and thrown away."""

    def __init__(self, columns: int = 160, rows: int = 50) -> None:
        self._ours, self.theirs = pty.openpty()
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.bytes = 0
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                if select.select([self._ours], [], [], 1.0)[0]:
                    self.bytes += len(os.read(self._ours, 1 << 16))


def start(folder: Path, gpus: int) -> list[Subject]:
    """The processes under test, over a fake driver each."""
    library = build(folder)
    settings = {**environment(library, f"gpus {gpus}", *(f for f in FAULTS if _gpu_of(f) < gpus)),
                "PYTHONPATH": str(ROOT), "HOME": str(folder), "XDG_CONFIG_HOME": str(folder / "config"),
                "TERM": "xterm-256color", "LC_ALL": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1"}
    gputop = [sys.executable, "-m", "gputop"]
    options = ["--source", "nvml", "--interval", str(INTERVAL_S)]
    terminal = Terminal()

    def run(command: list[str], **streams: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, env=settings, cwd=folder, stderr=subprocess.DEVNULL, start_new_session=True,
                                **{"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, **streams})

    recording, counted = folder / "node.gputop", folder / "samples"
    return [
        Subject("monitor", run([*gputop, *options, "--logdir", str(folder / "logs")], stdin=terminal.theirs,
                               stdout=terminal.theirs), True),
        Subject("session", run([sys.executable, "-m", "tests.campaign.soak", "--session", str(counted)]), True,
                counted),
        Subject("record", run([*gputop, "record", *options, "-o", str(recording)]), False, recording),
    ]


def _gpu_of(fault: str) -> int:
    words = fault.split()
    return int(words[2] if words[0] in ("fault", "lost_after") else words[1])


def start_replay(folder: Path, hours: float, gpus: int, speed: float) -> list[Subject]:
    """The monitor on a recording of so many hours, one sample a second, that is played at ``speed``."""
    from gputop.replay.format import RecordingWriter

    writer = RecordingWriter(folder / "node.gputop")
    for tick in range(round(hours * 3600)):
        writer.append(node_sample(tick, gpus))
    writer.close()
    terminal = Terminal()
    process = subprocess.Popen([sys.executable, "-m", "gputop", "replay", str(writer.path), "--speed", f"{speed:g}"],
                               env={**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(folder), "LC_ALL": "C.UTF-8",
                                    "TERM": "xterm-256color", "OPENBLAS_NUM_THREADS": "1"}, cwd=folder,
                               stdin=terminal.theirs, stdout=terminal.theirs, stderr=subprocess.DEVNULL,
                               start_new_session=True)
    return [Subject("replay", process, True)]


def stop(subjects: list[Subject]) -> None:
    for subject in subjects:
        subject.process.terminate()
    for subject in subjects:
        try:
            subject.process.wait(60)
        except subprocess.TimeoutExpired:
            subject.process.kill()
            subject.process.wait()


def fast_clock(gpus: int, filled: int, more: int) -> dict[str, int]:
    """A session whose clock stands still between samples: what its Python objects grow by while ``more`` samples come.

    ``filled`` samples at 10 Hz came before; from :data:`HOST_HISTORY_POINTS` on every list of single samples is full.
    """
    # What a thread of the session imports when it asks the job's ranks, sooner or later.
    import encodings.idna  # noqa: F401  by socket, for the name of a host
    import textwrap  # noqa: F401

    import gputop.session.ras_worker  # noqa: F401
    from gputop.session.session import Session
    from tests.fakes import START_S, StillSource

    now_s = START_S
    pool = [node_sample(tick, gpus) for tick in range(20)]
    session = Session(StillSource(), clock=lambda: now_s)

    def sample(tick: int) -> NodeSample:
        return replace(pool[tick % len(pool)], time_s=START_S + tick * INTERVAL_S, interval_s=INTERVAL_S)

    def feed(first: int, count: int) -> None:
        nonlocal now_s
        for tick in range(first, first + count):
            now_s = START_S + tick * INTERVAL_S
            session.feed.on_sample(sample(tick))

    tracemalloc.start()
    session.feed.on_backfill([sample(tick) for tick in range(filled)])
    feed(filled, 200)  # what is imported and cached at first
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    feed(filled + 200, more)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    reserved = sum(table.cells.nbytes for rings in session.feed.history._rings
                   for ring in (rings.samples, *rings._tiers) for table in vars(ring).values()
                   if isinstance(table, _Table))
    return {"grown_bytes": grown, "reserved_bytes_per_gpu": reserved // gpus}


def hold_session(counted: Path) -> None:
    """The monitor's session without its screen; writes the number of samples to a file."""
    from gputop.session.options import Options
    from gputop.session.session import Change, Session
    from gputop.sources.nvml.source import NvmlSource

    session = Session(NvmlSource(), Options(interval_s=INTERVAL_S))
    samples, new = 0, counted.with_suffix(".new")

    def count(change: Change) -> None:
        nonlocal samples
        samples += change == "sample"
        new.write_text(str(samples))
        new.replace(counted)

    session.listen(count)
    session.start()
    threading.Event().wait()


def soak(subjects: list[Subject], seconds: float, rows: int, settle_s: float) -> list[Subject]:
    """The processes with their rows, taken evenly over ``seconds``, the first after ``settle_s``."""
    began_s = time.monotonic()
    try:
        _wait_until(began_s + settle_s)
        while any(s.samples_file is not None and not s._samples() for s in subjects):  # on a loaded machine
            _wait_until(time.monotonic() + 0.2)
            if any(s.process.poll() is not None for s in subjects):
                break
        first_s = time.monotonic()
        for row in range(rows + 1):
            _wait_until(first_s + seconds * row / rows)
            minutes = (time.monotonic() - began_s) / 60
            for subject in subjects:
                subject.measure(minutes)
                print(line(subject), flush=True)
    finally:
        stop(subjects)
    return subjects


def _wait_until(at_s: float) -> None:
    threading.Event().wait(max(0.0, at_s - time.monotonic()))


def line(subject: Subject) -> str:
    """The newest row as a line of the table; missed samples are those due since the first row that have not come."""
    first, row = subject.rows[0], subject.rows[-1]
    share = missed(first, row)
    cpu = (row.cpu_s - first.cpu_s) / ((row.minutes - first.minutes) * 60) if row is not first else 0.0
    return (f"{row.minutes:8.1f} min  {subject.name:8} {row.memory_bytes / 1e6:7.1f} MB "
            f"{(row.memory_bytes - first.memory_bytes) / 1e6:+6.1f}  {row.descriptors:4} descriptors "
            f"{row.threads:4} threads {cpu:6.1%} CPU  missed {'      –' if share is None else f'{share:8.2%}'}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--replay", type=float, metavar="HOURS", help=start_replay.__doc__)
    parser.add_argument("--speed", type=float, default=100.0)
    parser.add_argument("--rows", type=int, default=20)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--fast-clock", type=int, nargs=3, metavar=("GPUS", "FILLED", "MORE"), help=fast_clock.__doc__)
    parser.add_argument("--session", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.fast_clock is not None:
        print(json.dumps(fast_clock(*options.fast_clock)))
        return 0
    if options.session is not None:
        hold_session(options.session)
    with tempfile.TemporaryDirectory(prefix="gputop-soak-") as folder:
        if options.replay is not None:
            subjects = start_replay(Path(folder), options.replay, options.gpus, options.speed)
            hour_s = 3600 / options.speed
            soak(subjects, (options.replay - 1.2) * hour_s, options.rows, settle_s=hour_s + 5.0)
        else:
            subjects = soak(start(Path(folder), options.gpus), options.minutes * 60, options.rows,
                            settle_s=min(60.0, options.minutes * 20))
    found = [problem for subject in subjects for problem in problems(subject, options.gpus)]
    print("\n".join(found) or "nothing grew beyond its bound")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
