"""The limit of a job without findings, from live figures: silence would look like a fault."""

from __future__ import annotations

from collections.abc import Iterable

from gputop.advice.live.node_view import NodeView, gpus_text
from gputop.advice.live_rules import LIVE_RULES
from gputop.advice.registry import limit
from gputop.core.samples import GpuSample
from gputop.text.units import percent

# Time is lost, or how the GPUs work is not known.
_HIDE_LIMIT = tuple(rule.id for rule in LIVE_RULES if rule.hides_limit)
_SLICES = 3  # before and after, at least: a pause that is shorter is ordinary


def live_limit(view: NodeView) -> str | None:
    """ "GPUs 0-7 are compute bound (SM 92%, tensor 61%, 540 of 700 W).".

    None where no GPU works or its SM activity is not known, and where a rule that ran before on
    this view found time lost.
    """
    if view.found(*_HIDE_LIMIT):
        return None
    if (fallen := _fallen(view)) is not None:
        return fallen
    window_s = view.seconds("window_s")
    sm = {g.info.index: (g, mean) for g in view.warmed_up_gpus
          if (mean := view.mean(g, "sm_active", window_s)) is not None and mean >= limit("unused_gpu.peer_busy")}
    if not sm:
        return None
    gpus = [g for g, _ in sm.values()]
    tensor, dram = (_means(view, gpus, metric, window_s) for metric in ("tensor_active", "dram_active"))
    figures = [f"SM {_span(mean for _, mean in sm.values())}"]
    figures += [f"{name} {_span(values)}" for values, name in ((tensor, "tensor"), (dram, "DRAM")) if values]
    figures += _power(view, gpus, window_s)
    bound = _bound(view, [mean for _, mean in sm.values()], tensor)
    return f"{gpus_text(gpus)} {'is' if len(gpus) == 1 else 'are'} {bound} ({', '.join(figures)})."


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
            f"{(len(slices) - last - 1) * slice_s:.0f} s ago. An evaluation or a checkpoint ends by itself; after "
            f"{window_s:.0f} s gputop looks for a hang.")


def _bound(view: NodeView, sm: list[float], tensor: list[float]) -> str:
    if view.found("dram_bound"):
        return "limited by memory bandwidth"
    if view.found("power_capped"):
        return "limited by the power limit"
    if sum(sm) / len(sm) < limit("live_limit.work"):
        return "partly busy, at no limit"
    if tensor and sum(tensor) / len(tensor) >= limit("live_limit.tensor"):
        return "compute bound"
    return "busy"


def _means(view: NodeView, gpus: Iterable[GpuSample], metric: str, window_s: float) -> list[float]:
    return [mean for g in gpus if (mean := view.mean(g, metric, window_s)) is not None]


def _span(values: Iterable[float]) -> str:
    """The mean, or lowest and highest where they differ."""
    ordered = sorted(values)
    if ordered[-1] - ordered[0] > 0.1:
        return f"{100 * ordered[0]:.0f}-{percent(ordered[-1])}"
    return percent(sum(ordered) / len(ordered))


def _power(view: NodeView, gpus: list[GpuSample], window_s: float) -> list[str]:
    pairs = [(mean, allowed) for g in gpus if (mean := view.mean(g, "power_w", window_s)) is not None
             and (allowed := g["power_limit_w"].value)]
    if not pairs:
        return []
    return [f"{sum(p for p, _ in pairs) / len(pairs):.0f} of {sum(a for _, a in pairs) / len(pairs):.0f} W"]
