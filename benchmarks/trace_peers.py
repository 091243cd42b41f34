"""How fast, and in how much memory, PyTorch traces become findings: gputop beside HTA and TensorBoard's plugin.

    python -m venv /tmp/peers && /tmp/peers/bin/pip install HolisticTraceAnalysis torch-tb-profiler
    python benchmarks/trace_peers.py --peers /tmp/peers/bin/python FOLDER [--events 0 200000]

FOLDER has the traces of the ranks of one job (``*.pt.trace.json.gz``). Each is taken as it is (0), or repeated until it
has so many events (kineto_traces.py). Measured are whole commands, by turns, each in a fresh process: CPU and the most
memory of its tree of processes. What Python and the first imports take counts, and is told by itself.

- gputop: `gputop analyze --json`, all analyses and findings.
- HTA: parse, and the breakdowns of time, kernels, idle time and overlap (what its own tour of the package begins with).
- TensorBoard's plugin: what it computes when a run is opened: overview, operators, kernels, distributed.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

# The peers' interpreter runs this file, too, and has neither gputop nor psutil: they are imported where needed.
_TRACES = "*.pt.trace.json*"


def run_gputop(folder: Path | None) -> None:
    from gputop.cli import main

    if folder is not None:
        main(["analyze", "--json", *map(str, sorted(folder.glob(_TRACES)))])


def run_hta(folder: Path | None) -> None:
    from hta.trace_analysis import TraceAnalysis

    if folder is not None:
        analysis = TraceAnalysis(trace_dir=str(folder))
        analysis.get_temporal_breakdown(visualize=False)
        analysis.get_gpu_kernel_breakdown(visualize=False)
        analysis.get_idle_time_breakdown(ranks=list(range(len(list(folder.glob(_TRACES))))), visualize=False)
        analysis.get_comm_comp_overlap(visualize=False)


def run_plugin(folder: Path | None) -> None:
    from torch_tb_profiler import io
    from torch_tb_profiler.profiler.loader import RunLoader

    if folder is not None and len(RunLoader("run", str(folder), io.Cache()).load().profiles) < 1:
        raise SystemExit("the plugin has read no trace")


_RUNS = {"gputop": run_gputop, "HTA": run_hta, "plugin": run_plugin}


def measure(what: str, python: str, folder: Path | None) -> tuple[float, float, float]:
    """CPU and wall seconds of a fresh process and its children, and the most memory (MB) of all of them together."""
    import psutil

    before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with subprocess.Popen([python, __file__, "--run", what, *([str(folder)] if folder else [])],
                          stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                          env={k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}) as process:
        most, of = 0, psutil.Process(process.pid)
        while process.poll() is None:
            try:
                most = max(most, sum(p.memory_info().rss for p in (of, *of.children(recursive=True))))
            except psutil.NoSuchProcess:
                continue
            time.sleep(0.01)
    if process.returncode:
        raise SystemExit(f"{what} failed: {python} {__file__} --run {what} {folder}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu_s, time.perf_counter() - began_s, most / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--peers", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--events", type=int, nargs="+", default=[0, 200_000], help="of each rank; 0: as it is")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--run", choices=list(_RUNS), help=argparse.SUPPRESS)
    parser.add_argument("folder", type=Path, nargs="?")
    args = parser.parse_args()
    if args.run:
        warnings.simplefilter("ignore")
        _RUNS[args.run](args.folder)
        return
    from kineto_traces import write

    pythons = {what: sys.executable if what == "gputop" else args.peers for what in _RUNS}
    alone = {what: measure(what, python, None)[0] for what, python in pythons.items()}
    for events in args.events:
        with tempfile.TemporaryDirectory() as made:
            folder = args.folder
            if events:
                folder = Path(made)
                for source in sorted(args.folder.glob(_TRACES)):
                    write(source, events, folder / source.name.removesuffix(".gz"))
            turns = [{what: measure(what, python, folder) for what, python in pythons.items()}
                     for _ in range(args.times)]
            size = sum(path.stat().st_size for path in folder.glob(_TRACES))
        found = {what: [*map(statistics.median, zip(*(turn[what] for turn in turns), strict=True))] for what in _RUNS}
        print(f"{events or 'as recorded'}, {size / 1e6:.1f} MB")
        for what, (cpu_s, wall_s, memory_mb) in found.items():
            times, more = cpu_s / found["gputop"][0], memory_mb / found["gputop"][2]
            print(f"{what:8} {cpu_s:7.2f} s CPU ({alone[what]:.2f} the start)  {wall_s:7.2f} s  {memory_mb:6.0f} MB"
                  f"  {times:5.1f} times gputop's CPU, {more:4.1f} its memory")


if __name__ == "__main__":
    main()
