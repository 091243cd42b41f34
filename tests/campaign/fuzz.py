"""``make fuzz``: hostile input for every reader, client and parser, for minutes or hours.

    python -m tests.campaign.fuzz --seconds 3600 [--targets xspace,config] [--seed 7] [--keep tests/data/fuzz]

Inputs are mutated seeds (tests/campaign/targets.py), each tried in a process with limits of memory and CPU time. A
failure is a traceback, also one in a thread; a warning of gputop's own; a hang; memory out of proportion; what drives a
terminal in the output; a file touched outside; a connection to another machine; a process started. Each new kind of
failure is kept as a file in ``--keep``, and tests/campaign/test_fuzz.py tries it again for ever.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.nvml_fake import build

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "tests" / "data" / "fuzz"
INPUTS_PER_PROCESS = 2000
CPU_LIMIT_S, IDLE_LIMIT_S = 30.0, 300.0  # of one input: computing, and waiting for something on a loaded machine
TARGET_NAMES = ("xspace", "xspace-gz", "chrome", "chrome-gz", "nsys", "analysis", "snapshot", "recording", "config",
                "rules", "answer", "greeting", "dcgm", "nvml", "ras-text", "ras-json", "stacks", "prometheus",
                "prometheus-slurm", "prometheus-raw", "squeue", "nodes", "maps", "environ", "status", "cgroup", "elf",
                "runtime", "ras", "report", "toml", "kineto-datagram", "kineto-sockets", "kineto-trace",
                "flight-pickle", "flight-json", "node")


@dataclass(frozen=True)
class Failure:
    target: str
    problem: str
    data: bytes = field(repr=False)


@dataclass
class Campaign:
    """What has been tried, and what was found: one failure of each kind."""

    folder: Path
    targets: Sequence[str] = TARGET_NAMES
    module: str = "tests.campaign.targets"
    cpu_limit_s: float = CPU_LIMIT_S
    inputs: Counter[str] = field(default_factory=Counter)
    shapes: int = 0
    failures: dict[tuple[str, str], Failure] = field(default_factory=dict)
    repeated: int = 0
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        (self.folder / "bait").mkdir(parents=True, exist_ok=True)
        (self.folder / "bait" / "secret").write_text("nobody reads this\n")
        home = self.folder / "work"
        home.mkdir(exist_ok=True)
        (self.folder / "driver").mkdir(exist_ok=True)
        library = build(self.folder / "driver") if "nvml" in self.targets else None
        others = ("GPUTOP", "DCGM", "XDG", "PYTEST")
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(others)},
            "HOME": str(home), "XDG_CONFIG_HOME": str(home / "config"), "XDG_CACHE_HOME": str(home / "cache"),
            "TMPDIR": str(home), "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONFAULTHANDLER": "1",
            "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "GRPC_VERBOSITY": "NONE", "COLUMNS": "100",
            "FUZZ_NVML": str(library or ""), "PYTHONIOENCODING": "utf-8"}

    def run_process(self, seed: int, count: int, until_s: float = float("inf"), kept: Sequence[Path] = ()) -> None:
        """Try ``kept`` files and ``count`` inputs in one process, which ends at the first that it does not survive."""
        command = [sys.executable, "-m", "tests.campaign.child", str(self.folder), self.module, ",".join(self.targets),
                   str(seed), str(count), *map(str, kept)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
                                   env=self.environment)
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        reader = threading.Thread(target=_read_lines, args=(process, lines), daemon=True)
        reader.start()
        target, done = "", False
        began_s, cpu_s = time.monotonic(), 0.0
        try:
            while True:
                try:
                    line = lines.get(timeout=1.0)
                except queue.Empty:
                    hang = _hang(process.pid, began_s, cpu_s, self.cpu_limit_s)
                    if hang and target:
                        self._fail(target, f"hang: {hang}", self._current())
                        return
                    continue
                if line is None:
                    break
                said = json.loads(line)
                if "done" in said:
                    done, self.shapes = True, self.shapes + said["shapes"]
                elif "problem" in said:
                    # Not ``current``: the child has gone on to the next input by now.
                    self._fail(said["target"], said["problem"], base64.b64decode(said["data"]))
                else:
                    if time.monotonic() > until_s:
                        return
                    target, began_s, cpu_s = said["target"], time.monotonic(), _cpu_s(process.pid)
                    self.inputs[target] += 1
            if not done:
                status = process.wait()
                said_last = self.folder / "stderr"
                tail = (said_last.read_text(errors="replace") if said_last.exists() else "")[-600:]
                tail += (process.stderr.read() if process.stderr else "")[-600:]
                if not target:
                    raise RuntimeError(f"the process did not begin: {status}\n{tail}")
                self._fail(target, f"died: {f'signal {-status}' if status < 0 else f'exit {status}'} {tail[-300:]!r}",
                           self._current())
        finally:
            process.kill()
            process.wait()
            reader.join()
            for stream in (process.stdout, process.stderr):
                stream.close()

    def _current(self) -> bytes:
        """The input at which the process stands, or died."""
        return (self.folder / "current").read_bytes()

    def _fail(self, target: str, problem: str, data: bytes) -> None:
        key = target, re.sub(r"\d+", "", problem.partition(": '")[0])[:90]
        if key in self.failures:
            self.repeated += 1
            return
        self.failures[key] = Failure(target, problem, data)


def _read_lines(process: subprocess.Popen[str], lines: queue.SimpleQueue[str | None]) -> None:
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _hang(pid: int, began_s: float, cpu_s: float, limit_s: float) -> str:
    if _cpu_s(pid) - cpu_s > limit_s:
        return f"more than {limit_s:g} s of CPU"
    return f"no answer in {IDLE_LIMIT_S:.0f} s" if time.monotonic() - began_s > IDLE_LIMIT_S else ""


def keep(failure: Failure, folder: Path) -> Path:
    """The failing input as a file named after its target."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{failure.target}-{hashlib.sha256(failure.data).hexdigest()[:10]}"
    path.write_bytes(failure.data)
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--targets", default=",".join(TARGET_NAMES))
    parser.add_argument("--keep", type=Path, default=KEPT)
    options = parser.parse_args()
    until_s, seed = time.monotonic() + options.seconds, options.seed
    with tempfile.TemporaryDirectory(prefix="gputop-fuzz-") as folder:
        campaign = Campaign(Path(folder), options.targets.split(","))
        told: set[tuple[str, str]] = set()
        while time.monotonic() < until_s:
            began_s, before = time.monotonic(), campaign.inputs.total()
            campaign.run_process(seed, INPUTS_PER_PROCESS, until_s)
            rate = (campaign.inputs.total() - before) / (time.monotonic() - began_s)
            print(f"{campaign.inputs.total()} inputs, {rate:.0f}/s, {len(campaign.failures)} kinds of failure "
                  f"(seed {seed})", flush=True)
            for key, failure in campaign.failures.items():
                if key not in told:
                    told.add(key)
                    print(f"  {failure.target}: {failure.problem}", flush=True)
                    print(f"    kept as {keep(failure, options.keep)}", flush=True)
            seed += 1
        for name, count in sorted(campaign.inputs.items()):
            print(f"{name:>10} {count:>9} inputs")
    return 1 if campaign.failures else 0


if __name__ == "__main__":
    sys.exit(main())
