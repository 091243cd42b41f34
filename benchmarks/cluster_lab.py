"""A cluster to try ``gputop cluster`` on: a Prometheus that scrapes nodes of eight GPUs, as dcgm-exporter writes them.

    python benchmarks/cluster_lab.py --nodes 200          # prints the address, and serves until ctrl-c

One server plays all exporters. The hours before are written into Prometheus's database (promtool), so that there is a
history at once. Needs prometheus and promtool (Debian: prometheus). Planted, by job:

    4001  GPU n004:3 is slow: its clocks are held down, and it is hot
    4002  has held its GPUs for 43 minutes without using them
    4003  uses four of the eight GPUs of each node
    4004  the GPUs of one node do half of what those of the others do
    4005  its activity has fallen from 90% to 40% an hour ago
    4006  GPU n022:5 is busy all the time at a low clock for half an hour, its power is held down; the others wait
    4007  its first four nodes run at other clocks than the last four, on purpose: nothing to find
    team-a/notebook-…  two pods share a GPU by time-slicing: each of its metrics is there twice
The rest is healthy, or free. In the last quarter of the nodes the label of the node is called ``hostname``; a GPU is
divided into MIG instances; some nodes print DCGM's "no value" (9223372036854775794); from 50 nodes on an exporter
answers with HTTP 500, and another with nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import http.server
import math
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

GPUS = 8
HISTORY_S = 3 * 3600.0
HISTORY_STEP_S = 60.0
IDLE_S, FELL_S, HELD_S = 43 * 60.0, 3600.0, 1800.0
LOW_CLOCK = (21, 5)
BLANK = "9223372036854775794"
_MEMORY_MIB = 81559.0


@dataclass(frozen=True)
class Cluster:
    """``nodes`` of eight GPUs at the Unix time ``began_s``. Figures follow from time and place alone. ``marked``: they
    have the label by which gputop calls them SIMULATED."""

    nodes: int
    began_s: float
    marked: bool = False

    def job(self, node: int) -> int | None:
        """The job of a node: five with something planted, on four nodes each, then healthy ones of eight; the last
        tenth of the nodes is free."""
        if node >= self.nodes - max(1, self.nodes // 10):
            return None
        return 4001 + node // 4 if node < 20 else 4006 + (node - 20) // 8

    def sm_active(self, node: int, gpu: int, time_s: float) -> float:
        job = self.job(node)
        if job is None:
            return 0.0
        wave = 0.03 * math.sin(time_s / 97 + node + 3 * gpu)
        level = 0.9
        if job == 4001 and (node, gpu) == (3, 3):
            level = 0.55
        elif job == 4002:
            level = 0.9 if time_s < self.began_s - IDLE_S else 0.0
        elif job == 4003 and gpu >= 4:
            level = 0.0
        elif job == 4004 and node == 13:
            level = 0.45
        elif job == 4005 and time_s >= self.began_s - FELL_S:
            level = 0.4
        elif job == 4006:
            level = 0.97 if (node, gpu) == LOW_CLOCK else 0.9
        return max(0.0, level + wave) if level else 0.0

    def sm_clock_mhz(self, node: int, gpu: int, time_s: float) -> int:
        if not self.sm_active(node, gpu, time_s):
            return 345
        if (node, gpu) == LOW_CLOCK:
            return 1980 if time_s < self.began_s - HELD_S else 1290
        return 1110 if (node, gpu) == (3, 3) else 1410 if 28 <= node < 32 else 1980 - 15 * ((node + gpu) % 3)

    def page(self, node: int, time_s: float) -> str:
        """What the exporter of a node prints, without timestamps."""
        lines: dict[str, list[str]] = {}
        for gpu in range(GPUS):
            for own, pod in self._instances(node, gpu):
                labels = self.labels(node, gpu) + own + pod
                for name, value in self._metrics(node, gpu, time_s, mig=bool(own)):
                    lines.setdefault(name, []).append(f"{name}{{{labels}}} {value}")
        return "".join(f"# HELP {name} of a GPU\n# TYPE {name} gauge\n" + "\n".join(own) + "\n"
                       for name, own in lines.items())

    def labels(self, node: int, gpu: int) -> str:
        host = "Hostname" if node < 3 * self.nodes // 4 else "hostname"
        job = self.job(node)
        of_job = "" if job is None else f',hpc_job="{job}"'
        return (f'gpu="{gpu}",UUID="GPU-{node:04d}-{gpu}",pci_bus_id="00000000:{gpu:02X}:00.0",device="nvidia{gpu}",'
                f'modelName="NVIDIA H100 80GB HBM3",{host}="n{node + 1:03d}",'
                f'DCGM_FI_DRIVER_VERSION="580.65.06"{of_job}' + ',simulated="true"' * self.marked)

    def _instances(self, node: int, gpu: int) -> list[tuple[str, str]]:
        if node == self.nodes - 1 and gpu == 0:
            return [("", f',container="c",namespace="team-a",pod="notebook-{n}"') for n in "ab"]
        if node == self.nodes - 2 and gpu == 0 and self.nodes >= 20:
            return [(f',GPU_I_PROFILE="3g.40gb",GPU_I_ID="{n}"', "") for n in (1, 2)]
        return [("", "")]

    def _metrics(self, node: int, gpu: int, time_s: float, mig: bool) -> Iterator[tuple[str, str]]:
        active = self.sm_active(node, gpu, time_s)
        slow = (node, gpu) == (3, 3)
        job = self.job(node) is not None
        yield "DCGM_FI_DEV_SM_CLOCK", f"{self.sm_clock_mhz(node, gpu, time_s)}"
        yield "DCGM_FI_DEV_POWER_VIOLATION", self._power_violation_ns(node, gpu, time_s)
        yield "DCGM_FI_DEV_GPU_TEMP", f"{88 if slow else 35 + 30 * active:.0f}"
        yield "DCGM_FI_DEV_POWER_USAGE", f"{75 + 600 * active * (0.5 if slow else 1):.3f}"
        if not mig:
            yield "DCGM_FI_DEV_GPU_UTIL", f"{100 * min(1.0, 1.1 * active):.0f}"
        yield "DCGM_FI_DEV_FB_USED", f"{0.9 * _MEMORY_MIB * job:.0f}"
        yield "DCGM_FI_DEV_FB_FREE", f"{_MEMORY_MIB * (1 - 0.9 * job):.0f}"
        yield "DCGM_FI_DEV_XID_ERRORS", "0"
        if node >= 20 and node % 50 == 0:
            yield "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", BLANK
        else:
            yield "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", f"{0.6 * active:.6f}"
        yield "DCGM_FI_PROF_GR_ENGINE_ACTIVE", f"{min(1.0, 1.05 * active):.6f}"
        yield "DCGM_FI_PROF_SM_ACTIVE", f"{active:.6f}"
        yield "DCGM_FI_PROF_DRAM_ACTIVE", f"{0.4 * active:.6f}"

    def _power_violation_ns(self, node: int, gpu: int, time_s: float) -> str:
        held_s = max(0.0, time_s - self.began_s + HELD_S) if (node, gpu) == LOW_CLOCK else 0.0
        return f"{1e9 * held_s:.0f}"

    def history(self) -> Iterator[str]:
        """The activity of the hours before, as OpenMetrics with timestamps, labeled as if it had been scraped."""
        node, gpu = LOW_CLOCK
        labels = f'{self.labels(node, gpu)},instance="n{node + 1:03d}:9400",job="dcgm"'
        for name, value in (("DCGM_FI_DEV_SM_CLOCK", self.sm_clock_mhz),
                            ("DCGM_FI_DEV_POWER_VIOLATION", self._power_violation_ns)):
            yield f"# TYPE {name} gauge\n"
            for i in range(int(HISTORY_S / HISTORY_STEP_S) if self.job(node) is not None else 0):
                at_s = self.began_s - HISTORY_S + i * HISTORY_STEP_S
                yield f"{name}{{{labels}}} {value(node, gpu, at_s)} {at_s:.3f}\n"
        yield "# TYPE DCGM_FI_PROF_SM_ACTIVE gauge\n"
        for node in range(self.nodes):
            for gpu in range(GPUS):
                for own, pod in self._instances(node, gpu):
                    labels = f'{self.labels(node, gpu)}{own}{pod},instance="n{node + 1:03d}:9400",job="dcgm"'
                    for i in range(int(HISTORY_S / HISTORY_STEP_S)):
                        at_s = self.began_s - HISTORY_S + i * HISTORY_STEP_S
                        yield (f"DCGM_FI_PROF_SM_ACTIVE{{{labels}}} {self.sm_active(node, gpu, at_s):.4f} "
                               f"{at_s:.3f}\n")
        yield "# EOF\n"


Page = Callable[[], bytes | None]  # what an exporter prints now; None: it answers with HTTP 500


class _Exporters(http.server.BaseHTTPRequestHandler):
    """All exporters on one port: ``/n004/metrics``."""

    pages: Mapping[str, Page]

    def do_GET(self) -> None:
        body = self.pages[self.path.split("/")[1]]()
        if body is None:
            self.send_error(500)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


_CONFIG = """\
global: {{scrape_interval: {interval}s, scrape_timeout: {interval}s}}
scrape_configs:
"""
_SCRAPE_JOB = """\
  - job_name: {name}
    static_configs: [{{targets: [{targets}]}}]
    relabel_configs:
      - {{source_labels: [__address__], regex: "(.*)", target_label: __metrics_path__, replacement: "/$1/metrics"}}
      - {{source_labels: [__address__], regex: "(.*)", target_label: instance, replacement: "$1:9400"}}
      - {{target_label: __address__, replacement: "127.0.0.1:{port}"}}
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextlib.contextmanager
def running(nodes: int, interval_s: int = 5, *, history: bool = True, engine: str = "prometheus",
            marked: bool = False) -> Iterator[str]:
    """The nodes of a :class:`Cluster`, each of which has been scraped; gives the address of the ``engine``."""
    cluster = Cluster(nodes, time.time(), marked)
    broken = [nodes - max(1, nodes // 10) + i for i in (0, 1)] if nodes >= 50 else []

    def page(node: int) -> bytes | None:
        return cluster.page(node, time.time()).encode() if node not in broken else b"" if node == broken[1] else None

    pages = {f"n{n + 1:03d}": partial(page, n) for n in range(nodes)}
    with scraping(pages, interval_s, cluster.history() if history else (), engine) as address:
        _wait_for_scrapes(address, nodes - len(broken))
        yield address


@contextlib.contextmanager
def scraping(pages: Mapping[str, Page], interval_s: int = 1, past: Iterable[str] = (), engine: str = "prometheus",
             jobs: Mapping[str, Collection[str]] | None = None) -> Iterator[str]:
    """Exporters, by the names of their targets, and a Prometheus, or ``engine="victoria-metrics"``, that scrapes them;
    gives its address. ``past`` are lines of OpenMetrics, labeled as if they had been scraped. ``jobs``: the targets of
    each scrape job; one may be in several."""
    handler = type("Exporters", (_Exporters,), {"pages": pages})
    with (tempfile.TemporaryDirectory(prefix="gputop-lab-") as place,
          http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server):
        folder = Path(place)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        (folder / "prom.yml").write_text(_CONFIG.format(interval=interval_s) + "".join(
            _SCRAPE_JOB.format(name=name, targets=", ".join(f'"{target}"' for target in targets),
                               port=server.server_address[1])
            for name, targets in (jobs or {"dcgm": list(pages)}).items()))
        if past and engine == "prometheus":
            with (folder / "past.om").open("w") as file:
                file.writelines(past)
            subprocess.run(["promtool", "tsdb", "create-blocks-from", "openmetrics", "--max-block-duration=24h",
                            folder / "past.om", folder / "data"], check=True, stdout=subprocess.DEVNULL)
            (folder / "past.om").unlink()
        port = free_port()
        address = f"http://127.0.0.1:{port}"
        words = {"prometheus": [f"--config.file={folder}/prom.yml", f"--storage.tsdb.path={folder}/data",
                                f"--web.listen-address=127.0.0.1:{port}", "--log.level=error",
                                "--storage.tsdb.retention.time=1d"],
                 # Its instant answers are of half a minute ago otherwise.
                 "victoria-metrics": [f"-promscrape.config={folder}/prom.yml", f"-storageDataPath={folder}/data",
                                      f"-httpListenAddr=127.0.0.1:{port}", "-loggerLevel=ERROR",
                                      "-retentionPeriod=1d", "-search.latencyOffset=1s"]}[engine]
        with subprocess.Popen([engine, *words]) as prometheus:
            try:
                if engine == "victoria-metrics":  # what is asked for too early it takes for absent for ten seconds
                    _until(lambda: _scrapes(address) >= len(pages))
                    urllib.request.urlopen(f"{address}/internal/force_flush").close()
                    if past:
                        _import(address, past)
                yield address
            finally:
                prometheus.terminate()
                server.shutdown()


def _import(address: str, past: Iterable[str]) -> None:
    """The hours before, for VictoriaMetrics: it takes lines at any time, with milliseconds."""
    lines = [re.sub(r" (\d+)\.(\d{3})$", r" \1\2", line.rstrip()) for line in past if line[0] != "#"]
    for path, body in (("/api/v1/import/prometheus", "\n".join(lines).encode()), ("/internal/force_flush", b""),
                       ("/internal/resetRollupResultCache", b"")):
        urllib.request.urlopen(urllib.request.Request(address + path, body or None)).close()


def _wait_for_scrapes(address: str, nodes: int) -> None:
    """Until so many nodes have figures."""
    wait_for(address, "count(count by (instance) (DCGM_FI_DEV_FB_USED))", nodes)


def wait_for(address: str, query: str, least: float) -> None:
    """Until a query gives so much."""
    import json

    url = f"{address}/api/v1/query?" + urllib.parse.urlencode({"query": query})

    def there() -> bool:
        with urllib.request.urlopen(url) as answer:
            return float(json.load(answer)["data"]["result"][0]["value"][1]) >= least

    _until(there)


def _scrapes(address: str) -> int:
    """How many times VictoriaMetrics has scraped a target."""
    with urllib.request.urlopen(f"{address}/metrics") as answer:
        return int(re.findall(rb'^vm_promscrape_scrapes_total\{status_code="200"\} (\d+)', answer.read(), re.M)[0])


def _until(there: Callable[[], bool]) -> None:
    for _ in range(600):
        with contextlib.suppress(OSError, ValueError, IndexError):
            if there():
                return
        threading.Event().wait(0.1)
    raise SystemExit("not all nodes were scraped within a minute")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=200)
    parser.add_argument("--engine", choices=("prometheus", "victoria-metrics"), default="prometheus")
    parser.add_argument("--show", action="store_true", help="open gputop cluster on it")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # so that Prometheus ends, too
    with running(args.nodes, engine=args.engine, marked=args.show) as address:
        if args.show:
            subprocess.run([sys.executable, "-m", "gputop", "cluster", "--prometheus", address])
            return
        print(address, flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()


if __name__ == "__main__":
    main()
