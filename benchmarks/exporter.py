"""What exporting to Prometheus costs, beside nvitop-exporter over the same made-up node.

    python -m venv /tmp/peer && /tmp/peer/bin/pip install nvitop-exporter
    python benchmarks/exporter.py --nvitop-exporter /tmp/peer/bin/nvitop-exporter

Both sample the fake NVML of the tests (gcc is needed, no GPU) once a second, at the same time. In turn they are left
alone and scraped once a second. Prints a table on stderr and one JSON document on stdout: CPU without scrapes in
percent of a core, CPU that a scrape adds, its bytes and samples, resident memory; medians of the rounds.

The fake answers in under a microsecond, so the CPU is that of the programs, not of the driver.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for the fake of the tests

from tests.nvml_fake import build, environment  # noqa: E402

WARM_UP_S = 8.0


def cpu_s(pid: int) -> float:
    """CPU seconds of a process, threads that ended included, to a hundredth of a second."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def scrape(port: int) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        document: bytes = answer.read()
    return document


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvitop-exporter", required=True)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--seconds", type=int, default=15, help="of each of the two parts of a round")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    ports = {"gputop": free_port(), "nvitop": free_port()}
    commands = {
        "gputop": [sys.executable, "-m", "gputop", "export", "--source", "nvml", "--listen", str(ports["gputop"])],
        "nvitop": [options.nvitop_exporter, "--port", str(ports["nvitop"])],
    }
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"gpus {options.gpus}", *(f"process {g} {os.getpid()} 60000 C 50" for g in range(options.gpus))]
        env = environment(build(Path(folder)), *settings)
        started = {name: subprocess.Popen(command, env={**env, "PYTHONPATH": str(ROOT) if name == "gputop" else ""},
                                          stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                   for name, command in commands.items()}
        try:
            time.sleep(WARM_UP_S)
            for port in ports.values():
                scrape(port)
            for _ in range(options.rounds):
                used = [{name: cpu_s(process.pid) for name, process in started.items()}]
                time.sleep(options.seconds)
                used.append({name: cpu_s(process.pid) for name, process in started.items()})
                for _ in range(options.seconds):
                    documents = {name: scrape(port) for name, port in ports.items()}
                    time.sleep(1)
                used.append({name: cpu_s(process.pid) for name, process in started.items()})
                for name, process in started.items():
                    before, between, after = (moment[name] for moment in used)
                    resident = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
                    rounds[name].append({
                        "idle_cpu_percent": 100 * (between - before) / options.seconds,
                        "scrape_cpu_ms": 1e3 * ((after - between) - (between - before)) / options.seconds,
                        "bytes": len(documents[name]),
                        "samples": sum(line[:1] not in (b"#", b"") for line in documents[name].split(b"\n")),
                        "memory_mb": resident * os.sysconf("SC_PAGE_SIZE") / 1e6})
        finally:
            for process in started.values():
                process.terminate()
                process.wait()
    medians = {name: {key: statistics.median(one[key] for one in own) for key in own[0]}
               for name, own in rounds.items()}
    ratios = {key: value / medians["nvitop"][key] for key, value in medians["gputop"].items()}
    for key, ratio in ratios.items():
        print(f"{key:18}{medians['gputop'][key]:12.2f}{medians['nvitop'][key]:12.2f}{ratio:8.2f}", file=sys.stderr)
    print(json.dumps({"gpus": options.gpus, "seconds": options.seconds, "medians": medians, "ratios": ratios,
                      "rounds": rounds}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
