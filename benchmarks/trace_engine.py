"""How fast, and in how much memory, a trace becomes findings: gputop beside xprof on the same file.

    python benchmarks/trace_engine.py [--xprof-python PYTHON] [--events 200000 2000000 8000000] [FILE.xplane.pb]

Makes XSpaces of a job on 8 GPUs (xspaces.py), or takes FILE. Three things in one run, every
measurement in a fresh process, import of the libraries not counted:

- ``gputop.analyze`` - reading, all analyses, all rules - against xprof's ``overview_page``, on the size
  nearest to two million events: each three times by turns, the median counting, gputop on all cores (it
  uses up to four, xprof one) and on a single one;
- ``gputop.analyze`` on every size: time and memory per event, which stay level if growth is linear;
- what the process of the user interface holds while a worker analyzes, and after.

xprof is looked for in --xprof-python, which may be another environment's interpreter
(`pip install xprof`); without it only gputop is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# xprof's interpreter need not have gputop, and runs this very file: nothing of gputop is imported up here.
_SIZES = (200_000, 2_000_000, 8_000_000)
_COMPARED = 2_000_000
_GPUS = 8
_TIMES = 3


def run_gputop(path: Path) -> int:
    from gputop.diagnosis.diagnose import analyze

    return analyze([path]).trace.events


def run_on_one_core(path: Path) -> int:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    return run_gputop(path)


def run_xprof(path: Path) -> int:
    from xprof.convert import raw_to_tool_data

    page, _ = raw_to_tool_data.xspace_to_tool_data([str(path)], "overview_page", {})
    return len(page)


def run_interface(path: Path) -> int:
    """What the monitor does with a capture."""
    from gputop.diagnosis.worker import analyze_in_worker

    return analyze_in_worker([str(path)]).analysis.trace.events


_RUNS = {"gputop": run_gputop, "one core": run_on_one_core, "xprof": run_xprof, "interface": run_interface}


def run(what: str, path: Path) -> None:
    """In the fresh process: import, then measure."""
    if what == "xprof":
        from xprof.convert import raw_to_tool_data  # noqa: F401
    else:
        from gputop.core.own_memory import keep_freed_memory
        from gputop.diagnosis import diagnose, worker  # noqa: F401
        from gputop.trace.readers import nsys  # noqa: F401
        from gputop.trace.readers.chrome import reader as chrome  # noqa: F401
        from gputop.trace.readers.xspace import reader as xspace  # noqa: F401

        if what != "interface":
            keep_freed_memory()  # as `gputop analyze` does
    before, wall, cpu = held_bytes(), time.perf_counter(), time.process_time()
    result = _RUNS[what](path)
    print(json.dumps({"result": result, "wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu,
                      "before_bytes": before["VmRSS"], "peak_bytes": held_bytes()["VmHWM"]}))


def held_bytes() -> dict[str, int]:
    """Memory of this process, now and at its highest. Not getrusage's figure, which a child inherits."""
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return {key: 1024 * int(status[key].split()[0]) for key in ("VmRSS", "VmHWM")}


def measure(what: str, path: Path, python: str = sys.executable) -> dict[str, float]:
    """One run. xprof caches results beside the file, so each run has a folder of its own."""
    from gputop.core.own_memory import NUMPY_SETTINGS

    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        copy = Path(folder) / path.name
        shutil.copyfile(path, copy)
        env = {**({} if what == "xprof" else NUMPY_SETTINGS), **os.environ}  # as `gputop analyze` has them
        env.pop("PYTHONDONTWRITEBYTECODE", None)  # else what was not installed is compiled in each run
        done = subprocess.run([python, __file__, "--run", what, str(copy)], check=True, stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL, text=True, env=env)
    return json.loads(done.stdout.splitlines()[-1])


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--events", type=int, nargs="+", default=list(_SIZES))
    parser.add_argument("--xprof-python", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--run", choices=list(_RUNS), help=argparse.SUPPRESS)
    parser.add_argument("file", type=Path, nargs="?")
    args = parser.parse_args()
    if args.run:
        run(args.run, args.file)
        return
    with tempfile.TemporaryDirectory() as folder:
        paths = [args.file] if args.file else [Path(folder) / f"{n}.xplane.pb" for n in sorted(args.events)]
        if not args.file:
            from xspaces import write

            for path in paths:
                write(path, int(path.name.split(".")[0]), _GPUS)
        growth = {path: medians([measure("gputop", path) for _ in range(_TIMES)]) for path in paths}
        compared = min(paths, key=lambda p: abs(growth[p]["result"] - _COMPARED))
        print(f"{growth[compared]['result']:,.0f} events, {compared.stat().st_size / 1e6:.0f} MB")
        beside_xprof(compared, args.xprof_python)
        print("\nGrowth")
        for path, m in growth.items():
            size, more = path.stat().st_size, m["peak_bytes"] - m["before_bytes"]
            print(f"{m['result']:>10,.0f} events {size / 1e6:6.0f} MB  {m['wall_s']:6.2f} s  "
                  f"{m['wall_s'] / m['result'] * 1e6:5.2f} µs/event  {more / m['result']:5.0f} bytes/event "
                  f"({more / size:3.1f} x the file)")
        print("\nThe interface's own process, a worker analyzing the largest")
        m = measure("interface", paths[-1])
        print(f"{m['before_bytes'] / 1e6:.0f} MB before, {m['peak_bytes'] / 1e6:.0f} MB at most; the worker is gone")


def beside_xprof(path: Path, python: str) -> None:
    contestants = {"gputop": sys.executable, "one core": sys.executable, "xprof": python}
    if subprocess.run([python, "-c", "import xprof"], capture_output=True).returncode:
        print("xprof is not in this environment: pip install xprof, or give --xprof-python")
        del contestants["xprof"]
    turns = [{what: measure(what, path, python) for what, python in contestants.items()} for _ in range(_TIMES)]
    found = {what: medians([turn[what] for turn in turns]) for what in contestants}
    for what, m in found.items():
        print(f"{what:24} {m['wall_s']:6.2f} s wall  {m['cpu_s']:6.2f} s CPU  peak {m['peak_bytes'] / 1e6:6.0f} MB")
    if "xprof" in found:
        for what in ("gputop", "one core"):
            times, cpu, memory = (found["xprof"][key] / found[what][key] for key in ("wall_s", "cpu_s", "peak_bytes"))
            print(f"{what}: {times:.1f} times as fast as xprof (CPU {cpu:.1f}), {memory:.1f} times less memory")


if __name__ == "__main__":
    main()
