"""The change of a tf.data pipeline that lets it keep up, its code, and the step time to expect then.

tf.data runs a pipeline's segments at the same time: what lies between two stages with threads of their own
(Prefetch and the parallel ones). The slowest segment bounds it. A fix changes one stage; the step then takes as long
as the slowest segment that is left, or as the rest of the step. Functions run on as many threads as tf.data has CPUs,
whatever ``num_parallel_calls`` says.

Two things bound what a fix saves, whatever the step waits. No more can go than the stage's own cost that goes, and, of
what runs beside the step after the fix, what the step takes. And where the fix moves work but removes none, the CPU
time of a step stays: the CPUs that are free to the job cannot do it in less than that time divided by their number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from gputop.advice.fix_code import code, joined
from gputop.analysis.host.tf_data import PARALLEL_STAGE, SEGMENT_ENDS, segments
from gputop.analysis.results import Pipeline, Stage
from gputop.core.captured_samples import JobCpus
from gputop.core.findings import Claim
from gputop.text.units import counted_cpus, percent, seconds

_PYTHON_MAP = ("The map function is Python (py_function or numpy_function), whose calls share the global interpreter "
               "lock (GIL): they compute one at a time and run in parallel only while they wait for storage or "
               "network. Rewrite the function in TensorFlow ops, or run it once and store TFRecords. If CPUs are free, "
               "run the function in separate processes.")
_WAITING = 16  # calls that wait at once, to begin with
_MAP_WAITS = ("The map function is Python that mostly waits for storage or network: let its calls wait in parallel "
              "(num_parallel_calls, with more threads than CPUs) and prefetch.")
_MAIN_SHARE = 0.5  # share of a function's time
_FOR_BATCHES = 0.1  # share of the time in calls for a batch. gputop's own figure
_MAX_THREADS_PER_CPU = 2  # threads for each CPU, from which they are said to be too many
# Times the slowest segment's own times: a longer wait has a cause that they do not show, such as tf.data's own time for
# each of many small elements.
_EXPLAINS = 1.25
_UNSEEN = (" The trace shows no event of the stages that fill a prefetch buffer, and the time of the others does not "
           "explain the wait.")
_CACHED = "the stage's results are cached"
_MAPS = re.compile(r"(?:Parallel)?Map|MapAndBatch|Filter")
_READS = re.compile(r"TFRecord|TextLine|FixedLengthRecord|Csv|SqlDataset|LMDB|Glob|MatchingFiles")
_SEVERAL = re.compile(r"FlatMap|Interleave")


_RECORD_FILES = ("Replace from_generator, which runs Python in one thread at a time, with TFRecord files and "
                 "TensorFlow ops.")
NEVER_EMPTY = ("waits for a batch with an empty prefetch buffer; it held one in most of this time, and the calls took "
               "long all the same, as calls do that wait for a CPU")
_SEVERAL_FILES = "Read several files in parallel: use interleave with parallel calls, and process files inside it."
_OVERLAP = "Overlap the input pipeline with the step: prefetch, and run slow stages in parallel."
_LESS_WORK = "Make the pipeline faster: run slow stages in parallel, and cache work that is the same in every epoch."
_ASSEMBLE = "Assemble batches in parallel."
_BY_NAME = (
    (re.compile(r"Parallel|MapAndBatch"), "The stage already runs in parallel. Cache work that is the same in every "
                                          "epoch, or do it on whole batches.", "once-or-whole"),
    (re.compile(r"Generator"), _RECORD_FILES, "records"), (_SEVERAL, _SEVERAL_FILES, "interleave"),
    (_READS, _SEVERAL_FILES, "interleave"), (re.compile(r"Batch|PaddedBatch"), _ASSEMBLE, "batch"),
    (_MAPS, "Run the map in parallel and prefetch.", "parallel"),
)


def _code(key: str, threads: int = _WAITING) -> str | None:
    if key != "once-or-whole":
        return code("input_bound", key, THREADS=threads)
    return joined("# work that is the same in every epoch:", _code("cache"),
                  "# work that differs between epochs, such as augmentation:", _code("whole"))


class InputFix(Struct, frozen=True):
    """``step_s`` is the step to expect, None where the pipeline tells no costs; ``how`` what that assumes."""

    action: str
    snippet: str | None = None
    step_s: float | None = None
    how: str = ""
    tells: str = ""  # a sentence about the stage that bounds the pipeline
    numbers: Mapping[str, float] | None = None
    stage: str = ""  # the path of the stage that bounds the pipeline
    # "at most": ``how`` is the best case. "at least", with both "about": the work is not done elsewhere, which frees
    # CPUs for a step that runs on them.
    claim: Claim = "measured"
    beside_s: float | None = None  # what a step's batches take, where they are made beside the step, behind a buffer
    fast_enough: bool = False  # on average: only batches that come late now and then are waited for
    never_empty: bool = False  # the buffer next to the loop, when it is waited for: no batch comes late


def suggest_fix(pipeline: Pipeline, step_s: float, wait_s: float, per_step: float, budget: int | None,
                python_s: float = 0.0, job: JobCpus | None = None) -> InputFix | None:
    """The fix for one pipeline; None where nothing says which stage bounds it.

    ``wait_s`` is what a step waits for its batches, ``per_step`` the batches of a step, ``budget`` tf.data's CPU
    budget, ``python_s`` what tf.data's functions spent in Python in the window, ``job`` the CPUs of the captured job.
    """
    slow = _bottleneck(pipeline, step_s, wait_s, per_step, budget, job)
    if slow is None:
        return None
    fed = {stage.parent for stage in pipeline.stages}
    if wait_s > _EXPLAINS * slow.pipeline_s and any(
            stage.name.startswith("Prefetch") and stage.path not in fed for stage in pipeline.stages):
        return replace(suggest_fix_by_name(None, prefetches=True), tells=_UNSEEN)
    return _fill_buffers(slow) or _replace_python(slow, python_s) or _use_threads(slow) or _do_less(slow)


class _Effect(Struct, frozen=True, kw_only=True):
    """Effect of a fix on the segment of the pipeline that it changes."""

    left_s: float  # what the segment still takes
    how: str
    most_s: float | None = None  # what can go at most; None: the segment's own cost
    removes: bool = False  # the work is gone, and not done elsewhere or at another time
    claim: Claim = "measured"  # "at most": in the best case; "at least": what removes the work takes hardly any time


class _Bottleneck(Struct, frozen=True):
    """The stage that bounds a pipeline, and the times of a step that a fix changes or leaves.

    ``cost_s`` is what the stage's segment takes for the batches of a step, ``stage_s`` the stage itself, ``others_s``
    the slowest of the other segments, ``rest_s`` what the step takes without its wait for input.
    """

    pipeline: Pipeline
    stages: Mapping[str, Stage]
    stage: Stage
    step_s: float
    wait_s: float
    rest_s: float
    cost_s: float
    stage_s: float
    others_s: float
    cpus: float | None  # that functions can run on; None: not known
    job: JobCpus | None

    @property
    def apart(self) -> bool:
        """Return whether a buffer or workers lie between the step and the stage, so that it runs beside the step."""
        return any(SEGMENT_ENDS.search(above.name) for above in (self.stage, *_above(self.stages, self.stage)))

    @property
    def prefetch(self) -> Stage | None:
        """The buffer next to the training loop; None: there is none."""
        return next((stage for stage in self.pipeline.stages if stage.name.startswith("Prefetch")), None)

    @property
    def pipeline_s(self) -> float:
        """Seconds that its slowest segment takes for the batches of a step."""
        return max(self.cost_s, self.others_s)

    @property
    def threads(self) -> float:
        """Number of threads that the stage can have; tf.data's pool has one for each CPU, and they run on those that
        are free. No more than it has where a parallel interleave runs it: how many that uses, a trace does not always
        tell."""
        if any(above.name.startswith("ParallelInterleave") for above in _above(self.stages, self.stage)):
            return self.stage.workers
        threads = max(self.cpus if self.cpus is not None else 4 * self.stage.workers, 1)
        return threads if self.job is None else max(min(threads, self.job.free), 1)

    @property
    def waits(self) -> bool:
        """Return whether the stage's function mostly waits: the whole job uses less CPU time meanwhile than half of
        what it takes."""
        used = self.job.used if self.job is not None else None
        return used is not None and used * self.step_s < _MAIN_SHARE * self.stage_s * self.stage.workers

    @property
    def on_all_threads_s(self) -> float:
        """Seconds that the segment takes once the stage runs on all threads that it can have."""
        return self.cost_s - self.stage_s + self.stage_s * self.stage.workers / self.threads

    def under(self, pattern: re.Pattern[str]) -> bool:
        """Return whether a stage of such a name runs this one."""
        return any(pattern.match(above.name) for above in _above(self.stages, self.stage))

    def fix(self, action: str, key: str, effect: _Effect, threads: int = _WAITING) -> InputFix:
        """Return the fix, whose code has this key, with what the step takes after it."""
        floor_s, job = 0.0, self.job
        left_s, how, most_s, claim = effect.left_s, effect.how, effect.most_s, effect.claim
        best: Claim = "about" if claim == "at least" else "at most"
        if not effect.removes:
            claim = best if job is None else claim
            floor_s = self.step_s * job.used / job.free if job is not None and job.used is not None else 0.0
            how += _cpu_clause(job)
        if most_s is None:
            most_s = self.cost_s - left_s if self.apart else self.cost_s
            if self.wait_s > _EXPLAINS * self.pipeline_s:
                most_s, left_s, floor_s, claim = self.wait_s, 0.0, 0.0, best
                how += "; the stages' times do not explain the wait, so the whole wait may disappear"
        expected_s = max(self.rest_s, left_s, self.others_s, floor_s, self.step_s - most_s)
        return InputFix(action, _code(key, threads), min(expected_s, self.step_s), how, self._sentences(),
                        self._evidence(), self.stage.path, claim, self.pipeline_s if self.apart else None)

    def _sentences(self) -> str:
        stage, last = self.stage, self.prefetch
        text = f" The {stage.name} stage takes {seconds(self.stage_s)} for the batches of a step"
        text += f" on {stage.workers} threads." if stage.workers > 1 else "."
        if last is None:
            return text + " Nothing is prefetched."
        if last.buffer_empty is not None:
            text += f" The prefetch buffer was empty for {percent(last.buffer_empty)} of the calls."
        return text

    def _evidence(self) -> dict[str, float]:
        numbers = {"slowest_stage_s": self.stage_s, "pipeline_s": self.pipeline_s}
        if self.prefetch is not None and self.prefetch.buffer_empty is not None:
            numbers["buffer_empty_ratio"] = self.prefetch.buffer_empty
        return numbers


def _bottleneck(pipeline: Pipeline, step_s: float, wait_s: float, per_step: float, budget: int | None,
                job: JobCpus | None) -> _Bottleneck | None:
    """Stage that bounds the pipeline; None where that or its cost is not known."""
    cpus = min((n for n in (budget, job and job.limit) if n), default=None)
    stages = {stage.path: stage for stage in pipeline.stages}
    slow = stages.get(pipeline.bounding or "")
    if slow is None or not slow.cost_s_per_batch:
        return None
    of_segment = segments(stages)
    costs = {head: sum(_cost(stages[path], cpus) for path in paths) * per_step for head, paths in of_segment.items()}
    slow_head = next(head for head, paths in of_segment.items() if slow.path in paths)
    # Stages that overlap, or a window that cuts batches off, can make the costs more than a step was long.
    scale = min(1.0, step_s / costs[slow_head]) if costs[slow_head] > 0 else 1.0
    return _Bottleneck(
        pipeline, stages, slow, step_s, wait_s, rest_s=max(step_s - wait_s, 0.0), cost_s=costs[slow_head] * scale,
        stage_s=_cost(slow, cpus) * per_step * scale,
        others_s=max((min(cost, step_s) for head, cost in costs.items() if head != slow_head), default=0.0),
        cpus=cpus, job=job)


def _fill_buffers(slow: _Bottleneck) -> InputFix | None:
    """Fix of a pipeline that is fast enough on average, but whose buffers do not bridge the slow batches."""
    last = slow.prefetch
    if last is not None and slow.apart and slow.pipeline_s <= slow.rest_s and (last.buffer_empty or 0.0) < 0.5:
        never_empty = last.parent in (None, "Root") and last.empty_s is not None and (
            last.empty_s < _FOR_BATCHES * slow.pipeline.wait_s)
        return replace(slow.fix(
            "The pipeline is fast enough on average, but its buffer is sometimes empty. Prefetch more batches.",
            "deeper", _Effect(left_s=slow.cost_s, how="the buffer has enough batches while slow ones are prepared",
                             most_s=slow.wait_s)), fast_enough=True, never_empty=never_empty)
    if not slow.apart and slow.cost_s <= slow.rest_s:
        return slow.fix("Prefetch: prepare the next batch while the step runs.", "prefetch",
                        _Effect(left_s=slow.cost_s, how="each batch is prepared while the previous step runs"))
    return None


def _replace_python(slow: _Bottleneck, python_s: float) -> InputFix | None:
    """Fix of a stage that runs Python, of which only one call runs at a time."""
    stage = slow.stage
    if stage.name.startswith("Generator"):
        return slow.fix(_RECORD_FILES, "records", _Effect(
            left_s=slow.cost_s - slow.stage_s, removes=True,
            how="reading records takes almost no time compared with the Python code of the generator"))
    if _MAPS.match(stage.name) and stage.function_s and python_s >= _MAIN_SHARE * stage.function_s:
        if slow.waits:
            return slow.fix(_MAP_WAITS, "waits", _Effect(
                left_s=slow.cost_s - slow.stage_s * (1 - min(stage.workers / _WAITING, 1.0)), claim="at most",
                how=f"{_WAITING} calls wait in parallel"))
        return slow.fix(_PYTHON_MAP, "no-python", _Effect(
            left_s=slow.cost_s - slow.stage_s, removes=True, claim="about", how="the Python code takes no time"))
    return None


def _use_threads(slow: _Bottleneck) -> InputFix | None:
    """Fix of a stage that can run on more threads than it does."""
    stage, last, threads = slow.stage, slow.prefetch, round(slow.threads)
    more = stage.workers < threads
    if slow.under(_SEVERAL) or _READS.match(stage.name) or _SEVERAL.match(stage.name):
        if more:
            return slow.fix(_SEVERAL_FILES, "interleave", _Effect(
                left_s=slow.cost_s * stage.workers / slow.threads,
                how=f"files are read on {threads} threads in parallel"))
    elif _MAPS.match(stage.name) and more:
        if PARALLEL_STAGE.match(stage.name) and stage.parallelism is None and stage.workers == 1:
            return slow.fix("The map already runs in parallel, but the trace does not show on how many threads. Let "
                            "tf.data choose the number, and cache work that is the same in every epoch.", "cache",
                            _Effect(left_s=slow.cost_s - slow.stage_s, how=_CACHED, removes=True, claim="at least"))
        of = f" on {slow.cpus:.3g} CPUs" if slow.cpus else ""
        action = ("Run the map in parallel (currently on 1 thread)" if stage.workers == 1 else
                  f"Let tf.data choose the number of map threads (currently {stage.workers}{of})")
        if last is None:
            action += " and prefetch"
        return slow.fix(f"{action}.", "map" if last else "parallel", _Effect(
            left_s=slow.on_all_threads_s,
            how=f"the map runs on {threads} threads and each call takes as long as now"))
    if stage.name.startswith(("Batch", "PaddedBatch", "ParallelBatch")):
        return slow.fix(_ASSEMBLE, "batch", _Effect(
            left_s=slow.on_all_threads_s, how=f"batches are assembled on {threads} threads"))
    return None


def _do_less(slow: _Bottleneck) -> InputFix:
    """Fix of a stage in which only less work helps."""
    stage, left_s, job = slow.stage, slow.cost_s - slow.stage_s, slow.job
    if not (_MAPS.match(stage.name) or _SEVERAL.match(stage.name) or _READS.match(stage.name)):
        return slow.fix(*((_LESS_WORK, "cache") if slow.prefetch else (_OVERLAP, "prefetch")), _Effect(
            left_s=left_s, how=f"{stage.name} takes no time", removes=True, claim="at most"))
    crowd = ""
    if slow.cpus and stage.workers >= _MAX_THREADS_PER_CPU * max(slow.threads, 1):
        # Threads that compute take turns on the CPUs; only those that wait for something else can be more.
        crowd = (f"The stage's {stage.workers} threads share {slow.cpus:.3g} CPUs: let tf.data choose the number of "
                 "threads (AUTOTUNE), unless they wait for storage or network. ")
    fed = max((other.calls for other in slow.pipeline.stages if other.parent == stage.path), default=0)
    full = ("The work already runs on all CPUs" if job is None or stage.workers >= int(job.limit) else
            "No CPU is free for more threads")
    cached = _Effect(left_s=left_s, how=_CACHED, removes=True, claim="at least")
    if slow.pipeline.batches and max(stage.calls, fed) >= 2 * slow.pipeline.batches:
        return slow.fix(f"{crowd}{full}. Process whole batches instead of single elements, and cache work that is the "
                        "same in every epoch.", "once-or-whole", cached)
    return slow.fix(f"{crowd}{full}. Cache work that is the same in every epoch, or do it once and store the results.",
                    "store", cached, 4 * round(slow.threads))


def _cpu_clause(job: JobCpus | None) -> str:
    """Assumption of an estimate about the CPUs on which the work of the pipeline goes on."""
    if job is None:
        return "; the trace does not show whether CPUs are free for this work"
    quota = f" by its quota of {job.quota:.3g}" if job.quota is not None and job.quota < job.allowed else ""
    text = f", on the {counted_cpus(job.free)} that the job can get{quota}"
    if job.used is not None and job.others is not None:
        text += (f" (during the capture the job used {job.used:.2g} and all other programs used {job.others:.2g} of "
                 f"{job.allowed:.3g} CPUs)")
    return text


# Keras hands batches of Python's to the step through a tf.data.Dataset of one generator.
_PASSES_BATCHES_ON = re.compile(r"Prefetch|FlatMap|Generator|Repeat|Forever|Options|Model|Root|Finite|Take|Rebatch")


def keras_workers(fix: InputFix, pipeline: Pipeline | None, keras: int) -> InputFix:
    """The fix, or where a Python generator makes whole batches for Keras' fit (generation 2 or 3), the same for that:
    Keras makes batches ahead on workers, if it may."""
    stages = [stage.name for stage in pipeline.stages] if pipeline is not None else []
    if not any(name.startswith("Generator") for name in stages) or not all(map(_PASSES_BATCHES_ON.match, stages)):
        return fix
    what = "PyDataset" if keras == 3 else "Sequence"
    return replace(
        fix, action=f"Give the {what} workers: without workers, one Python thread prepares the batches one by one. A "
                    f"generator cannot have workers, so convert it to a {what} first. Threads help if Python waits for "
                    "storage, and processes (use_multiprocessing) help if it computes.",
        snippet=code("input_bound", f"keras{keras}-workers"), claim="at most",
        how="workers prepare the batches ahead of the steps")


# By what makes batches outside of tf.data (LOADERS of gputop.analysis.host.stack_lines): what to do, and its
# code's key.
_OF_LOADER = {
    "grain": (
        "Give grain's loader workers, which prepare batches ahead of time (worker_count). Currently, the loop prepares "
        "each batch itself.",
        "grain"),
    "keras": ("Give the PyDataset workers, which prepare batches ahead of time: threads help if Python waits for "
              "storage, and processes (use_multiprocessing) if it computes. Convert a generator to a PyDataset first.",
               "keras3-workers"),
    "torch": ("Give the DataLoader worker processes, which load batches while the model runs.", "torch"),
    "datasets": ("Run the dataset's transform ahead of time: in DataLoader workers, or once for all data with map.",
                 "datasets"),
}
CHEAPER = "Make samples cheaper (decode, tokenize, and resize once, and store the result), or give the job more CPUs."
_AHEAD = ("Prepare the next batch while the step runs: in loader workers, or in a thread that fills a queue.", "ahead")


WORKERS_OR_SELDOM = (
    "Give the DataLoader worker processes that prepare batches ahead of time. If it already has workers, move logging, "
    "metrics, gc.collect(), and saving out of the loop, or do this work every hundred steps.")
ODD_BATCH = ("Look for work that only some batches need (opening a file, filling a shuffle buffer), and prefetch "
             "enough batches to cover that time.")
KEEP_WORKERS = ("Create the DataLoader once and keep its workers between passes over the data "
                "(persistent_workers=True), or make each pass longer.")
FIRST_WORKERS = ("For few batches, load them in the loop's own process (num_workers=0). For several passes over the "
                 "data, create the DataLoader once and keep its workers (persistent_workers=True).")


def fix_of_loader(loader: str, one_cpu: bool = False) -> tuple[str, str | None]:
    """Action and code for batches that this loader makes in the loop's own thread, or code of the user's own;
    ``one_cpu``: of a job that may use no other."""
    if one_cpu:
        return f"{CHEAPER} Workers would only take turns with the model on the same CPU.", None
    action, key = _OF_LOADER.get(loader, _AHEAD)
    return action, code("input_bound", key)


def suggest_fix_by_name(stage: str | None, prefetches: bool = False) -> InputFix:
    """General fix where the trace shows at most the slowest stage's name.

    ``prefetches``: the pipeline has a prefetch already.
    """
    action, key = next(((action, key) for pattern, action, key in _BY_NAME
                        if stage is not None and pattern.match(stage)),
                       (_LESS_WORK, "parallel") if prefetches else (_OVERLAP, "prefetch"))
    snippet = _code(key) or ""
    if prefetches:
        action, snippet = action.replace(" and prefetch", ""), snippet.removesuffix(f"\n{_code('prefetch')}")
    return InputFix(action, snippet, claim="at most")  # how long a batch takes to make is not known


def _cost(stage: Stage, cpus: float | None) -> float:
    """Seconds per batch; of a function that was given more workers than there are CPUs, on the CPUs there are."""
    cost = stage.cost_s_per_batch or 0.0
    return cost * stage.workers / cpus if cpus and stage.function_s is not None and stage.workers > cpus else cost


def _above(stages: Mapping[str, Stage], stage: Stage) -> list[Stage]:
    above = [stage]
    while (consumer := stages.get(above[-1].parent or "")) is not None:
        above.append(consumer)
    return above[1:]
