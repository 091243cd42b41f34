"""Kinds of the host's work that are known by their events, and functions of the user's by their lines."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from msgspec import Struct

from gputop.advice.fix_code import code
from gputop.advice.trace.job import Job
from gputop.analysis.host.tf_data import PYTHON_OP
from gputop.analysis.host.work_kinds import PATTERN_OF_KIND
from gputop.analysis.results import GapWork, HostStacks, StackLine, WallPart
from gputop.core.findings import Culprit
from gputop.render.step_parts import HOST_KINDS
from gputop.text.units import percent, seconds


class KnownWork(Struct, frozen=True):
    """A kind of host work (of ``WORK_KINDS``), and what to do about it."""

    kind: str
    action: str

    @property
    def what(self) -> str:
        return HOST_KINDS[self.kind]

    def code(self, job: Job) -> str | None:
        serves = "serves-" if job.trains is False else ""
        return code("step_gap_host", *(f"{self.kind}-{serves}{key}" for key in job.keys))

    def fits(self, name: str) -> bool:
        return re.match(PATTERN_OF_KIND[self.kind], name) is not None


# The first that fills most of a gap is named.
WORK: tuple[KnownWork, ...] = (
    KnownWork("checkpoint", "Save less often, and in the background."),
    KnownWork("summary", "Write summaries every few hundred steps, not at each step."),
    KnownWork("iterator", "Create the iterator once: repeat the dataset instead of creating a new one in each epoch."),
    KnownWork("session", "Fetch these values in the call of session.run that trains, if they may be of its batch, or "
                         "fetch them every hundred steps."),
)
FIT_ONCE = KnownWork("datasets", "Call fit() once, with one repeated dataset, instead of once for each epoch or piece "
                                 "of data: each call creates and frees datasets and their iterators.")
# What also makes steps long, or runs between them.
SELDOM_WORK: tuple[KnownWork, ...] = (
    KnownWork("compilation", "Only a function's first call with given shapes and types compiles. If this recurs, call "
                             "functions with the same ones each time."),
    # TensorFlow 2.21 may free an iterator only when its autotuning thread wakes up, after 10 ms, 20 ms and so on: that
    # of an epoch of 2.65 s at 5.10 s, of 1.6 s at 2.54 s. So it was in 27 of 60 epochs, in none without autotuning.
    KnownWork("freeing", "Create one iterator for all epochs: repeat the dataset and set the steps per epoch. Freeing "
                         "an iterator may block on tf.data's autotuning thread for as long as the epoch took. To avoid "
                         "this wait, set options.autotune.enabled = False, prefetch and num_parallel_calls yourself."),
    FIT_ONCE,
    KnownWork("garbage", "Freeze long-lived objects and control when garbage is collected: call gc.freeze() and "
                         "gc.disable(), and gc.collect() every few hundred steps."),
    KnownWork("files", "Read and write files outside the loop, in the input pipeline, or in a thread."),
)
_MOSTLY, _HALF, _SOME = 0.8, 0.5, 0.2  # shares of a part: what fills it, names it; what its name has to leave out
NEW_WORKERS = "the DataLoader restarting its workers"
ENOUGH_CPUS = ("Give each process enough CPUs: compare the CPUs that it may use with its running threads, start fewer "
               "input workers or OpenMP threads, and stop other programs.")
NO_TRAINING = "nothing trains here, so a pause may be the wait for the next request"


def host_words(part: WallPart) -> str:
    """Words for the host's work: "saving checkpoints (train.py:88 save)", "train.py:11 Save.on_epoch_end"; "" where the
    part's name says it all."""
    if part.kind in ("line", "op") and part.what:
        small = part.named_s < _MOSTLY * part.time_s  # and others take the rest
        calls = re.match(PYTHON_OP, part.what) if part.kind == "op" else None
        what = f"Python in tf.{'py' if 'EagerPyFunc' in part.what else 'numpy'}_function" if calls else part.what
        return f"{percent(part.named_s / part.time_s)} in {what}" if small else what
    kind = HOST_KINDS.get(part.kind, part.kind)
    silent_s = part.silent_s or 0.0
    if part.kind == "input" and _SOME * part.time_s <= silent_s <= _HALF * part.time_s:
        return f"{percent(1 - silent_s / part.time_s)} {kind}"  # the rest shows no event: more than the wait
    return f"{kind} ({part.what})" if part.what else kind


class UserFunction(Struct, frozen=True):
    """A function of the user's, and its line that runs longest. ``holds_loop``: the steps themselves run in it, too.
    ``loader``: what calls it to make a batch (:class:`~gputop.analysis.results.StackLine`), "": nothing. ``time_s`` is
    what its calls take of each step in all, ``in_gaps`` the share of its line's time in the gaps of the steps."""

    name: str
    location: str
    holds_loop: bool
    loader: str = ""
    time_s: float = 0.0
    in_gaps: float = 0.0


def main_function(culprits: Sequence[Culprit], gap_s: float, stacks: HostStacks | None) -> UserFunction | None:
    """The function whose lines among these culprits ("metrics.py:112 confusion_matrix") take half of the gap or more;
    None without one, or where a library runs."""
    of_function: dict[tuple[str, str], list[Culprit]] = {}
    for line in culprits:
        function = function_of(line.name)
        if line.kind == "line" and function and "/" not in function[0]:  # a package is shown of a library alone
            of_function.setdefault(function, []).append(line)
    function, lines = max(of_function.items(), key=lambda item: _total_s(item[1]), default=(None, []))
    if function is None or _total_s(lines) < 0.5 * gap_s:
        return None
    longest = max(lines, key=lambda line: line.time_s or 0.0)
    gaps = stacks.gaps if stacks is not None else ()
    seen, loader = next(((gap.seen, line.loader) for gap in gaps for line in gap.lines if line.line == longest.name),
                        (1, ""))
    flame = stacks.flame if stacks is not None else ()
    calls = [node for node in flame if function_of(node.line) == function and (
        node.parent is None or function_of(flame[node.parent].line) != function)]
    # The steps run in it where it has most of what the loop does outside of the gaps.
    outside_s, inside_s = (sum(node.time_s - node.gap_s for node in nodes) for nodes in (
        (node for node in flame if node.parent is None), calls))
    of_line = [node for node in flame if node.line == longest.name]
    name = function[1] if ".on_" in function[1] else function[1].rpartition(".")[2]  # of a callback its class says more
    return UserFunction(name, longest.name.partition(" ")[0],
                        bool(seen) and inside_s >= 0.5 * outside_s > 0, loader, sum(node.time_s for node in calls),
                        sum(node.gap_s for node in of_line) / (sum(node.time_s for node in of_line) or math.inf))


def _total_s(lines: Iterable[Culprit]) -> float:
    return sum(line.time_s or 0.0 for line in lines)


def function_of(line: str) -> tuple[str, str] | None:
    """File and function of "loss.py:8 Logger.norms.<dictcomp>", without what has no name; None of a module's line."""
    location, _, qualified = line.partition(" ")
    names = qualified.split(".")
    while names and not names[-1].isidentifier():
        names.pop()
    return (location.rpartition(":")[0], ".".join(names)) if names else None


def known_work(kinds: Iterable[KnownWork], work: Sequence[GapWork], most: float, lines: Sequence[StackLine] = (),
               ) -> tuple[KnownWork, list[GapWork]] | None:
    """The first of these kinds that takes so many seconds, and its work: events, and lines that save a checkpoint."""
    saving = [GapWork(line.line, line.s_per_step, 1.0) for line in lines if line.saves]
    for kind in kinds:
        named = [*(saving if kind.kind == "checkpoint" else ()), *(item for item in work if kind.fits(item.name))]
        if named and sum(item.s_per_step for item in named) >= most:
            return kind, named
    return None


def named_work(work: Iterable[GapWork]) -> str:
    return ", ".join(f"{w.name} ({seconds(w.s_per_step)}"
                     + (f", {w.count_per_step:.0f}×)" if w.count_per_step >= 1.5 else ")") for w in list(work)[:3])
