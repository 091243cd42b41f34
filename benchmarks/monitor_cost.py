"""What the live monitor costs, as ratios against nvitop over the same made-up node.

    python -m venv /tmp/peer && /tmp/peer/bin/pip install nvitop
    python -m venv /tmp/own && /tmp/own/bin/pip install .
    python benchmarks/monitor_cost.py --nvitop /tmp/peer/bin/nvitop --gputop /tmp/own/bin/gputop

Without --gputop the checkout is measured, by this interpreter; where it is installed as editable, the first frame
waits some hundredths of a second for the finder of setuptools.

Both programs run in a pseudo-terminal (of 160x50 with 8 GPUs at 1 Hz, if not told otherwise), over
the fake NVML of the tests (so gcc is needed, and no GPU), in turn. Measured for each: seconds until the
first frame with real values, CPU of the process tree and bytes written in the second half
of the run, and the most resident memory. Prints a table on stderr and one JSON document on
stdout. Absolute figures belong to the machine; compare the ratios.

The first frame counts once it shows a figure that only the driver can have given: the fake
holds all GPUs at 431 W and GPU 0 at 63.90 GiB, and one of the two is in the first complete
frame of either program ("431W / 700W" or "431", "63.90GiB" or "63.9"). A frame of empty
tables does not count.

The fake answers in under a microsecond, so the CPU figures are those of the programs, not
of the driver.
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
        """CPU seconds used so far by all of them."""
        resident = 0
        for process in (self._root, *self._children()):
            try:
                with process.oneshot():
                    times = process.cpu_times()
                    resident += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
            self._cpu_s[process.pid] = times.user + times.system
        self.peak_bytes = max(self.peak_bytes, resident)
        return sum(self._cpu_s.values())

    def _children(self) -> list[psutil.Process]:
        try:
            return self._root.children(recursive=True)
        except psutil.NoSuchProcess:
            return []


def measure(command: Sequence[str], env: dict[str, str], columns: int, rows: int, seconds: float) -> Cost:
    """Run ``command`` in a terminal for ``seconds``, then end it."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    began_s = time.monotonic()
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
    tree = Tree(process.pid)
    half_s, end_s = began_s + seconds / 2, began_s + seconds
    poll_s = began_s
    first_s: float | None = None
    seen = bytearray()
    half: tuple[float, float] | None = None  # when the second half began, and the CPU used until then
    written = 0
    try:
        while (now_s := time.monotonic()) < end_s:
            if now_s >= poll_s:
                cpu_s = tree.cpu_s()
                poll_s = now_s + POLL_S
                if half is None and now_s >= half_s:
                    half, written = (now_s, cpu_s), 0
            if not select.select([ours], [], [], max(0.0, min(poll_s, end_s) - now_s))[0]:
                continue
            try:
                data = os.read(ours, 1 << 16)
            except OSError:  # the last writer is gone
                break
            written += len(data)
            if first_s is None:
                seen += data
                if FIRST_VALUES.search(ESCAPES.sub(b"", bytes(seen))):
                    first_s = time.monotonic() - began_s
        if process.poll() is not None or half is None:
            raise RuntimeError(f"{command[0]} ended early ({process.wait()}):\n{seen[-2000:].decode(errors='replace')}")
        span_s = time.monotonic() - half[0]
        return Cost(first_s, 100 * (tree.cpu_s() - half[1]) / span_s, tree.peak_bytes / 1e6, written / span_s)
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


def median(costs: Sequence[Cost]) -> Cost:
    first = [cost.first_frame_s for cost in costs]
    return Cost(
        None if None in first else statistics.median(f for f in first if f is not None),
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
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between samples")
    parser.add_argument("--size", default="160x50")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of one run")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, in turn; medians are shown")
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
        settings = [f"gpus {options.gpus}", "set power_w 431", "set memory_used_mib 65433.6 0"]
        settings += [f"process {gpu} {os.getpid()} 60000 C {50 + gpu}" for gpu in range(options.gpus)]
        env = environment(build(Path(folder)), *settings)
        env.pop("PYTHONDONTWRITEBYTECODE", None)  # else what was not installed is compiled at each start
        env["PYTHONPATH"] = "" if options.gputop else str(ROOT)
        for _ in range(options.repeats):
            for name, command in commands.items():
                own = {**env} if name == "gputop" else {k: v for k, v in env.items() if k != "PYTHONPATH"}
                runs[name].append(measure(command, own, columns, rows, options.seconds))

    medians = {name: asdict(median(costs)) for name, costs in runs.items()}
    report: dict[str, object] = {
        "gpus": options.gpus,
        "interval_s": options.interval,
        "size": options.size,
        "seconds": options.seconds,
        "medians": medians,
        "runs": {name: [asdict(cost) for cost in costs] for name, costs in runs.items()},
    }
    if len(medians) == 2:
        report["ratios"] = {
            key: None if mine is None or not medians["nvitop"][key] else mine / medians["nvitop"][key]
            for key, mine in medians["gputop"].items()
        }
    table(report)
    print(json.dumps(report, indent=1))
    return 0


def table(report: dict[str, object]) -> None:
    columns = {**report["medians"], **({"ratio": report["ratios"]} if "ratios" in report else {})}  # type: ignore[dict-item]
    print(f"{'':16}" + "".join(f"{name:>12}" for name in columns), file=sys.stderr)
    for key in Cost.__dataclass_fields__:
        cells = ("never" if column[key] is None else f"{column[key]:.3g}" for column in columns.values())
        print(f"{key:16}" + "".join(f"{cell:>12}" for cell in cells), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
