"""Steps that take far longer than the others: every so many steps, or now and then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import structs
from msgspec.structs import replace

from gputop.advice.fix_code import code
from gputop.advice.registry import limit, source
from gputop.advice.trace.facts import NO_GPU, TraceFacts, new_workers, on_host, waits_for_input
from gputop.advice.trace.input_fixes import KEEP_WORKERS, NEVER_EMPTY, ODD_BATCH, WORKERS_OR_SELDOM
from gputop.advice.trace.input_pace import input_fix
from gputop.advice.trace.job import Job
from gputop.advice.trace.known_work import NEW_WORKERS, SELDOM_WORK, WORK, KnownWork, UserFunction, known_work
from gputop.advice.trace.other_programs import may_be_others, others_take
from gputop.advice.verdict import ONCE, Explanation, Missing, Verdict, known
from gputop.analysis.gpu.breakdown import breakdown_by_step
from gputop.analysis.gpu.device_time import any_busy
from gputop.analysis.host.gaps import ranked_work, work_in
from gputop.analysis.host.stack_lines import gap_lines, process_lines, python_of
from gputop.analysis.host.work_kinds import EVALUATES, MANY_VARIABLES, READ_VARIABLE
from gputop.analysis.results import GapWork, StackLine
from gputop.analysis.steps.compilations import CUDNN, TRITON, trials
from gputop.analysis.steps.long_steps import MIN_STEPS, long_steps
from gputop.analysis.steps.membership import step_of
from gputop.analysis.steps.optimizer_calls import steps_per_update
from gputop.analysis.steps.pytorch_ops import workers_started
from gputop.analysis.steps.training_loops import training_loops
from gputop.core.findings import HIGH_SHARE, Culprit
from gputop.text.units import count, percent, seconds
from gputop.trace.graph_captures import recordings
from gputop.trace.intervals import EMPTY, Spans, contains, coverage, intersect, merge, overlap, subtract, union
from gputop.trace.lookups import how_to_mark_steps
from gputop.trace.model import F64, I64, Kind
from gputop.trace.threads import EXECUTOR, MAIN, lines_of

_RECORD_BEFORE = ("If these are the job's first steps, this is startup. Otherwise, record the graphs of all shapes "
                  "before the loop, and pad batches to these shapes.")
_WORTH_NAMING = 0.01  # share of the longest work
_OWN = 0.75  # share of a line's time in gaps: it is no line of the step
_EQUAL_LENGTH_FACTOR = 2.0  # extra times within this factor are told as their mean, others as a range
_NO_TIME_SLICE_S = 0.3  # on full CPUs a thread was seen to wait for 0.13 s at most
_SHOWN, _NAME_CHARS = 4, 48  # steps that are listed, and how much of a name is shown
# What is long by the part of the step, where no name says more: what it is, and what to do.
_PARTS = {
    "input": ("waiting for a batch", ODD_BATCH),
    "compute": ("longer kernels", "Keep the same shapes in all batches: pad longer examples or bucket them by length."),
    "collectives": ("collectives", "Find out which GPU is late in these steps, and what it does beforehand."),
    "h2d": ("copies to the GPU", "Look at what these steps copy, and copy this data earlier."),
    "d2h": ("copies back to the host", "Read results back less often."),
    "host": ("Python without events", "Look at what the loop does only in some steps (callbacks, logging, saving, "
                                      "garbage collection), and do this work less often or in the background."),
}
_IN_ROUNDS = ("Batches of a DataLoader with {} workers come in such rounds, and Nsight does not record the wait for "
              "batches: if the loader has this many workers, add workers or make samples cheaper.")
_EVALUATION = ("an evaluation", "Evaluate less often or on less data, if the results allow it. A job's first "
               "evaluation also compiles its function.", None)
_BY_CHANCE = "a second such step, because a thread may have to wait that long for a CPU once"
_HOST = ("host", "launch", "idle")
_PARTS["launch"] = _PARTS["idle"] = _PARTS["host"]


class LongStepsFound(Verdict, frozen=True, kw_only=True):
    steps: Sequence[int]  # their numbers, from 1 on, among the whole steps of the window
    of: int  # whole steps of the window
    every: int | None  # the distance from one to the next, where it is always the same
    more_s: float  # than the usual step, mean of the long ones
    range_s: tuple[float, float]  # of the same, the least and the most
    longest: int  # number of the longest
    usual_s: float
    parts: Mapping[str, float]  # seconds more by part of the step, mean of the long ones
    work: Sequence[GapWork]  # what the host did more, per long step
    kernel: str | None  # whose time grew most
    lines: Sequence[StackLine] = ()  # of Python, per long step
    new_workers: bool = False  # PyTorch's DataLoader starts its workers anew in most of the extra time
    graphs: bool = False  # CUDA graphs are recorded in most of the extra time
    loader_unseen: bool = False  # Nsight records no wait of PyTorch's for a batch
    evaluates: bool = False  # in most of the time outside of calls, by Python's functions


def judge_long_steps(facts: TraceFacts) -> LongStepsFound | StepsGrow | Missing | None:
    """A few steps are far longer than the others. What they have more of names the cause. Or each does more than the
    one before."""
    steps = facts.steps
    if (growing := growing_steps(facts)) is not None:
        return growing
    if steps is None or steps.count < MIN_STEPS:
        return Missing(f"{MIN_STEPS} complete steps to distinguish long steps from the usual variation; capture a "
                       "longer trace")
    if facts.basis == "period":
        return Missing("to know which of the repeated op sequences are steps, because the layers of one pass differ in "
                       f"length. Mark steps with {how_to_mark_steps(facts.trace)}")
    edges = steps.edges_ns
    length = (edges[:, 1] - edges[:, 0]) / 1e9
    by_part = breakdown_by_step(facts.trace, facts.parts, steps.bounds_ns)
    if facts.gpu_timelines:
        long = long_steps(length)
    elif steps.call_ends_ns:  # calls of functions are the CPU's own computing, which varies
        called = np.minimum(steps.call_ends_ns, edges[:, 1])
        waits = merge(EMPTY, *(loop.waits for loop in training_loops(facts.trace)))
        by_part["host"] = (edges[:, 1] - called - coverage(waits, called, edges[:, 1])) / 1e9
        long = long_steps(length, by_part["host"] + by_part["input"])
    else:
        return None
    if long is None:
        return None
    share = float(long.more_s.sum() / length.sum())
    if share < limit("long_steps.share"):
        return None
    tried, in_long = trials(facts.trace), union(edges[long.indices, 0], edges[long.indices, 1])
    most_ns = limit("long_steps.named") * long.more_s.sum() * 1e9
    if overlap(merge(tried[CUDNN], tried[TRITON]), in_long) >= most_ns:
        return Missing("steps that are long for another reason than trials of kernels")
    if long.every is not None and long.every == steps_per_update(facts.trace, steps):
        return Missing(f"complete updates as steps; the optimizer runs only in one of {long.every} steps, which takes "
                       "longer as a result")
    usual = np.delete(np.arange(steps.count), long.indices)
    parts = {part: float(times[long.indices].mean() - np.median(times[usual])) for part, times in by_part.items()}
    parts = {part: time for part, time in parts.items() if time > 0}
    work = _host_work(facts, long.indices, usual)
    named = [item for item in work if item.s_per_step >= _WORTH_NAMING * work[0].s_per_step]
    most = max(parts, key=parts.__getitem__, default="host")
    lines = _lines(facts, long.indices, usual)
    verdict = LongStepsFound(
        gpus=facts.active_numbers, share=share, steps=tuple((long.indices + 1).tolist()), of=steps.count,
        # A single long step may be an accident, and how often it comes is unknown.
        claim=facts.on_cpus("about") if len(long.indices) > 1 else None,
        severity=None if len(long.indices) > 1 else "medium" if share >= HIGH_SHARE else "low",
        every=long.every, more_s=float(long.more_s.mean()),
        range_s=(float(long.more_s.min()), float(long.more_s.max())),
        longest=int(long.indices[np.argmax(long.more_s)]) + 1, usual_s=long.usual_s, parts=parts, of_parts=parts,
        spans=_spans(facts, long.indices, most), work=work,
        culprits=on_host(facts, named, _outside_work(facts, long.indices), "long step"),
        kernel=_kernel(facts, long.indices, usual), lines=lines[0],
        new_workers=overlap(new_workers(facts), in_long) >= most_ns,
        graphs=overlap(recordings(facts.trace)[0], in_long) >= most_ns,
        loader_unseen=facts.trace.format == "nsys" and not training_loops(facts.trace),
        evaluates=_evaluates(facts, long.indices))
    if most == "input" and input_fix(facts, parts[most]).never_empty:
        return Missing(NEVER_EMPTY)
    started = workers_started(facts.trace)[0]
    if most == "input" and len(started.start) == 1 and contains(
            union(started.end, started.end + started.total), edges[long.indices, 0]).all():
        return Missing("batches of a full queue; the long steps follow right after the start of DataLoader workers")
    if long.every is None and (most == "input" or (most in _HOST and _known_work(verdict) is None)):
        shown_s = sum(item.s_per_step for item in work)
        silent = most != "input" and shown_s < limit("long_steps.named") * verdict.more_s
        stacks = facts.analysis.stacks
        traced = stacks is not None and stacks.source.startswith("tracer")  # a call of Python's would have an event
        others = may_be_others(facts, share, silent=silent) or (
            traced and silent and len(long.indices) == 1 and verdict.more_s < _NO_TIME_SLICE_S and _BY_CHANCE)
        if others and not _line_of_their_own(verdict, *lines):
            return Missing(others)
    return verdict


def _lines(facts: TraceFacts, *several: I64) -> list[tuple[StackLine, ...]]:
    """Lines of Python outside of calls in each of these sets of steps, seconds per step."""
    spans = [_outside_work(facts, chosen) for chosen in several]
    processes = process_lines(python_of(facts.trace), facts.analyzed_spans, [merge(EMPTY, *spans)])
    return [gap_lines("gap", [gaps], gaps.total / 1e9 / len(chosen), processes).lines
            for gaps, chosen in zip(spans, several, strict=True)]


def _evaluates(facts: TraceFacts, indices: I64) -> bool:
    spans = _outside_work(facts, indices)
    return any(process.runs(EVALUATES, spans) for process in process_lines(
        python_of(facts.trace), facts.analyzed_spans, [spans]))


def _line_of_their_own(verdict: LongStepsFound, of_long: Sequence[StackLine], of_usual: Sequence[StackLine]) -> bool:
    """Return whether one line of Python takes most of these steps' time outside of calls, and little of the others'. A
    thread without a CPU stops at any line; where the other steps' lines are not known, it does so for less time."""
    if not of_long or (not of_usual and verdict.range_s[0] < _NO_TIME_SLICE_S):
        return False
    elsewhere = next((line.share for line in of_usual if line.line == of_long[0].line), 0.0)
    return of_long[0].share >= limit("long_steps.named") and elsewhere < of_long[0].share / 2


def _host_work(facts: TraceFacts, indices: I64, usual: I64) -> tuple[GapWork, ...]:
    """Extra work of the host per long step, compared with the others, while no GPU is busy; without GPUs between
    calls."""
    lines = lines_of(facts.trace, MAIN, EXECUTOR)
    in_long_steps, elsewhere = (work_in(facts.trace, _outside_work(facts, i), lines)[0] for i in (indices, usual))
    ratio = len(indices) / len(usual)
    more = {name: (round(time - ratio * elsewhere.get(name, (0, 0))[0]),
                   max(round(count - ratio * elsewhere.get(name, (0, 0))[1]), 1))
            for name, (time, count) in in_long_steps.items()}
    return ranked_work({name: work for name, work in more.items() if work[0] > 0}, len(indices))


def _spans(facts: TraceFacts, indices: I64, part: str) -> dict[int, Spans]:
    """The time of these steps in this part along each GPU; without one along the job."""
    assert facts.steps is not None
    long = union(facts.steps.edges_ns[indices, 0], facts.steps.edges_ns[indices, 1])
    if not facts.gpu_timelines:
        waits = waits_for_input(facts)
        return {NO_GPU: intersect(waits, long) if part == "input" else subtract(_outside_work(facts, indices), waits)}
    return {gpu: intersect(parts[part], long) for gpu, parts in facts.parts.items()}


def _outside_work(facts: TraceFacts, indices: I64) -> Spans:
    """The time of these steps in which no GPU is busy; without GPUs that between calls."""
    assert facts.steps is not None
    edges = facts.steps.edges_ns
    busy = (any_busy(facts.trace, facts.gpu_timelines) if facts.gpu_timelines else
            union(edges[:, 0], facts.steps.call_ends_ns))
    return subtract(union(edges[indices, 0], edges[indices, 1]), busy)


def _kernel(facts: TraceFacts, indices: I64, usual: I64) -> str | None:
    """The kernel whose time per step is longer by most in these steps."""
    assert facts.steps is not None
    device = facts.trace.device
    rows = np.flatnonzero((device.kind <= Kind.COLLECTIVE) & (device.name >= 0))
    if not len(rows):
        return None
    step = step_of(device.start_ns[rows], facts.steps)
    rows, step = rows[step >= 0], step[step >= 0]
    length = (device.end_ns[rows] - device.start_ns[rows]).astype(np.float64)
    n = len(facts.trace.names)
    long = np.isin(step, indices)
    more = (np.bincount(device.name[rows[long]], weights=length[long], minlength=n) / len(indices)
            - np.bincount(device.name[rows[~long]], weights=length[~long], minlength=n) / len(usual))
    return facts.trace.names[int(more.argmax())] if more.max(initial=0.0) > 0 else None


def describe_long_steps(v: LongStepsFound | StepsGrow, job: Job) -> Explanation:
    if isinstance(v, StepsGrow):
        return describe_growing_steps(v, job)
    part = max(v.parts, key=lambda name: v.parts[name], default="host")
    what, action, snippet = _cause(v, part, job)
    which = (f"Every {_ordinal(v.every)} step takes" if v.every else f"Step {v.steps[0]} of {v.of} takes"
             if len(v.steps) == 1 else f"{len(v.steps)} of {v.of} steps take")
    listed = ", ".join(map(str, v.steps[:_SHOWN])) + (", …" if len(v.steps) > _SHOWN else "")
    steps, take = ("Step", "takes") if len(v.steps) == 1 else ("Steps", "take")
    alike = v.range_s[1] <= _EQUAL_LENGTH_FACTOR * v.range_s[0]
    more = seconds(v.more_s) if alike else f"{seconds(v.range_s[0])} to {seconds(v.range_s[1])}"
    why = (f"{steps} {listed} of {v.of} {take} {more} longer than the typical {seconds(v.usual_s)}, due to {what}. "
           f"{'On average' if alike else 'In total'}, the extra time is {percent(v.share)} of all step time.")
    if not alike:
        why += f" Step {v.longest} is the longest."
    if len(v.steps) == 1:
        why += " A longer capture shows whether such a step occurs again."
    evidence = known({
        "more_s": v.more_s, "usual_step_s": v.usual_s, "share_ratio": v.share, "long_steps": float(len(v.steps)),
        "longest_more_s": None if alike else v.range_s[1], "every_steps": float(v.every) if v.every else None,
        **{f"{name}_more_s": time for name, time in v.parts.items()}})
    return Explanation(
        title=f"{which} {more} longer{', once in this recording' if v.claim is None else ''}: {what}", why=why,
        evidence=evidence, action=action, snippet=snippet,
        gain=ONCE if v.claim is None else "assumes that these steps take as long as the others",
        source=source("long_steps.share"))


def _cause(v: LongStepsFound, part: str, job: Job) -> tuple[str, str, str | None]:
    """Content of the extra time of long steps, the action, and the code."""
    most = limit("long_steps.named") * v.more_s
    if part in _HOST and v.evaluates:
        return _EVALUATION
    recognized = _known_work(v)
    if v.new_workers and job.framework == "pytorch":
        return NEW_WORKERS, KEEP_WORKERS, code("input_bound", "torch")
    if v.graphs:
        return "recording of CUDA graphs", _RECORD_BEFORE, None
    if recognized is not None:
        kind, named = recognized
        return f"{kind.what} ({named[0].name})", kind.action, kind.code(job)
    read = next((work.count_per_step for work in v.work if work.name == READ_VARIABLE), 0.0)
    if part in _HOST and read >= MANY_VARIABLES:  # Keras saves in Python, which shows no event
        what = f"Python that reads {read:.0f} variables, as when saving a checkpoint"
        return what, WORK[0].action, WORK[0].code(job)
    what, action = _PARTS[part]
    if part in _HOST and v.loader_unseen and job.framework == "pytorch":
        what = f"{what}, or the wait for a batch"
        action = f"{_IN_ROUNDS.format(v.every)} {action}" if v.every else WORKERS_OR_SELDOM
    if part in ("compute", "collectives") and v.kernel is not None:
        what = f"{what} ({v.kernel.split('(', 1)[0][:_NAME_CHARS]})"
    elif part in _HOST and sum(work.s_per_step for work in v.work) >= most:
        what = f"the host ({', '.join(work.name.rsplit('/', 1)[-1][:_NAME_CHARS] for work in v.work[:2])})"
    return what, action, code("long_steps", job.framework) if part == "compute" else None


def less_often(words: Explanation, function: UserFunction) -> Explanation:
    """The words with what takes most of the extra time without an event: a function, or a line of the loop's own."""
    unnamed = _PARTS["host"][0]
    if not words.title.endswith(unnamed) or (function.holds_loop and function.in_gaps < _OWN):
        return words
    culprit = function.location if function.holds_loop else f"{function.name} ({function.location})"
    words = structs.replace(words, title=words.title.replace(unnamed, culprit), why=words.why.replace(unnamed, culprit))
    if function.holds_loop:
        return structs.replace(words, action=words.action.replace("what the loop does only in some steps", culprit))
    return structs.replace(
        words, snippet=code("long_steps", "seldom", FUNCTION=function.name, WHERE=function.location),
        action=f"Run {culprit} less often, or in the background. If {culprit} is cheap, Python garbage collection may "
               "run there: call gc.freeze() once the job has started.")


def _known_work(v: LongStepsFound) -> tuple[KnownWork, list[GapWork]] | None:
    """The kind of work that fills most of the extra time."""
    return known_work((*WORK, *SELDOM_WORK), v.work, limit("long_steps.named") * v.more_s, v.lines)


def _ordinal(n: int) -> str:
    ending = "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{ending}"


# A number that rises by a constant rises with nearly every step, and a line through it explains nearly all of it: of 45
# recordings of jobs that do not grow none had either. Times vary, so they have to rise by more. gputop's own figures.
_RISES, _ON_A_LINE, _TIMES_ON_A_LINE, _IN_ORDER = 0.9, 0.95, 0.8, 0.9
_LONGER, _MIN_TIMES = 1.3, 12
# Steps that are enough where each makes exactly as many calls more, which are this share of them.
_LEAST_STEPS, _LITTLE = 3, 0.02
_STEPS_SHOWN = 3
_FIX = {
    "pytorch": ("Detach whatever is carried from step to step: a hidden state, a sum of losses, a list of outputs. "
                "Otherwise, its graph keeps all earlier steps, and each backward pass goes through these steps again."),
    "tensorflow": "Create functions, variables, and ops once, before the loop, because anything created in a step "
                  "stays in memory.",
    "": "Look for data that grows: a list that each step iterates over, a history, a cache without a limit.",
}


class StepsGrow(Verdict, frozen=True, kw_only=True):
    steps: int
    first_s: float  # by a line through the steps' times
    last_s: float
    calls: float  # of the host, all names, mean
    more_calls: float  # by which each step has more than the one before; 0: only the times grow


def growing_steps(facts: TraceFacts) -> StepsGrow | None:
    """The steps grow: in each the host makes more calls than in the one before, by a constant number, or each takes
    longer."""
    steps, host = facts.steps, facts.trace.host
    if steps is None or facts.basis == "period" or steps.count < _LEAST_STEPS:
        return None
    edges = steps.edges_ns
    first, last = np.searchsorted(host.start_ns, edges[:, 0]), np.searchsorted(host.start_ns, edges[:, 1])
    length, calls = (edges[:, 1] - edges[:, 0]) / 1e9, (last - first).astype(float)
    slope, begin = np.polyfit(np.arange(steps.count), length, 1)
    growth = StepsGrow(
        gpus=facts.active_numbers, steps=steps.count, first_s=max(float(begin), 0.0),
        last_s=float(begin + slope * (steps.count - 1)), calls=float(calls.mean()), more_calls=0.0)
    # Few numbers are in order by chance, and equally far apart where lengths are sorted; then they rise fast.
    more = np.diff(calls)
    if _rises(calls) and (steps.count >= MIN_STEPS or (not np.ptp(more) and more[0] <= _LITTLE * growth.calls)):
        share, culprits = _of_growing_kinds(facts, first, last)
        # Of these kinds the calls that a step adds are its own, and the others are of steps before.
        share -= float(more.mean()) / growth.calls
        return None if share < limit("long_steps.share") else replace(
            growth, share=share, more_calls=float(more.mean()), culprits=culprits)
    order = np.argsort(np.argsort(length, kind="stable"))
    if (steps.count < _MIN_TIMES or (facts.trace.job_cpus is not None and others_take(facts.trace.job_cpus))
            or growth.last_s < _LONGER * growth.first_s or _explained(length) < _TIMES_ON_A_LINE
            or np.corrcoef(np.arange(steps.count), order)[0, 1] < _IN_ORDER):
        return None
    return replace(growth, share=float(1 - growth.first_s / length.mean()))


def _of_growing_kinds(facts: TraceFacts, first: I64, last: I64) -> tuple[float, tuple[Culprit, ...]]:
    """The share of the steps' calls that are of kinds whose number rises, and those of these kinds that take most time.
    ``first`` and ``last`` are the rows of each step's first call and of the one after its last."""
    host, names, count = facts.trace.host, facts.trace.names, len(first)
    rows = np.concatenate([np.arange(*edges) for edges in zip(first.tolist(), last.tolist(), strict=True)])
    step = np.repeat(np.arange(count), last - first)
    often = np.flatnonzero(np.bincount(host.name[rows]) >= count)  # so that this needs no more room than the calls
    number = np.full(len(names), -1)
    number[often] = np.arange(len(often))
    kept = number[host.name[rows]] >= 0
    calls = np.bincount(number[host.name[rows[kept]]] * count + step[kept], minlength=len(often) * count)
    calls = calls.reshape(-1, count)
    rising = [row for row in np.flatnonzero(calls[:, -1] > calls[:, 0]).tolist() if _rises(calls[row].astype(float))]
    took = np.bincount(host.name[rows], host.end_ns[rows] - host.start_ns[rows]) / count / 1e9
    most = sorted(rising, key=lambda row: (-float(took[often[row]]), names[often[row]]))[:_STEPS_SHOWN]
    return float(calls[rising].sum()) / len(rows), tuple(
        Culprit(names[often[row]], "host", float(took[often[row]]), facts.basis) for row in most)


def _rises(numbers: F64) -> bool:
    """Return whether they rise by a constant, from one to the next."""
    more = np.diff(numbers)
    return len(more) > 0 and bool((more > 0).mean() >= _RISES) and _explained(numbers) >= _ON_A_LINE


def _explained(numbers: F64) -> float:
    """Share of their variance that a line explains."""
    return float(np.corrcoef(np.arange(len(numbers)), numbers)[0, 1] ** 2) if np.ptp(numbers) else 0.0


def describe_growing_steps(v: StepsGrow, job: Job) -> Explanation:
    action, snippet = _FIX.get(job.framework, _FIX[""]), code("long_steps", f"grows-{job.framework}")
    if v.more_calls:
        title = f"Each step makes {count(v.more_calls)} more calls than the previous one: something keeps growing"
        why = (f"The host makes {count(v.calls)} calls per {job.basis}, and this number grows by {count(v.more_calls)} "
               f"with each of the {v.steps} recorded steps. {percent(v.share)} of the calls repeat those of earlier "
               "steps. The job gets slower and slower, and needs more and more memory.")
        gain = "assumes that each step makes only its own calls, not those of earlier steps"
    else:
        title = f"Each step takes longer than the previous one: from {seconds(v.first_s)} to {seconds(v.last_s)}"
        why = (f"Within {v.steps} steps, the {job.basis} time grows from {seconds(v.first_s)} to {seconds(v.last_s)} "
               "while the number of host calls stays the same, so the data that each call processes grows.")
        action, snippet = _FIX[""], None
        action += " If batches are sorted by length, longer batches come last, and nothing is wrong."
        gain = "assumes that all steps take as long as the first recorded step"
    return Explanation(
        title=title, why=why, evidence=known({
            "calls_per_step": v.calls, "more_calls_per_step": v.more_calls or None, "share_ratio": v.share,
            **({} if v.more_calls else {"first_step_s": v.first_s, "last_step_s": v.last_s})}),
        action=action, snippet=snippet, gain=gain, source=source("long_steps.share"))
