"""Waiting for input, and tf.data by stage: what each stage of a pipeline costs per batch, and which one bounds it.

TensorFlow records every call of an iterator as ``Iterator::Root::Prefetch::Map``, with the iterator's id and its
parent's (tensorflow/core/framework/dataset.cc), and the runs of a stage's function on executor threads under the id
with which the stage started them (tensorflow/core/data/captured_function.cc).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gputop.analysis.host.host_ops import RUNS, STARTS_FUNCTION, of_input_pipeline
from gputop.analysis.results import InputPipeline, Pipeline, Stage
from gputop.analysis.steps.model import Steps
from gputop.analysis.steps.training_loops import GET_NEXT, GRAIN, LOADER, training_loops
from gputop.trace.int_map import IntMap
from gputop.trace.intervals import coverage
from gputop.trace.lookups import host_rows, host_stat, name_mask, values_at
from gputop.trace.model import I64, Trace
from gputop.trace.nesting import nest

ITERATOR = r"Iterator::"
_BATCH_CALLS = ((GET_NEXT, "tf.data IteratorGetNext"), (LOADER, "PyTorch DataLoader"), (GRAIN, "grain's iterators"))
_POSITION = re.compile(r"\[\d+\]")
_PRODUCES = r"Parallel\w*Produce$|MapAndBatch\w*Produce$"
_HANDS_ON = re.compile(r"(?:Root|Prefetch|Options|Model|MaxIntraOpParallelism|PrivateThreadPool)$")
SEGMENT_ENDS = re.compile(r"Prefetch$|Parallel|MapAndBatch")
PARALLEL_STAGE = re.compile(r"Parallel|MapAndBatch")
# numpy_function and py_function, with or without the type behind the op's name.
PYTHON_OP = r"(?:.*[:/])?(?:Eager)?PyFunc(?:Stateless)?(?:_\d+)?$"
_REFILL_FACTOR = 50.0  # times the median call; gputop's own figure
_MAX_PATHS = 512  # far more than the stages of any pipeline; a damaged file may have any number
_NO_ROOT = ""  # the label of what belongs to no root seen


class _Calls(Struct, frozen=True):
    """The calls of iterators, as columns: path and iterator are numbers, -1 where an iterator has no id."""

    rows: I64
    path: I64
    iterator: I64
    own_ns: I64
    paths: list[str]


def input_pipeline(trace: Trace, steps: Steps | None) -> InputPipeline | None:
    """Mean wait per step, as the union of the calls within the steps, and tf.data's stages. Mean over the loops where
    several ranks are traced. Without steps the share is that of the whole window and ``wait_s_per_step`` the mean per
    wait. None where the trace has no events of an input pipeline."""
    waits = [loop.waits for loop in training_loops(trace)]
    if not waits:
        return None
    how = next(name for pattern, name in _BATCH_CALLS if len(host_rows(trace, pattern)))
    if steps is not None:
        bounds = steps.edges_ns
        waited = sum(int(coverage(loop, bounds[:, 0], bounds[:, 1]).sum()) for loop in waits)
        length, count = int((bounds[:, 1] - bounds[:, 0]).sum()) * len(waits), steps.count * len(waits)
        how += ", union of the calls within steps"
    else:
        lo, hi = trace.window_ns
        waited, length = sum(loop.total for loop in waits), (hi - lo) * len(waits)
        count = sum(len(loop.start) for loop in waits)
        how += ", union of the calls in the window; per call, because no steps were found"
    return InputPipeline(waited / max(count, 1) / 1e9, waited / max(length, 1), stage_self_times(trace), how,
                         pipelines(trace))


def stage_self_times(trace: Trace) -> dict[str, float]:
    """tf.data stage → seconds in its own code in the window, longest first, summed over threads. A stage is the last
    part of ``Iterator::Root::Prefetch::Map``, its position stripped. Self time is an event's length minus that of the
    stages directly inside it on the same thread; a parallel stage waiting for its own workers counts as that stage.
    ``Root`` and ``Prefetch`` only hand on or wait, so they are left out."""
    host = trace.host
    rows = np.flatnonzero(name_mask(trace, ITERATOR).take(host.name) & (host.end_ns > host.start_ns))
    if not len(rows):
        return {}
    nesting = nest(host.line[rows], host.start_ns[rows], host.end_ns[rows], host.name[rows], trace.names)
    self_ns = nesting.own(host.end_ns[rows] - host.start_ns[rows])
    names, which = np.unique(host.name[rows], return_inverse=True)
    totals: dict[str, float] = {}
    for name, total in zip(names, np.bincount(which, weights=self_ns), strict=True):
        stage = re.sub(r"\[\d+\]$", "", trace.names[name].rsplit("::", 1)[-1])
        if stage not in ("Root", "Prefetch"):
            totals[stage] = totals.get(stage, 0.0) + float(total) / 1e9
    return dict(sorted(totals.items(), key=lambda item: (-item[1], item[0])))


def pipelines(trace: Trace) -> tuple[Pipeline, ...]:
    """The tf.data pipelines of the window, longest waited for first; empty where no iterator is traced. Iterators
    belong to one dataset where their roots have the same name and shapes; those whose root did not run in the window go
    with the only dataset that has their path, else with one of their own."""
    host = trace.host
    rows, path, paths = iterator_paths(trace)
    if not len(rows):
        return ()
    nesting = nest(host.line[rows], host.start_ns[rows], host.end_ns[rows], host.name[rows], trace.names)
    has, ids = _keys(trace, rows, "id")
    iterator = np.where(has, np.unique(ids, return_inverse=True)[1], -1)
    calls = _Calls(rows, path, iterator, nesting.own(host.end_ns[rows] - host.start_ns[rows]), paths)
    dataset, labels = _datasets(trace, calls)
    functions = _function_time(trace, calls)
    datasets = [_pipeline(trace, calls, np.flatnonzero(dataset == i), label, functions, len(labels))
             for i, label in enumerate(labels)]
    return tuple(sorted(datasets, key=lambda p: (-p.wait_s, p.dataset or "")))


def iterator_paths(trace: Trace) -> tuple[I64, I64, list[str]]:
    """Rows of the iterators' calls, the number of the path of each (``Root::Prefetch::Map``), and the paths in order;
    of more paths than any job has the longest."""
    host = trace.host
    rows = host_rows(trace, ITERATOR)
    rows = rows[host.end_ns[rows] > host.start_ns[rows]]
    names, which = np.unique(host.name[rows], return_inverse=True)
    by_name = [_POSITION.sub("", trace.names[i]).removeprefix("Iterator::") for i in names.tolist()]
    paths = sorted(set(by_name))
    number = {path: i for i, path in enumerate(paths)}
    path = np.array([number[p] for p in by_name], np.int64)[which]
    if len(paths) <= _MAX_PATHS:
        return rows, path, paths
    time = np.bincount(path, weights=host.end_ns[rows] - host.start_ns[rows])
    chosen = np.sort(np.argsort(-time, kind="stable")[:_MAX_PATHS])
    keep = np.isin(path, chosen)
    return rows[keep], np.searchsorted(chosen, path[keep]), [paths[i] for i in chosen.tolist()]


def _keys(trace: Trace, rows: I64, name: str) -> tuple[npt.NDArray[np.bool_], I64]:
    """An id that is unique in its process, made so among the hosts of the trace."""
    hosts = {host: i for i, host in enumerate(sorted({line.host for line in trace.lines}))}
    of_line = np.array([hosts[line.host] for line in trace.lines], np.int64)
    has, ids = values_at(*host_stat(trace.host, name), rows)
    with np.errstate(over="ignore"):
        return has, ids ^ (of_line[trace.host.line[rows]] * np.int64(0x1E3779B97F4A7C15))


def _datasets(trace: Trace, calls: _Calls) -> tuple[I64, list[str]]:
    """Number of each call's dataset, and the datasets' labels."""
    rows = calls.rows
    root = calls.paths.index("Root") if "Root" in calls.paths else -1
    has, ids = _keys(trace, rows, "id")
    is_root = calls.path == root
    (named, name), (shaped, shapes) = (values_at(*host_stat(trace.host, stat), rows) for stat in ("name", "shapes"))
    label_of: dict[int, str] = {}
    for i in np.flatnonzero(is_root & has & named).tolist():
        label_of[int(ids[i])] = trace.names[name[i]] + (f" {trace.names[shapes[i]]}" if shaped[i] else "")
    of_id = _root_labels(trace, calls, ids, has, label_of)
    labels = sorted(set(of_id.values()))
    number = {label: i for i, label in enumerate(labels)}
    dataset = IntMap({key: number[label] for key, label in of_id.items()})(ids)
    dataset[~has] = -1
    # The rest, by path: with the only dataset that has the path.
    for path in np.unique(calls.path[dataset < 0]).tolist():
        of_path = np.unique(dataset[(calls.path == path) & (dataset >= 0)])
        lost = (calls.path == path) & (dataset < 0)
        if len(of_path) == 1 or len(labels) == 1:
            dataset[lost] = of_path[0] if len(of_path) else 0
        else:
            if _NO_ROOT not in labels:
                labels.append(_NO_ROOT)
            dataset[lost] = labels.index(_NO_ROOT)
    return dataset, labels


def _root_labels(
    trace: Trace, calls: _Calls, ids: I64, has: npt.NDArray[np.bool_], label_of: dict[int, str],
) -> dict[int, str]:
    """The label of each iterator's root, for those whose ancestors ran in the window."""
    has_parent, parents = _keys(trace, calls.rows, "parent_id")
    distinct, first = np.unique(ids[has], return_index=True)
    first = np.flatnonzero(has)[first]
    parent = {int(i): int(parents[row]) for i, row in zip(distinct, first, strict=True) if has_parent[row]}
    out = dict(label_of)
    for key in distinct.tolist():
        chain: list[int] = []
        ancestor: int | None = key
        # A damaged file may hold a circle.
        while ancestor is not None and ancestor not in out and len(chain) < len(parent) + 1:
            chain.append(ancestor)
            ancestor = parent.get(ancestor)
        if ancestor is not None and ancestor in out:
            out.update(dict.fromkeys(chain, out[ancestor]))
    return out


def _function_time(trace: Trace, calls: _Calls) -> dict[int, int]:
    """Nanoseconds by path that the functions of its stages ran on executor threads, where that is traced. A stage
    starts its function in its own call, or, with workers, in a "…Produce" on its thread, in which it also calls the
    stage below. A function that only passes on its arguments needs no executor: of a stage with workers whose function
    has no run it is the rest of its "…Produce"."""
    host = trace.host
    started, produced = host_rows(trace, STARTS_FUNCTION), host_rows(trace, _PRODUCES)
    if not len(started):
        return {}
    rows = np.concatenate((calls.rows, produced, started))
    nesting = nest(host.line[rows], host.start_ns[rows], host.end_ns[rows], host.name[rows], trace.names)
    n, m = len(calls.rows), len(calls.rows) + len(produced)
    number = {path: i for i, path in enumerate(calls.paths)}
    above = np.array([number.get(path.rpartition("::")[0], -1) for path in calls.paths], np.int64)
    stage = np.full(len(rows), -1, np.int64)
    stage[:n] = calls.path
    below = np.flatnonzero((nesting.parent[:n] >= n) & (nesting.parent[:n] < m))
    stage[nesting.parent[below]] = above[calls.path[below]]
    around = nesting.holder(np.arange(len(rows)) >= m)[m:]
    stage_of_start = np.where(around < m, stage[around], -1)
    has, ids = _keys(trace, started, "id")
    matched = has & (stage_of_start >= 0)
    of_id = IntMap(dict(zip(ids[matched].tolist(), stage_of_start[matched].tolist(), strict=True)))
    runs = host_rows(trace, RUNS)
    has, ids = _keys(trace, runs, "id")
    runs, stage_of_run = runs[has], of_id(ids[has])
    length = (host.end_ns[runs] - host.start_ns[runs])[stage_of_run >= 0]
    total = np.bincount(stage_of_run[stage_of_run >= 0], weights=length, minlength=len(calls.paths))
    produce = n + np.flatnonzero(stage[n:m] >= 0)
    rest = np.bincount(stage[produce], minlength=len(calls.paths),
                       weights=nesting.own(host.end_ns[rows] - host.start_ns[rows])[produce])
    return {i: int(ran or alone) for i, (ran, alone) in enumerate(zip(total.tolist(), rest.tolist(), strict=True))
            if ran or alone}


def _pipeline(trace: Trace, calls: _Calls, of: I64, label: str, functions: dict[int, int], datasets: int) -> Pipeline:
    """One dataset; functions are told by path only, so they are shared out by calls where several datasets have it."""
    host = trace.host
    path = calls.path[of]
    count = np.bincount(path, minlength=len(calls.paths))
    self_ns = np.bincount(path, weights=calls.own_ns[of], minlength=len(calls.paths))
    everywhere = np.bincount(calls.path, minlength=len(calls.paths)) if datasets > 1 else count
    root = _top(calls, count, alone=datasets == 1)
    batches = int(count[root]) if root >= 0 else 0
    at_root = calls.rows[of[path == root]]
    stages: dict[str, Stage] = {}
    for i in np.flatnonzero(count).tolist():
        text = calls.paths[i]
        above, _, name = text.rpartition("::")
        rows = calls.rows[of[path == i]]
        has, values = values_at(*host_stat(trace.host, "parallelism"), rows)
        parallelism = int(values[has].max()) if has.any() else None
        function = functions[i] * float(count[i]) / float(everywhere[i]) / 1e9 if i in functions else None
        workers = _workers(stages.get(above), parallelism if PARALLEL_STAGE.search(name) else None)
        limit, empty, empty_ns = _buffer(trace, rows) if name.startswith("Prefetch") else (None, None, None)
        cost = _cost(name, float(self_ns[i]) / 1e9, function, workers)
        length = host.end_ns[rows] - host.start_ns[rows]
        # A call of a Shuffle takes as many elements as its buffer lacks: all of them, or one.
        refill_ns = length[length > _REFILL_FACTOR * np.median(length)].sum() if name.startswith("Shuffle") else None
        iterators = np.unique(calls.iterator[of[path == i]])
        stages[text] = Stage(
            path=text, name=name, parent=above if above in stages else None, calls=int(count[i]),
            self_s=float(self_ns[i]) / 1e9, function_s=function, workers=workers,
            cost_s_per_batch=cost / batches if batches else None, parallelism=parallelism,
            iterators=int((iterators >= 0).sum()) or 1, buffer_limit=limit, buffer_empty=empty,
            empty_s=None if empty_ns is None else int(empty_ns) / 1e9,
            refill_s=None if refill_ns is None else int(refill_ns) / 1e9)
    bounding, cost_s = _bounding(stages) if batches else (None, None)
    return Pipeline(
        dataset=label or None, iterators=stages[calls.paths[root]].iterators if root >= 0 else 1, batches=batches,
        wait_s=int((host.end_ns[at_root] - host.start_ns[at_root]).sum()) / 1e9,
        stages=tuple(stages.values()), bounding=bounding, bounding_s_per_batch=cost_s)


def python_s(trace: Trace) -> float:
    """Seconds in which tf.data's functions called Python (py_function, numpy_function), summed over threads."""
    host = trace.host
    rows = host_rows(trace, PYTHON_OP)
    rows = rows[of_input_pipeline(trace)[rows]] if len(rows) else rows
    return int((host.end_ns[rows] - host.start_ns[rows]).sum()) / 1e9


def _top(calls: _Calls, count: I64, *, alone: bool) -> int:
    """The path whose calls fetch batches: the root, or the one stage below it where the root is not traced; or -1."""
    called = np.flatnonzero(count).tolist()
    root = [i for i in called if calls.paths[i] == "Root"]
    below = [i for i in called if calls.paths[i].count("::") == 1] if alone else []
    return root[0] if root else below[0] if len(below) == 1 else -1


def _workers(parent: Stage | None, parallelism: int | None) -> int:
    """Threads that do a stage's work: its own workers, or those of the parallel interleave that calls it."""
    if parallelism is not None:
        return max(parallelism, 1)
    if parent is not None and (parent.name.startswith("ParallelInterleave") or not SEGMENT_ENDS.search(parent.name)):
        return parent.workers
    return 1


def _cost(name: str, own_s: float, function_s: float | None, workers: int) -> float:
    """Seconds of a stage's own work over its workers; of a parallel stage without a traced function, waiting for it."""
    if _HANDS_ON.match(name):
        return 0.0
    if PARALLEL_STAGE.search(name):
        return own_s if function_s is None else function_s / workers
    return own_s / workers


def _bounding(stages: dict[str, Stage]) -> tuple[str | None, float | None]:
    """The costliest stage of the segment that costs most per batch, and that segment's cost."""
    costs: dict[str, float] = {}
    of_segment = segments(stages)
    for head, paths in of_segment.items():
        for path in paths:
            costs[head] = costs.get(head, 0.0) + (stages[path].cost_s_per_batch or 0.0)
    head = max(costs, key=lambda path: costs[path])
    if costs[head] <= 0:
        return None, None
    return max(of_segment[head], key=lambda path: stages[path].cost_s_per_batch or 0.0), costs[head]


def segments(stages: Mapping[str, Stage]) -> dict[str, list[str]]:
    """Paths of the stages that run one after the other, by the first of them."""
    head: dict[str, str] = {}
    out: dict[str, list[str]] = {}
    for path, stage in stages.items():  # parents come first
        above = stages.get(stage.parent or "")
        cut = above is None or SEGMENT_ENDS.search(above.name) or SEGMENT_ENDS.search(stage.name)
        head[path] = path if cut or above is None else head[above.path]
        out.setdefault(head[path], []).append(path)
    return out


def _buffer(trace: Trace, rows: I64) -> tuple[int | None, float | None, int | None]:
    """Prefetch's limit, and the share and the time (ns) of its calls that found the buffer empty: they lack
    ``buffered_elements``. None where no call tells the limit either, so that a missing figure says nothing."""
    has_limit, limits = values_at(*host_stat(trace.host, "buffer_limit"), rows)
    if not has_limit.any():
        return None, None, None
    _, elements = values_at(*host_stat(trace.host, "buffered_elements"), rows)
    empty, rows = elements[has_limit] <= 0, rows[has_limit]
    length_ns = trace.host.end_ns[rows] - trace.host.start_ns[rows]
    return int(limits[has_limit].max()), float(empty.mean()), length_ns[empty].sum()
