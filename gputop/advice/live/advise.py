"""The live advice: all live rules over the history of the node. Pure: no clock, no hardware."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from msgspec import structs
from msgspec.structs import replace

from gputop.advice.live.node_view import NodeView, gpus_text
from gputop.advice.live.user_rules import HeldConditions, user_live_outcomes
from gputop.advice.live_rules import LIVE_RULES
from gputop.advice.registry import limit
from gputop.advice.rule import Rule
from gputop.advice.verdict import Missing, finding
from gputop.core.findings import Abstained, Advice, Finding, collect
from gputop.core.samples import OK, GpuSample, NodeSample
from gputop.ranks.model import RasReport
from gputop.telemetry.history import History
from gputop.text.units import percent

# By the name under ``needs`` of a record: what is missing of an input, None where nothing is.
MISSING: Mapping[str, Callable[[NodeView], Missing | None]] = {
    "processes": lambda view: None if view.processes else view.no_process(),
}


def live_advice(history: History, sample: NodeSample, previous: tuple[Finding, ...] = (),
                ranks: RasReport | None = None, held: HeldConditions | None = None,
                unprotected: tuple[int, ...] | None = None, profiled: Mapping[int, float] | None = None) -> Advice:
    """Judge the last minutes. ``sample`` is the newest in ``history``; ``previous`` are the findings shown until now,
    which stay until their signal is clearly gone. ``ranks``, ``unprotected`` and ``profiled``: see :class:`NodeView`.
    ``held`` is what the user's own rules keep from one sample to the next."""
    view = NodeView(history, sample, previous, ranks, unprotected, profiled)
    outcomes: list[Finding | Abstained | None] = []
    for rule in LIVE_RULES:
        outcome = _outcome(rule, view)
        if isinstance(outcome, Finding):
            view.note(outcome)
        outcomes.append(outcome)
    outcomes += user_live_outcomes(view, {} if held is None else held)
    return replace(collect(outcomes), limit=live_limit(view) or "")


def _outcome(rule: Rule, view: NodeView) -> Finding | Abstained | None:
    verdict = next((missing for need in rule.needs if (missing := MISSING[need](view)) is not None), None)
    if verdict is None:
        verdict = rule.function("judge")(view)
    if verdict is None:
        return None
    if isinstance(verdict, Missing):
        return Abstained(rule.id, verdict.what)
    verdict = structs.replace(verdict, framework=verdict.framework or view.framework(verdict.gpus))
    return finding(rule, verdict, rule.function("describe")(verdict))


# -- the limit of a job without findings --------------------------------------------------------------

# Time is lost, or how the GPUs work is not known.
_HIDE_LIMIT = tuple(rule.id for rule in LIVE_RULES if rule.hides_limit)
_COSTS_TIME = tuple(rule.id for rule in LIVE_RULES if rule.costs_time)
_CLOCK = "sm_clock_hz"
_SLICES = 3  # before and after, at least: a pause that is shorter is ordinary


def live_limit(view: NodeView) -> str | None:
    """Text in the place of findings, since silence would look like a fault: "No problem found so far. GPUs 0-7 are
    compute bound (SM 92%, tensor 61%, …)."; or, without the evidence for that, why it is not known.

    None on a node without GPUs, and where a rule that ran before on this view found time lost.
    """
    if view.found(*_HIDE_LIMIT) or not view.sample.gpus:
        return None
    nothing = f"No {'other ' * view.found(*_COSTS_TIME)}problem found so far."
    return (_ended(view) or _fallen(view) or _not_judged(view)
            or " ".join(filter(None, (nothing, _what_bounds(view), _divided(view)))))


def _ended(view: NodeView) -> str | None:
    """Time since the last process left the GPUs of the node, where it was seen to leave; None where none did, or long
    ago."""
    since_s = [view.history.held_since(gpu.info.uuid, None) for gpu in view.whole_gpus]
    empty_s, oldest_s = [s for s in since_s if s is not None], view.history.oldest_s
    if not empty_s or len(empty_s) < len(view.sample.gpus) or oldest_s is None or max(empty_s) <= oldest_s:
        return None
    ago_s = view.sample.time_s - max(empty_s)
    if ago_s > view.seconds("spinning.window_s") or any(
            (gpu.activity()[1].value or 0.0) > limit("unused_gpu.leave") for gpu in view.whole_gpus):
        return None  # somebody may work there unseen
    gpus = [gpu for gpu, s in zip(view.whole_gpus, empty_s, strict=True) if s > oldest_s]
    return f"The last process on {gpus_text(gpus)} ended {ago_s:.0f} s ago."


def _divided(view: NodeView) -> str:
    """GPUs that a verdict on the node leaves out, as they are divided."""
    divided = {gpu.info.index for gpu in view.sample.gpus} - {gpu.info.index for gpu in view.whole_gpus}
    return f"gputop does not judge the MIG instances of {gpus_text(divided)}." if divided else ""


def _not_judged(view: NodeView) -> str | None:
    """Reason why the absence of findings shows nothing: a GPU or its activity that cannot be read, or too few
    samples. None where there is evidence."""
    window_s = view.seconds("window_s")
    for gpu in view.sample.gpus:
        if gpu.state != OK or not gpu.readings:
            who = f"{gpus_text([gpu])}: " if gpu.state == OK else ""  # other states' messages name it
            return f"Not checked: {who}{gpu.message.rstrip('.') or 'no values'}."
    if not view.whole_gpus:
        return "Not checked: gputop cannot evaluate jobs on MIG instances from live samples."
    times = view.window("gpu_util", window_s).times
    seen_s = view.sample.time_s - times[0] if times else 0.0
    if seen_s < limit("coverage") * window_s:
        longest_s = limit("idle_gpu.age_s") + limit("slow_rank.window_s")
        return (f"No findings yet: gputop has {seen_s:.0f} s of samples, and the rules need {window_s:.0f} s to "
                f"{longest_s / 60:.0f} min.")
    unseen = [gpu for gpu in view.whole_gpus if view.activity(gpu, window_s) is None]
    if unseen:
        reason = unseen[0]["gpu_util"].reason or f"too few values in {window_s:.0f} s"
        return f"Not checked: the activity of {gpus_text(unseen)} is unknown ({reason})."
    if len(unused := view.without_process(window_s)[0]) == len(view.whole_gpus):
        return f"{gpus_text(unused)} idle for {window_s:.0f} s, and no process is listed there."
    if not view.warmed_up_gpus and not view.processes:
        return f"No compute process is listed on {gpus_text(view.whole_gpus)}."
    if not view.warmed_up_gpus:
        return f"No findings yet: gputop has seen the job for less than {limit('idle_gpu.age_s'):.0f} s."
    return None


# What is told of the GPUs at work, each with the metric and with that of its full value; empty: it is a share itself.
_FIGURES = (("SM {}", "sm_active", ""), ("tensor {}", "tensor_active", ""), ("DRAM {}", "dram_active", ""),
            ("power {} of the limit", "power_w", "power_limit_w"),
            ("SM clock {} of the maximum", _CLOCK, "sm_clock_max_hz"))


def _what_bounds(view: NodeView) -> str:
    """ "GPUs 0-7 are compute bound (SM 92%, …)."; what is true of each of these GPUs."""
    window_s, figures = view.seconds("window_s"), list[str]()
    gpus = [gpu for gpu in view.warmed_up_gpus
            if (activity := view.activity(gpu, window_s)) and activity[1] >= limit("unused_gpu.peer_busy")]
    if not gpus:
        return "No GPU is busy."
    for words, metric, full in _FIGURES:
        shares = [share for gpu in gpus if (share := view.share(gpu, metric, window_s, full)) is not None]
        if shares and (metric != _CLOCK or min(shares) <= limit("clocks_limited.set_enter")):
            figures.append(words.format(_span(shares)))
    return f"{gpus_text(gpus)} {'is' if len(gpus) == 1 else 'are'} {_bound(view, gpus)} ({', '.join(figures)})."


def _fallen(view: NodeView) -> str | None:
    """ "SM activity of GPUs 0-7 fell from 91% to 16% 45 s ago. …": what the figures of the last half minute are means
    over, where the job has stopped or works much less. None where it has not."""
    gpus, window_s = view.warmed_up_gpus, view.seconds("spinning.window_s")
    slices = [sum(means) / len(means) for means in view.slice_means(gpus, "sm_active", window_s)] if gpus else []
    if len(slices) <= _SLICES:
        return None
    now, least = sum(slices[-_SLICES:]) / _SLICES, limit("live_limit.fell")
    last = max((i for i, level in enumerate(slices) if level - now >= least), default=-1)  # before it fell
    if last + 1 < _SLICES or last + 1 > len(slices) - _SLICES:
        return None
    before = sum(slices[:last + 1]) / (last + 1)
    if before - now < least or now > before / 2:
        return None
    slice_s = window_s / view.slices(window_s)
    return (f"SM activity of {gpus_text(gpus)} fell from {percent(before)} to {percent(now)} "
            f"{(len(slices) - last - 1) * slice_s:.0f} s ago. This may be an evaluation or a checkpoint. After "
            f"{window_s:.0f} s, gputop checks for a hang.")


def _bound(view: NodeView, gpus: list[GpuSample]) -> str:
    def mean(metric: str) -> float:
        means = [mean for gpu in gpus if (mean := view.mean(gpu, metric, view.seconds("window_s"))) is not None]
        return sum(means) / len(means) if means else math.nan

    bounds = {"dram_bound": "limited by memory bandwidth", "power_capped": "slowed down by the power limit"}
    for rule, bound in bounds.items():
        if {gpu.info.index for gpu in gpus} <= view.gpus_explained_by(rule):
            return bound
    if mean("sm_active") < limit("live_limit.work"):
        return "partly busy and not at any limit"
    return "compute bound" if mean("tensor_active") >= limit("live_limit.tensor") else "busy"


def _span(values: Sequence[float]) -> str:
    """The mean, or lowest and highest where they differ."""
    least, most = min(values), max(values)
    return f"{100 * least:.0f}-{percent(most)}" if most - least > 0.1 else percent(sum(values) / len(values))
