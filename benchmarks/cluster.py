"""What a refresh of ``gputop cluster`` costs, at 10, 100 and 1,000 nodes of eight GPUs.

    python benchmarks/cluster.py [--nodes 10 100 1000]

A Prometheus (Debian: prometheus) scrapes the nodes of benchmarks/cluster_lab.py, with three hours of history. Measured
are the refreshes until everything is there, and ten more: queries, bytes as they come (compressed), time of the
answers, CPU of Prometheus and of gputop, and memory of gputop. Beside each, in the same run: six figures asked for
raw, a series a GPU, as a page that aggregates by itself would. Prints a row of a table for each size.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.cluster_lab import running  # noqa: E402
from gputop.advice.fleet.advise import asked_limits, fleet_advice  # noqa: E402
from gputop.cluster.collect import Collector  # noqa: E402
from gputop.cluster.endpoint import Credentials, parse_endpoint  # noqa: E402
from gputop.cluster.model import FleetView  # noqa: E402
from gputop.cluster.prometheus import Client  # noqa: E402

RAW = ("DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_FB_FREE",
       "DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_GPU_TEMP")


def cpu_s() -> float:
    times = os.times()
    return times.user + times.system


def server_cpu_s() -> float:
    """The CPU time of the Prometheus that this process has started: its scrapes are in it."""
    times = [child.cpu_times() for child in psutil.Process().children() if child.name() == "prometheus"]
    return sum(each.user + each.system for each in times)


def measure(nodes: int) -> str:
    with running(nodes, 5 if nodes <= 200 else 30) as address:
        endpoint = parse_endpoint(address)
        collector = Collector(Client(endpoint, Credentials(), timeout_s=120.0), asked_limits())
        view = FleetView(open_jobs=("4001",), open_nodes=(("4001", "n004"),))
        began_s, server_s = time.monotonic(), server_cpu_s()
        first = [collector.refresh(view)]
        first_s, first_server_s = time.monotonic() - began_s, server_cpu_s() - server_s
        while not collector.settled:
            first.append(collector.refresh(view))
        whole_server_s = server_cpu_s() - server_s
        later, began_cpu_s, server_s = [], cpu_s(), server_cpu_s()
        for _ in range(10):
            later.append(collector.refresh(view))
            fleet_advice(later[-1])
        own_cpu_s, later_server_s = (cpu_s() - began_cpu_s) / 10, (server_cpu_s() - server_s) / 10
        raw = Client(endpoint, Credentials(), timeout_s=120.0)
        began_s = time.monotonic()
        for name in RAW:
            raw.instant(name)
        raw_s = time.monotonic() - began_s
        middle_s = statistics.median(fleet.seconds for fleet in later)
        rss_bytes = psutil.Process().memory_info().rss
        return (f"| {nodes} | {first_s:.1f} s, {first_server_s:.2f} | {whole_server_s:.1f} | {later_server_s:.2f} | "
                f"{sum(f.queries for f in first)} in {len(first)} | "
                f"{sum(f.bytes for f in first) / 1e3:.0f} | {max(f.queries for f in later)} | "
                f"{max(f.bytes for f in later) / 1e3:.1f} | {1e3 * middle_s:.0f} | "
                f"{1e3 * own_cpu_s:.0f} | {rss_bytes / 1e6:.0f} | {raw.cost.bytes / 1e3:.0f} "
                f"({raw.cost.plain_bytes / 1e6:.1f} MB) | {raw_s / middle_s:.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[10, 100, 1000])
    print("| nodes | first answer, s CPU of Prometheus | s for the first picture | for a refresh | "
          "queries of the first picture | its kB | queries of a refresh | its kB, most | ms of the answers | "
          "ms CPU of gputop | MB | kB raw (unpacked) | raw takes … times as long |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    for nodes in parser.parse_args().nodes:
        print(measure(nodes), flush=True)


if __name__ == "__main__":
    main()
