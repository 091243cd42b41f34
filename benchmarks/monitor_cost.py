"""What the live monitor costs, as ratios against nvitop over the same made-up node.

    python -m venv /tmp/peer && /tmp/peer/bin/pip install nvitop
    python -m venv /tmp/own && /tmp/own/bin/pip install .
    python benchmarks/monitor_cost.py --nvitop /tmp/peer/bin/nvitop --gputop /tmp/own/bin/gputop

Without --gputop the checkout is measured, by this interpreter; where it is installed as editable, the first frame
waits some hundredths of a second for the finder of setuptools.

Both programs run in a pseudo-terminal (of 160x50 with 8 GPUs at 1 Hz, if not told otherwise), over
the fake NVML of the tests (so gcc is needed, and no GPU), in turn; which one begins alternates. Measured for each:
seconds until the first frame with real values, CPU of the process tree and bytes written after the first ten seconds
(--settle), and the most resident memory. CPU is what the scheduler has counted, in nanoseconds. A single start takes a
tenth of a second and scatters by a third: the first frame of a run is the median of several starts (--starts), the
two programs by turns. So a single pair of runs decides. Prints a table of medians and of the pairs on stderr and one
JSON document on stdout. Absolute figures belong to the machine; compare the ratios, and let nothing run beside it: two
programs on two cores slow each other down.

The first frame counts once it shows a figure that only the driver can have given: the fake
holds all GPUs at 431 W and GPU 0 at 63.90 GiB, and one of the two is in the first complete
frame of either program ("431W / 700W" or "431", "63.90GiB" or "63.9"). A frame of empty
tables does not count.

The fake answers in under a microsecond, so the CPU figures are those of the programs, not
of the driver. With --driver both read this machine's own driver and GPUs; then a frame counts as the first one once it
shows how much memory GPU 0 has.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for the fake of the tests

from tests.nvml_fake import build, environment  # noqa: E402

FIRST_VALUES = re.compile(rb"\b431W?\b|\b63\.90?(?:GiB|G)?\b")
# CSI sequences, OSC and other strings, and the two-byte rest.
ESCAPES = re.compile(rb"\x1b\[[^@-~]*[@-~]|\x1b[\]P_^X][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]")
POLL_S = 0.25


@dataclass
class Cost:
    """One run of one program. CPU in percent of one core."""

    first_frame_s: float | None
    cpu_percent: float
    peak_memory_mb: float
    bytes_per_s: float


class Tree:
    """A process with its descendants; CPU of those that ended meanwhile is kept."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._cpu_s: dict[int, float] = {}
        self.peak_bytes = 0

    def cpu_s(self) -> float:
        """CPU seconds used so far by all of them, with their threads that have ended."""
        resident = 0
        for process in (self._root, *self._children()):
            try:
                resident += process.memory_info().rss
                self._cpu_s[process.pid] = process_cpu_s(process.pid)
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
        self.peak_bytes = max(self.peak_bytes, resident)
        return sum(self._cpu_s.values())

    def _children(self) -> list[psutil.Process]:
        try:
            return self._root.children(recursive=True)
        except psutil.NoSuchProcess:
            return []


def process_cpu_s(pid: int) -> float:
    """CPU seconds that a process has used, exactly: its clock, as of clock_getcpuclockid(3). The ticks of
    /proc/PID/stat are 10 ms, which is as much as a monitor uses in a second. Raises ProcessLookupError."""
    try:
        return time.clock_gettime(~pid << 3 | 2)
    except OSError as error:  # EINVAL: no such process
        raise ProcessLookupError(pid) from error


def begin(command: Sequence[str], env: dict[str, str], columns: int, rows: int) -> tuple[subprocess.Popen[bytes], int]:
    """Start ``command`` in a terminal of its own, whose other end is returned."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    process = subprocess.Popen(
        command,
        env={**env, "TERM": "xterm-256color", "COLORTERM": "truecolor"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(theirs)
    return process, ours


def of_driver() -> re.Pattern[bytes]:
    """What only a frame with values of this machine's GPU 0 shows: its memory in GiB, as either program writes it."""
    import pynvml

    pynvml.nvmlInit()
    total = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).total
    pynvml.nvmlShutdown()
    return re.compile(rf"\b{total / 2**30:.0f}(\.\d+)?\s?(GiB|G)?\b|\b{int(total / 2**30)}\.\d+".encode())


@dataclass(frozen=True)
class Terminal:
    """Where a program runs: its environment, the size of its terminal, and what its first frame shows."""

    env: dict[str, str]
    columns: int
    rows: int
    first_values: re.Pattern[bytes] = FIRST_VALUES


def first_frame_s(command: Sequence[str], terminal: Terminal) -> float | None:
    """Seconds from the start of ``command`` to its first frame, with which it is killed; None: none within 30 s."""
    began_s = time.monotonic()
    process, ours = begin(command, terminal.env, terminal.columns, terminal.rows)
    seen = bytearray()
    try:
        while (left_s := began_s + 30 - time.monotonic()) > 0:
            if select.select([ours], [], [], left_s)[0]:
                seen += os.read(ours, 1 << 16)
                if terminal.first_values.search(ESCAPES.sub(b"", bytes(seen))):
                    return time.monotonic() - began_s
    except OSError:  # it ended
        pass
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(ours)
    return None


def measure(command: Sequence[str], terminal: Terminal, seconds: float, settle_s: float) -> Cost:
    """Run ``command`` in a terminal for ``seconds``, then end it; its CPU and bytes are those after ``settle_s``."""
    began_s = time.monotonic()
    process, ours = begin(command, terminal.env, terminal.columns, terminal.rows)
    tree = Tree(process.pid)
    settled_s, end_s = began_s + settle_s, began_s + seconds
    poll_s = began_s
    first_s: float | None = None
    seen = bytearray()
    settled: tuple[float, float] | None = None  # when the part began that is measured, and the CPU used until then
    written = 0
    try:
        while (now_s := time.monotonic()) < end_s:
            if now_s >= poll_s:
                cpu_s = tree.cpu_s()
                poll_s = now_s + POLL_S
                if settled is None and now_s >= settled_s:
                    settled, written = (now_s, cpu_s), 0
            if not select.select([ours], [], [], max(0.0, min(poll_s, end_s) - now_s))[0]:
                continue
            try:
                data = os.read(ours, 1 << 16)
            except OSError:  # the last writer is gone
                break
            written += len(data)
            if first_s is None:
                seen += data
                if terminal.first_values.search(ESCAPES.sub(b"", bytes(seen))):
                    first_s = time.monotonic() - began_s
        if process.poll() is not None or settled is None:
            raise RuntimeError(f"{command[0]} ended early ({process.wait()}):\n{seen[-2000:].decode(errors='replace')}")
        span_s = time.monotonic() - settled[0]
        return Cost(first_s, 100 * (tree.cpu_s() - settled[1]) / span_s, tree.peak_bytes / 1e6, written / span_s)
    finally:
        end(process, ours)


def end(process: subprocess.Popen[bytes], terminal: int) -> None:
    """Stop the program, reading on meanwhile: one that waits for its terminal would not end."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    deadline_s = time.monotonic() + 5
    while process.poll() is None and time.monotonic() < deadline_s:
        if select.select([terminal], [], [], 0.05)[0]:
            try:
                os.read(terminal, 1 << 16)
            except OSError:
                break
    try:
        process.wait(timeout=1)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    os.close(terminal)


def middle(found: Sequence[float | None]) -> float | None:
    """The median; None where one is missing."""
    known = [value for value in found if value is not None]
    return statistics.median(known) if len(known) == len(found) else None


def median(costs: Sequence[Cost]) -> Cost:
    return Cost(
        middle([cost.first_frame_s for cost in costs]),
        statistics.median(cost.cpu_percent for cost in costs),
        statistics.median(cost.peak_memory_mb for cost in costs),
        statistics.median(cost.bytes_per_s for cost in costs),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvitop", default=shutil.which("nvitop"), help="the nvitop to compare with")
    parser.add_argument("--gputop", help="an installed gputop; this checkout if not told")
    parser.add_argument("--only", choices=("gputop", "nvitop"), help="measure one of them")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--driver", action="store_true", help="read this machine's driver, not the fake")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between samples")
    parser.add_argument("--size", default="160x50")
    parser.add_argument("--seconds", type=float, default=30.0, help="length of one run")
    parser.add_argument("--settle", type=float, default=10.0, help="seconds before CPU and bytes are measured")
    parser.add_argument("--starts", type=int, default=15, help="starts in a run: the first frame is their median")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each, in turn; medians are shown")
    options = parser.parse_args()
    columns, rows = map(int, options.size.split("x"))
    own_command = [options.gputop] if options.gputop else [sys.executable, "-m", "gputop"]
    commands = {
        "gputop": [*own_command, "--interval", f"{options.interval:g}", "--source", "nvml"],
        # It takes whole seconds and quarters only: 0.25 s is the shortest.
        "nvitop": [options.nvitop, "--monitor", "full", "--interval", f"{max(0.25, options.interval):g}"],
    }
    if options.only:
        commands = {options.only: commands[options.only]}
    if "nvitop" in commands and not options.nvitop:
        parser.error("nvitop is not installed: pip install nvitop, or name it with --nvitop")

    runs: dict[str, list[Cost]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as folder:
        if options.driver:
            env = dict(os.environ)
            terminals = dict.fromkeys(commands, Terminal(env, columns, rows, of_driver()))
        else:
            settings = [f"gpus {options.gpus}", "set power_w 431", "set memory_used_mib 65433.6 0"]
            settings += [f"process {gpu} {os.getpid()} 60000 C {50 + gpu}" for gpu in range(options.gpus)]
            env = environment(build(Path(folder)), *settings)
            terminals = {"gputop": Terminal({**env, "PYTHONPATH": "" if options.gputop else str(ROOT)}, columns, rows),
                         "nvitop": Terminal({k: v for k, v in env.items() if k != "PYTHONPATH"}, columns, rows)}
        for terminal in terminals.values():
            terminal.env.pop("PYTHONDONTWRITEBYTECODE", None)  # else what was not installed is compiled at each start
        for turn in range(options.repeats):
            for name in list(commands)[::-1 if turn % 2 else 1]:
                runs[name].append(measure(commands[name], terminals[name], options.seconds, options.settle))
            starts: dict[str, list[float | None]] = {name: [] for name in commands}
            for start in range(options.starts):
                for name in list(commands)[::-1 if (turn + start) % 2 else 1]:
                    starts[name].append(first_frame_s(commands[name], terminals[name]))
            for name, found in starts.items():
                if found:
                    runs[name][-1].first_frame_s = middle(found)

    medians = {name: asdict(median(costs)) for name, costs in runs.items()}
    report: dict[str, object] = {
        "gpus": "this machine's" if options.driver else options.gpus,
        "interval_s": options.interval,
        "size": options.size,
        "seconds": options.seconds,
        "settle_s": options.settle,
        "starts": options.starts,
        "medians": medians,
        "runs": {name: [asdict(cost) for cost in costs] for name, costs in runs.items()},
    }
    if len(medians) == 2:
        report["ratios"] = {key: ratio(mine, medians["nvitop"][key]) for key, mine in medians["gputop"].items()}
        pairs = list(zip(map(asdict, runs["gputop"]), map(asdict, runs["nvitop"]), strict=True))
        report["pair_ratios"] = {key: [ratio(ours[key], theirs[key]) for ours, theirs in pairs]
                                 for key in Cost.__dataclass_fields__}
    table(report)
    print(json.dumps(report, indent=1))
    return 0


def ratio(ours: float | None, theirs: float | None) -> float | None:
    return ours / theirs if ours is not None and theirs else None


def table(report: dict[str, Any]) -> None:
    columns = {**report["medians"], **({"ratio": report["ratios"]} if "ratios" in report else {})}
    print(f"{'':16}" + "".join(f"{name:>12}" for name in columns) + "   ratio of each pair" * ("ratios" in report),
          file=sys.stderr)
    for key in Cost.__dataclass_fields__:
        line = f"{key:16}" + "".join(f"{figure(column[key]):>12}" for column in columns.values())
        if "pair_ratios" in report:
            found = report["pair_ratios"][key]
            not_above = sum(r is not None and r <= 1 for r in found)
            line += f"   {' '.join(map(figure, found))}: {not_above} of {len(found)} not above"
        print(line, file=sys.stderr)


def figure(value: float | None) -> str:
    return "never" if value is None else f"{value:.3g}"


if __name__ == "__main__":
    sys.exit(main())
