"""How fast a capture's timeline is drawn, and what it takes to make one.

    python benchmarks/timeline.py [--events 5000000] [--gpus 16] [FILE.xplane.pb]

Makes an XSpace of a job (xspaces.py), or takes FILE, and opens its timeline in a worker process as the monitor
does: when its rows are there, when all of it is, and what the findings of a trace that is not analyzed yet add.
Then, in a fresh process that has only the timeline: screens of 50 rows by 200 columns at random zooms and places,
each its picture and, of the rows that are not too full for it, the named ranges; beside them the same picture by
one pass over the visible events in NumPy, without the sums made beforehand. And the single questions: at, next gap,
search.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

_ROWS, _COLUMNS = 50, 200
_OPENED = 3  # times
_SCREENS, _PLAIN = 500, 30  # how many are drawn, and how many of them the plain way, too


def make(paths: list[str], out: Path) -> dict[str, Any]:
    """In a process of its own: what the worker does, stage by stage."""
    from gputop.diagnosis.diagnose import analyze_to_facts
    from gputop.timeline.build import RowsWritten
    from gputop.timeline.idle_gaps import rank_idle_gaps
    from gputop.trace.readers.load import load

    begin = time.perf_counter()
    trace = load(paths)
    read = time.perf_counter()
    facts = analyze_to_facts(trace)
    analyzed = time.perf_counter()
    rank_idle_gaps(facts)
    sought = time.perf_counter()
    with out.open("wb") as file:
        section = RowsWritten(facts.trace, facts.steps, file).finish(facts)
    return {"section": section, "events": trace.event_count, "read_s": read - begin, "analyze_s": analyzed - read,
            "idle_gaps_s": sought - analyzed, "build_s": time.perf_counter() - sought, "peak_bytes": held("VmHWM"),
            "file_bytes": out.stat().st_size}


def opened(path: str) -> dict[str, float]:
    """In a fresh process: from asking a worker for the timeline, and for the findings with it, to what comes."""
    import resource

    from gputop.timeline.timeline_worker import timeline_in_worker

    out: dict[str, float] = {}
    for what, on_diagnosis in (("", None), ("with_findings_", lambda diagnosis: None)):
        begin, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        rows: list[float] = []
        timeline_in_worker([path], threading.Event(), lambda timeline, rows=rows: rows.append(time.perf_counter()),
                           on_diagnosis)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        out |= {f"{what}rows_s": rows[0] - begin, f"{what}all_s": time.perf_counter() - begin,
                f"{what}cpu_s": after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime}
    return out


def read(path: Path, *section: int) -> dict[str, object]:
    """In a fresh process that has nothing but the timeline, which is described at ``section`` of the file."""
    from gputop.timeline.file_layout import Extent
    from gputop.timeline.read_timeline import Timeline

    rng = random.Random(1)
    before = held("RssAnon")
    with path.open("rb") as file:
        timeline = Timeline.open(file, Extent(*section))
    rows = [row.key for row in timeline.rows][:_ROWS]
    low, high = timeline.window_ns
    screens = []
    for _ in range(_SCREENS):
        length = int(np.exp(rng.uniform(np.log(10_000), np.log(high - low))))
        start = rng.randint(low, high - length)
        screens.append((start, start + length))

    def picture(start: int, end: int) -> object:
        return timeline.coverage.picture(rows, start, end, _COLUMNS)

    def screen(start: int, end: int) -> None:
        timeline.coverage.picture(rows, start, end, _COLUMNS)
        for row in rows:
            if timeline.count(row, start, end) <= _COLUMNS // 4:
                timeline.ranges(row, start, end, _COLUMNS // 4)

    def plain(start: int, end: int) -> object:
        from gputop.trace.intervals import coverage, union

        edges = np.linspace(start, end, _COLUMNS + 1).astype(np.int64)
        out = []
        for row in rows:
            for source in timeline._sources(row):
                events = slice(*timeline.columns.begun(source, start, end))
                out.append(coverage(union(timeline.columns.start[events], timeline.columns.end[events]), edges[:-1],
                                    edges[1:]))
        return out

    def place() -> tuple[int, int]:
        return rng.choice(rows), rng.randint(low, high)

    cold = timed(lambda: screen(low, high), 1)  # its pages are mapped for the first time
    busy = max(timeline.rows, key=lambda row: timeline.count(row.key, low, high)).key
    name = timeline.ranges(busy, low, high, 1)[0].name
    return {
        "rows": len(rows), "first_screen_ms": cold[0][0], "screen": spread([each(screen, s) for s in screens]),
        "picture": spread([each(picture, s) for s in screens]),
        "picture_plain": spread([each(plain, s) for s in screens[:_PLAIN]]),
        "picture_of_these": spread([each(picture, s) for s in screens[:_PLAIN]]),
        "at": spread(timed(lambda: timeline.at(*place()), 500)),
        "next_gap": spread(timed(lambda: timeline.coverage.next_gap(*place(), 1_000), 500)),
        "next_gap_none": spread(timed(lambda: timeline.coverage.next_gap(busy, low - 1, high - low), 50)),
        "search_common": spread(timed(lambda: timeline.search(name[:20], *place()), 100)),
        "search_rare": spread(timed(lambda: timeline.search("train", rows[0], rng.randint(low, high)), 100)),
        "anonymous_bytes": held("RssAnon") - before, "mapped_bytes": held("RssFile"),
    }


def each(draw: Callable[[int, int], object], screen: tuple[int, int]) -> tuple[float, float]:
    return timed(lambda: draw(*screen), 1)[0]


def timed(work: Callable[[], object], times: int) -> list[tuple[float, float]]:
    """Milliseconds of each run: by the clock, and of CPU, which a busy machine does not change much."""
    out = []
    for _ in range(times):
        begin, used = time.perf_counter(), time.thread_time()
        work()
        out.append(((time.perf_counter() - begin) * 1e3, (time.thread_time() - used) * 1e3))
    return out


def spread(ms: list[tuple[float, float]]) -> dict[str, float]:
    return {f"p{q}_{which}_ms": float(np.percentile(own, q))
            for which, own in zip(("wall", "cpu"), zip(*ms, strict=True), strict=True) for q in (50, 95)}


def held(key: str) -> int:
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(status[key].split()[0])


def in_process(*arguments: str) -> dict:
    done = subprocess.run([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=5_000_000)
    parser.add_argument("--gpus", type=int, default=16)
    parser.add_argument("--make", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--opened", help=argparse.SUPPRESS)
    parser.add_argument("--read", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("file", nargs="?")
    args = parser.parse_args()
    if args.make:
        print(json.dumps(make([args.make[0]], Path(args.make[1]))))
        return
    if args.opened:
        print(json.dumps(opened(args.opened)))
        return
    if args.read:
        print(json.dumps(read(Path(args.read[0]), *map(int, args.read[1:]))))
        return
    with tempfile.TemporaryDirectory() as folder:
        trace = args.file
        if trace is None:
            from xspaces import write

            trace = Path(folder) / "job.xplane.pb"
            write(trace, args.events, args.gpus)
        runs = [in_process("--opened", str(trace)) for _ in range(_OPENED)]
        took = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        size = Path(trace).stat().st_size / 1e6 if Path(trace).is_file() else 0.0
        print(f"opened in a worker, {size:.0f} MB, medians of {_OPENED}: its rows after {took['rows_s']:.2f} s, all "
              f"after {took['all_s']:.2f} s ({took['all_s'] / took['rows_s']:.1f} times as long; {took['cpu_s']:.2f} s "
              f"of CPU); with the findings {took['with_findings_all_s']:.2f} s "
              f"({took['with_findings_cpu_s']:.2f} s of CPU)")
        path = Path(folder) / "timeline"
        made = in_process("--make", str(trace), str(path))
        print(f"{made['events']:,} events: read {made['read_s']:.1f} s, analyze {made['analyze_s']:.1f} s, idle gaps "
              f"{made['idle_gaps_s']:.1f} s, build (idle gaps included) {made['build_s']:.1f} s, peak "
              f"{made['peak_bytes'] / 2**20:,.0f} MiB; file {made['file_bytes'] / 2**20:,.0f} MiB, "
              f"{made['file_bytes'] / made['events']:.1f} bytes an event")
        found = in_process("--read", str(path), *map(str, made["section"]))
    print(f"reader: {found['anonymous_bytes'] / 2**20:.1f} MiB of its own, {found['mapped_bytes'] / 2**20:.0f} MiB of "
          f"mapped files (libraries and the timeline's pages seen); the very first screen "
          f"{found['first_screen_ms']:.1f} ms")
    print(f"{found['rows']} rows by {_COLUMNS} columns, {_SCREENS} random zooms and places:")
    for what, value in found.items():
        if isinstance(value, dict):
            print(f"  {what:18} p50 {value['p50_wall_ms']:8.3f}  p95 {value['p95_wall_ms']:8.3f} ms; of CPU p50 "
                  f"{value['p50_cpu_ms']:8.3f}  p95 {value['p95_cpu_ms']:8.3f} ms")
    ratio = found["picture_plain"]["p95_cpu_ms"] / found["picture_of_these"]["p95_cpu_ms"]
    print(f"a picture by the sums takes {ratio:.0f} times less CPU than by one pass over the events (p95)")


if __name__ == "__main__":
    main()
