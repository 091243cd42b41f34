"""The replay on the sample traces of ByteDance's StragglerAnalysis, against the slowdowns that it publishes for them.

    python benchmarks/straggler_traces.py DATA   (a folder with trace-AR.parquet, result-AR.json, and so on; pyarrow)

The traces (github.com/ByteDance-Seed/StragglerAnalysis, Apache-2.0, "data") hold no kernels but the operations of a
pipeline-parallel job: passes of microbatches, sends and receives, collectives. Here a worker is a GPU, each kind of
operation that can run beside others is a stream, and who meets in a collective is known from stage, rank and number.
What operations of a worker wait for is the project's own model. Ideal: each computation takes the mean of its kind,
each transfer the median of its kind. Slowdown: steps with usual delays over ideal ones, which have them too.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet

from gputop.analysis.gpu.device_time import timelines
from gputop.analysis.results import StepTimes
from gputop.analysis.steps.model import Steps
from gputop.analysis.what_if.cure import Cure
from gputop.analysis.what_if.dependencies import NEG_INF, Delays
from gputop.analysis.what_if.graph import Graph, Matched, build_graph, split_into_pieces
from gputop.analysis.what_if.replay import Replay, replay_graph, run_replay, steps_time_ns
from gputop.trace.model import AllocatorEvents, DeviceEvents, HostEvents, Kind, Line, Trace, TraceGpu

_P2P = {"forward-send": ("forward", 0), "forward-recv": ("forward", -1),
        "backward-send": ("backward", -1), "backward-recv": ("backward", 0)}  # and from which of two stages on
_ALL_RANKS = ("params-all-gather", "grads-reduce-scatter", "separate-grads-all-reduce")  # of a stage
_CLOCK_NS = 500_000  # between workers
_COMPUTE = ("forward-compute", "backward-compute")


def meeting(name: str, step: int, rank: int, stage: int, number: int) -> tuple[Any, ...] | None:
    """What all operations have in common that move data together; None: it is no communication."""
    if name in _P2P:
        way, offset = _P2P[name]
        return way, step, rank, stage + offset, number
    if name in _ALL_RANKS:
        return name, step, stage, number
    if name == "embedding-grads-all-reduce":
        return name, step, rank
    return (name, step) if name == "optimizer-clip-main-grad" else None


def graph_of(trace: Trace, steps: Steps, met: np.ndarray, waits_for: np.ndarray) -> Graph:
    """The graph whose collectives, and what operations of other streams each operation waits for, are given: by row of
    the trace's device events, -1: none. What begins later than it could was launched late, which stays."""
    graph = build_graph(trace, timelines(trace), steps)
    assert graph is not None
    events = graph.events
    rows = waits_for[events.row]
    source = np.where(rows >= 0, events.of_row[rows], -1)
    ended = np.where(rows >= 0, events.end[source], NEG_INF)
    by_source = ended > events.previous_end
    fixed, zero = events.first & (rows < 0), np.zeros_like(events.start)
    pause = np.where(by_source | events.first, 0, events.start - events.previous_end)
    delays = Delays(source, np.where(by_source, events.start - ended, 0), zero, pause, zero,
                    graph.delays.usual_after_previous, graph.delays.unexplained, fixed)
    launches = graph.launches._replace(begin=np.where(fixed, events.start, NEG_INF))
    _, number = np.unique(met[events.row], return_inverse=True)
    of_event = np.where(met[events.row] >= 0, number - int((met[events.row] < 0).any()), -1)
    members = np.flatnonzero(of_event >= 0)
    begun = np.zeros(int(of_event.max()) + 1, np.int64)
    np.maximum.at(begun, of_event[members], events.start[members])
    transfer = events.work.copy()
    transfer[members] = np.maximum(events.end[members] - begun[of_event[members]], 0)
    collectives = Matched(of_event, transfer, begun)
    return graph._replace(launches=launches, delays=delays, collectives=collectives, pieces=split_into_pieces(
        events, launches, delays, graph.waits, collectives, graph.boundaries))


def dependencies(rows: list[dict[str, Any]], device: DeviceEvents) -> np.ndarray:
    """By row that of another stream of its worker that it waits for, -1: none."""
    of = {(row["dp_rank"], row["stage"], row["optype"], row["seq_id"]): i for i, row in enumerate(rows)}
    computed = defaultdict(list)  # by worker, in order
    for i, row in enumerate(rows):
        if row["optype"] not in _P2P and row["optype"] not in _ALL_RANKS:
            computed[row["dp_rank"], row["stage"]].append(i)
    out = np.full(len(rows), -1)
    for i, row in enumerate(rows):
        worker, name, number = (row["dp_rank"], row["stage"]), row["optype"], row["seq_id"]
        way, _, what = name.partition("-")
        own = computed[worker]
        before = -1
        if name in _COMPUTE:
            before = of.get((*worker, f"{way}-recv", number), -1)
            if before < 0 and number == 0 and way == "forward":
                before = of.get((*worker, "params-all-gather", 0), -1)
        elif name in _P2P:
            before = of.get((*worker, f"{way}-compute", number - (what == "recv")), -1)
            if before < 0 and way == "backward":
                first = next(k for k, j in enumerate(own) if rows[j]["optype"] == "backward-compute")
                before = own[max(first - 2, 0)]
        elif name in _ALL_RANKS[1:]:
            before = max((j for j in own if device.end_ns[j] <= device.start_ns[i] + _CLOCK_NS), default=-1)
        elif name == "optimizer-clip-main-grad":
            before = max((of.get((*worker, kind, k), -1) for kind in _ALL_RANKS[1:] for k in range(2)),
                         key=lambda j: device.end_ns[j] if j >= 0 else -1)
        out[i] = before
    return out


def replay_of(rows: list[dict[str, Any]], ranks: int) -> Replay:
    """One step."""
    rows = sorted(rows, key=lambda row: row["start_ts"])
    names: dict[str, int] = {}
    lines: dict[tuple[int, str], int] = {}
    met: dict[tuple[Any, ...], int] = {}
    device, numbers = DeviceEvents.empty(len(rows)), np.full(len(rows), -1)
    for i, row in enumerate(rows):
        name, stage, rank = row["optype"], row["stage"], row["dp_rank"]
        worker = stage * ranks + rank
        stream = name if name in _P2P else "collectives" if name in _ALL_RANKS else "compute"
        device.gpu[i], device.line[i] = worker, lines.setdefault((worker, stream), len(lines))
        device.name[i] = names.setdefault(name, len(names))
        device.kind[i] = Kind.COMPUTE if name in _COMPUTE else Kind.COLLECTIVE
        device.start_ns[i] = round((row["start_ts"] - rows[0]["start_ts"]) * 1e9)
        device.end_ns[i] = device.start_ns[i] + round(row["duration"] * 1e9)
        key = meeting(name, 0, rank, stage, row["seq_id"])
        if key is not None:
            numbers[i] = met.setdefault(key, len(met))
    trace = Trace(
        paths=[], hosts=["job"], names=list(names), lines=[Line("job", *key) for key in lines],
        gpus=[TraceGpu("job", g) for g in range(int(device.gpu.max()) + 1)], device=device, host=HostEvents.empty(),
        allocator=AllocatorEvents.empty())
    end = int(device.end_ns.max())
    steps = Steps(((0, end + 1),), StepTimes("step", "high", 1, end / 1e9, end / 1e9, end / 1e9))
    return replay_graph(graph_of(trace, steps, numbers, dependencies(rows, device)))


def ideal(replays: list[Replay]) -> list[Cure]:
    """Each operation as long as its kind, over all steps and workers."""
    kinds = [np.array(replay.graph.trace.names)[replay.graph.events.name] for replay in replays]
    left = [np.ones(len(kind)) for kind in kinds]
    transfers = [replay.graph.collectives.transfer for replay in replays]
    for kind in np.unique(np.concatenate(kinds)).tolist():
        every = np.concatenate([transfer[own == kind] for transfer, own in zip(transfers, kinds, strict=True)])
        length = every.mean() if kind in _COMPUTE or kind == "optimizer" else np.median(every)
        for transfer, own, ratio in zip(transfers, kinds, left, strict=True):
            ratio[own == kind] = length / np.maximum(transfer[own == kind], 1_000)
    return [Cure(assumes="", scaled=((replay.graph.events.row, ratio),))
            for replay, ratio in zip(replays, left, strict=True)]


def row(data: Path, name: str) -> str:
    published = json.loads((data / f"result-{name}.json").read_text())
    steps = defaultdict(list)
    for operation in parquet.read_table(data / f"trace-{name}.parquet").to_pylist():
        steps[operation["step"]].append(operation)
    replays = [replay_of(rows, published["job_meta"]["dp_size"]) for rows in steps.values()]
    recorded, modeled = (np.array([getattr(replay, key) for replay in replays]) / 1e9
                         for key in ("recorded_ns", "modeled_ns"))
    left = [steps_time_ns(replay.graph, run_replay(replay.graph, cure, exact=False)) / 1e9
            for replay, cure in zip(replays, ideal(replays), strict=True)]
    theirs = [float(np.mean(list(published[f"step_t_{key}"].values()))) for key in ("base", "nodelay", "noblk")]
    workers = len(replays[0].graph.trace.gpus)
    return (f"| {name} | {workers} | {len(replays)} | {recorded.mean():.3f} | {theirs[0]:.3f} | "
            f"{modeled.mean():.3f} | {theirs[1]:.3f} | {np.mean(left):.3f} | {theirs[2]:.3f} | "
            f"{modeled.mean() / np.mean(left):.3f} | {published['blocking_slowdown']:.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    data = parser.parse_args().data
    print("| trace | workers | steps | recorded s | theirs | usual delays s | theirs | ideal s | theirs | slowdown | "
          "theirs |")
    print("|---|" + "---:|" * 10)
    for name in ("ST", "AR", "SE"):
        print(row(data, name), flush=True)


if __name__ == "__main__":
    main()
