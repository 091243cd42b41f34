"""What sampling alone costs and whether it keeps time, beside nvitop's collector over the same made-up node.

    python -m venv /tmp/peer && /tmp/peer/bin/pip install nvitop
    python benchmarks/sampler.py --nvitop-python /tmp/peer/bin/python

For 8 and 16 GPUs at 1 and 10 Hz each program samples the fake NVML of the tests (gcc is
needed, no GPU) in a fresh process without a screen: gputop's Sampler over NvmlSource, and
nvitop's ResourceMetricCollector, which its own exporter uses. A sample is on time if it came
within a tenth of the interval of its place on the raster that the first one began. Measured
after a warm-up: that share, CPU in percent of one core, and resident memory. Prints a
table on stderr and one JSON document on stdout.

The fake answers in under a microsecond, so the CPU is that of the programs, not of the driver.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WARM_UP_S = 2.0
GPUS, RATES_HZ = (8, 16), (1.0, 10.0)


class Watch:
    """Notes when samples came, and what the process used meanwhile."""

    def __init__(self, interval_s: float, seconds: float) -> None:
        self.interval_s, self.seconds = interval_s, seconds
        self.came_s: list[float] = []

    def result(self) -> dict[str, float]:
        time.sleep(WARM_UP_S)
        known, cpu_s, began_s = len(self.came_s), time.process_time(), time.monotonic()
        time.sleep(self.seconds)
        cpu_s, end_s = time.process_time() - cpu_s, time.monotonic()
        came_s = self.came_s[known:]
        due = int((end_s - began_s) / self.interval_s)
        on_time = sum(abs((t - came_s[0] + self.interval_s / 2) % self.interval_s - self.interval_s / 2)
                      < self.interval_s / 10 for t in came_s)
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return {"on_time_ratio": min(1.0, on_time / due), "cpu_percent": 100 * cpu_s / (end_s - began_s),
                "memory_mb": resident / 1e6}


def gputop(interval_s: float, seconds: float) -> dict[str, float]:
    from gputop.sources.nvml.source import NvmlSource
    from gputop.telemetry.sampler import Sampler

    watch = Watch(interval_s, seconds)

    failures: list[Exception] = []
    sampler = Sampler(NvmlSource(), interval_s, lambda sample: watch.came_s.append(time.monotonic()), failures.append)
    sampler.start()
    result = watch.result()
    sampler.stop()
    if failures:
        raise failures[0]
    return result


def nvitop(interval_s: float, seconds: float) -> dict[str, float]:
    from nvitop import Device, ResourceMetricCollector  # type: ignore[import-not-found]

    watch = Watch(interval_s, seconds)

    def collected(metrics: Any) -> bool:
        watch.came_s.append(time.monotonic())
        return True

    collector = ResourceMetricCollector(Device.all(), interval=interval_s)
    collector.daemonize(collected, interval=interval_s)
    return watch.result()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvitop-python", help="the Python of an environment with nvitop")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of one run")
    parser.add_argument("--as", dest="one", choices=("gputop", "nvitop"), help=argparse.SUPPRESS)
    parser.add_argument("--interval", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps((gputop if options.one == "gputop" else nvitop)(options.interval, options.seconds)))
        return 0

    sys.path.insert(0, str(ROOT))
    from tests.nvml_fake import build, environment

    programs = {"gputop": sys.executable}
    if options.nvitop_python:
        programs["nvitop"] = options.nvitop_python
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        library = build(Path(folder))
        for gpus in GPUS:
            processes = [f"process {gpu} {os.getpid()} 60000 C 50" for gpu in range(gpus)]
            env = environment(library, f"gpus {gpus}", *processes)
            for rate_hz in RATES_HZ:
                for name, python in programs.items():
                    own = {**env, "PYTHONPATH": str(ROOT)} if name == "gputop" else env
                    command = [python, __file__, "--as", name, "--interval", str(1 / rate_hz),
                               "--seconds", str(options.seconds)]
                    done = subprocess.run(command, env=own, stdout=subprocess.PIPE, text=True, check=True)
                    rows.append({"program": name, "gpus": gpus, "rate_hz": rate_hz, **json.loads(done.stdout)})
                    print("{program:8} {gpus:3} GPUs {rate_hz:4g} Hz  on time {on_time_ratio:7.2%}  "
                          "cpu {cpu_percent:5.2f}%  {memory_mb:5.0f} MB".format(**rows[-1]), file=sys.stderr)
    print(json.dumps({"seconds": options.seconds, "runs": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
