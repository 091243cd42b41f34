"""Captures that gputop starts by itself when a GPU dips: the rule, the detector, the controller, the bounded folder.

The controller is called with each sample, and asks for a capture as a key press does. It knows of its host only what
:class:`CaptureHost` names, never the session. It never captures more often than it was allowed to, and removes only run
folders that it made.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct, field
from msgspec.structs import replace

from gputop.core.codec import parse
from gputop.core.errors import EXIT_USAGE, GputopError
from gputop.core.files import Folder, open_regular, replacing, untrusted_ancestor
from gputop.core.metrics import GPU_METRICS, RATIO, WATTS
from gputop.core.samples import NodeSample
from gputop.profiler.capture.records import CaptureRecord, CaptureStatus
from gputop.profiler.capture.request import CaptureQuestion, CaptureRequest
from gputop.rules.expression import Condition, condition
from gputop.rules.names import SECONDS
from gputop.rules.parser import Mistake
from gputop.rules.rule_file import quantity
from gputop.session.options import DEFAULT_RULE, AutoCaptureOptions, DipRule, Options
from gputop.text.units import percent
from gputop.trace.readers.capture_file import FILE as CAPTURE
from gputop.trace.readers.capture_file import OVERVIEW
from gputop.trace.readers.clock_file import FILE as CLOCKS
from gputop.trace.readers.stacks_file import FILE as STACKS

if TYPE_CHECKING:
    from gputop.telemetry.history import History

FOLDER = "black-box"  # below the logdir
SETTLE_S = 15.0  # after a capture: it slows the job itself, and the job has to catch up


def held_before(record: CaptureRecord, dip_s: float) -> tuple[str, ...]:
    """Note on the time between a dip, which began at ``dip_s`` (Unix time), and the first event of its trace. Nothing
    where the trace was not analyzed, or does not tell when it was recorded."""
    trace = record.analysis.trace if record.analysis is not None else None
    if trace is None or trace.start_s is None or trace.start_s < dip_s:
        return ()
    return (f"the trace contains nothing before the dip: it starts {trace.start_s - dip_s:.1f} s after the dip",)


class CaptureHost(Protocol):
    """Interface that the auto-capture needs of whoever captures for it."""

    options: Options

    @property
    def status(self) -> CaptureStatus | None: ...

    def start_capture(self, request: CaptureRequest) -> CaptureQuestion | None:
        """Start a capture in the background; raises GputopError where none can start."""


class AutoCapture:
    """Starts a capture when a GPU dips. ``note`` is the newest remark for the user, ``count`` the captures so far.

    ``missed`` counts the dips during a capture and just after it, which may be due to its own cost: none is captured.
    """

    def __init__(self, host: CaptureHost, options: AutoCaptureOptions) -> None:
        self.options = options
        self.note = ""
        self.count = self.missed = 0
        self._host = host
        self._trigger = Trigger(options.rule)
        self._last_dip_s: float | None = None
        self._settled_s = 0.0
        self._dip_began_s = 0.0  # of the dip that is captured, Unix time

    @property
    def logdir(self) -> Path:
        return self._host.options.logdir / FOLDER

    @property
    def done(self) -> bool:
        """Return whether it has captured as often as it may."""
        return self.count >= self.options.max_captures

    def state(self) -> str:
        """State for people, what matters most first: "auto-capture 1/20: 11:02:07 GPU 3: SM active 31% for 5 s"."""
        missed = f", {self.missed} during captures" if self.missed else ""
        return (f"auto-capture {self.count}/{self.options.max_captures}{missed}: "
                + (self.note or self.options.rule.text))

    def check(self, history: History, sample: NodeSample) -> None:
        """Check the newest sample for a dip; called on the sampler's thread, returns at once."""
        dip = self._trigger.check(history, sample)
        now_s = sample.time_s
        status = self._host.status
        if status is not None and status.begun:
            self._settled_s = now_s + SETTLE_S
        if dip is None:
            return
        gpu = next((g.info.label for g in sample.gpus if g.info.uuid == dip.uuid), dip.uuid)
        text = dip.text(gpu)
        begun = time.strftime("%H:%M:%S", time.localtime(dip.began_s))
        if now_s < self._settled_s:
            self.missed += 1
            self.note = (f"{begun} {text}: not captured, because a capture was running or ended less than "
                         f"{SETTLE_S:.0f} s ago")
        elif self.done:
            self.note = f"{begun} {text}: not captured, because the maximum number of captures was reached"
        elif self._last_dip_s is not None and 0 <= now_s - self._last_dip_s < self.options.min_interval_s:
            self.note = (f"{begun} {text}: not captured, because the last capture was "
                         f"{(now_s - self._last_dip_s) / 60:.0f} min ago")
        else:
            self._request_capture(dip, begun, text)

    def _request_capture(self, dip: Dip, begun: str, text: str) -> None:
        self._dip_began_s = dip.began_s
        try:
            self._host.start_capture(CaptureRequest(self._host.options.capture_s, self.logdir,
                                                    reason=f"{text} (since {begun})"))
        except GputopError as error:
            self.note = f"{begun} {text}: not captured: {error.message}"
            return
        self.count += 1
        self._last_dip_s = dip.now_s
        self.note = f"{begun} {text}"

    def finish(self, record: CaptureRecord, reason: str) -> CaptureRecord:
        """A capture of ours has ended: say why it was made, and bound the folder."""
        notices = (f"automatic capture: {reason}", *held_before(record, self._dip_began_s), *record.notices)
        run = record.path if record.path.is_dir() else record.path.parent
        try:
            mark_removable(run, reason)
        except OSError as error:
            notices = (*notices, f"gputop will not remove this capture automatically: {error.strerror or error}")
        for old in remove_oldest(self.logdir):
            notices = (*notices, f"removed to free disk space: {old}")
        return replace(record, notices=notices)


# -- the bounded folder: the oldest runs are removed first, and only those gputop marked ------------

MARK = "gputop.black-box.json"
MAX_RUNS = 20
MAX_BYTES = 2 * 2**30
_TRACES = (".xplane.pb", ".pt.trace.json", OVERVIEW)
_MAX_NOTE_BYTES = 1 << 20
_SCHEMA = "gputop.black-box/1"


def mark_removable(run: Path, reason: str, time_s: float | None = None) -> None:
    """Note in a run's folder why it was captured: from then on it may be removed. Raises OSError."""
    note = {"schema": _SCHEMA, "reason": reason, "time_s": time.time() if time_s is None else time_s}
    with replacing(run / MARK) as file:
        file.write((json.dumps(note) + "\n").encode())


def remove_oldest(logdir: Path, max_runs: int = MAX_RUNS, max_bytes: float = MAX_BYTES) -> list[Path]:
    """Remove the oldest marked runs of a logdir beyond so many or so much, never the newest; returns the removed.

    Of a run only what gputop wrote is removed; a folder with anything else in it stays, with that. In a logdir that
    another user could exchange nothing is removed.
    """
    profiles = logdir / "plugins" / "profile"
    removed: list[Path] = []
    if untrusted_ancestor(profiles) is not None:
        return removed
    with contextlib.suppress(OSError), Folder(profiles) as parent:
        total = 0
        for i, (_, run) in enumerate(sorted(_marked_runs(parent), reverse=True)):
            with parent.enter(run) as folder:
                total += _trace_bytes(folder)
                if not i or (i < max_runs and total <= max_bytes):
                    continue
            remove_run(parent, run)
            removed.append(profiles / run)
    return removed


def remove_run(parent: Folder, run: str) -> list[str]:
    """Remove the traces of a run and what gputop wrote beside them, and its folder unless it holds anything else.
    Returns the names of those that could not be removed. Raises OSError where it cannot be entered."""
    with parent.enter(run) as folder:
        names = [name for name in folder.names() if name.endswith(_TRACES) or name in (CAPTURE, CLOCKS, MARK, STACKS)]
        for name in names:
            folder.remove(name)
        left = [name for name in names if folder.has(name)]
    parent.remove_folder(run)
    return left


def _marked_runs(parent: Folder) -> Iterator[tuple[float, str]]:
    """Time and name of the runs that gputop may remove: real folders with a note of this user's. Raises OSError."""
    for run in parent.names():
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, OverflowError):
            with parent.enter(run) as folder, open_regular(
                    MARK, _MAX_NOTE_BYTES, follow_links=False, owners=frozenset({os.geteuid()}),
                    folder_fd=folder.fd) as note:
                about = parse(note.read(_MAX_NOTE_BYTES))
            if about["schema"] == _SCHEMA and math.isfinite(time_s := float(about["time_s"])):
                yield time_s, run


def _trace_bytes(folder: Folder) -> int:
    total = 0
    for name in folder.names():
        if name.endswith(_TRACES):
            with contextlib.suppress(OSError):
                total += folder.state(name).st_size
    return total


# -- dips: GPUs whose recent history meets a rule ------------------------------------------------
# A rule reads METRIC < LEVEL for SECONDS: sm<0.6*median for 5s, power<200W, tensor<10% for 30s. The median is the GPU's
# own over the last minutes, so that one rule fits idle and busy GPUs alike. Or it is a condition in the language of
# rules of one's own, for each GPU: sm_active.mean(10s) < 40% and power_w > 200W for 5s.

BASELINE_S = 300.0  # what a GPU's own median is taken over
# Before that much is known there is no "usual" to dip from; a job's warm-up has passed by then, too.
MIN_BASELINE_S = 30.0
# A GPU that is usually next to idle has nothing to dip from.
MIN_MEDIAN = 0.10
_BASELINE_AGE_S = 5.0  # medians are not worth taking anew with every sample
_RECOVERED = 0.5  # part of the way from the threshold back to the median, before another dip can be one


class Dip(Struct, frozen=True):
    """A GPU that meets the rule: since when (Unix time), its mean since then, and its median. Of a
    condition ``metric`` is its text, and it has no figure of its own."""

    uuid: str
    metric: str
    began_s: float
    now_s: float
    value: float | None
    median: float | None

    def text(self, gpu: str) -> str:
        """Text for people: "GPU 3: SM active 31% for 5 s, usually 92%"."""
        if self.value is None:
            return f"GPU {gpu}: {self.metric} for {self.now_s - self.began_s:.0f} s"
        about = GPU_METRICS[self.metric]

        def figure(value: float) -> str:
            return percent(value) if about.unit == RATIO else f"{value:.0f} W"

        usual = "" if self.median is None else f", usually {figure(self.median)}"
        return f"GPU {gpu}: {about.label} {figure(self.value)} for {self.now_s - self.began_s:.0f} s{usual}"


class _Gpu(Struct):
    armed: bool = True
    low_since_s: float | None = None
    median: float | None = None
    median_s: float = -math.inf
    metric: str | None = None


class Trigger(Struct):
    """Checks a history for dips with each new sample. After a dip, a GPU must recover before it can dip again."""

    rule: DipRule
    _gpus: dict[str, _Gpu] = field(default_factory=dict)

    def check(self, history: History, sample: NodeSample | None = None) -> Dip | None:
        """The first GPU that meets the rule since this sample, which a condition reads. Call it once per sample."""
        if self.rule.condition is not None and sample is not None:
            return self._check_condition(self.rule.condition, history, sample)
        first: Dip | None = None
        for uuid in history.uuids:
            dip = self._check_gpu(history, uuid, self._gpus.setdefault(uuid, _Gpu()))
            first = first or dip
        return first

    def _check_condition(self, condition: Condition, history: History, sample: NodeSample) -> Dip | None:
        """A GPU can dip again once its condition is known not to hold."""
        from gputop.advice.live.node_view import NodeView
        from gputop.advice.live.user_rules import LiveValues

        outcomes, first = condition.judge(LiveValues(NodeView(history, sample, ()))), None
        for info in (gpu.info for gpu in sample.gpus if gpu.info.index in outcomes and gpu.info.mig is None):
            gpu, holds = self._gpus.setdefault(info.uuid, _Gpu()), outcomes[info.index].holds
            if not holds:
                gpu.low_since_s, gpu.armed = None, gpu.armed or holds is False
                continue
            if gpu.low_since_s is None or gpu.low_since_s > sample.time_s:
                gpu.low_since_s = sample.time_s
            if gpu.armed and sample.time_s - gpu.low_since_s >= self.rule.hold_s:
                gpu.armed = False
                first = first or Dip(info.uuid, condition.text, gpu.low_since_s, sample.time_s, None, None)
        return first

    def _check_gpu(self, history: History, uuid: str, gpu: _Gpu) -> Dip | None:
        now_s = history.newest_s
        assert now_s is not None
        if not 0 <= now_s - gpu.median_s < _BASELINE_AGE_S and gpu.low_since_s is None:
            gpu.metric, gpu.median = self._metric_and_median(history, uuid)
            gpu.median_s = now_s
        if gpu.metric is None:
            return None
        times, values = history.window(uuid, gpu.metric, self.rule.hold_s + 1.0)
        threshold = self._threshold(gpu.median)
        if threshold is None or not len(values) or times[-1] < now_s or math.isnan(values[-1]):
            gpu.low_since_s = None  # not measured is not low
            return None
        value = values[-1]
        if value >= threshold:
            gpu.low_since_s = None
            if value >= threshold + _RECOVERED * ((gpu.median or threshold) - threshold):
                gpu.armed = True
            return None
        if gpu.low_since_s is None or gpu.low_since_s > now_s:  # the second: the clock was set back
            gpu.low_since_s = times[-1]
        if not gpu.armed or now_s - gpu.low_since_s < self.rule.hold_s:
            return None
        gpu.armed = False
        low = [v for time_s, v in zip(times, values, strict=True) if time_s >= gpu.low_since_s and v == v]
        return Dip(uuid, gpu.metric, gpu.low_since_s, now_s, statistics.fmean(low), gpu.median)

    def _threshold(self, median: float | None) -> float | None:
        if self.rule.level is not None:
            return self.rule.level
        return None if median is None or self.rule.factor is None else self.rule.factor * median

    def _metric_and_median(self, history: History, uuid: str) -> tuple[str | None, float | None]:
        """The first metric with readings, and its median; None while readings are few, or if it is too low."""
        for metric in self.rule.metrics:
            times, values = history.window(uuid, metric, BASELINE_S)
            readings = [(time_s, v) for time_s, v in zip(times, values, strict=True) if v == v]
            if not readings:
                continue
            if readings[-1][0] - readings[0][0] < MIN_BASELINE_S:
                return metric, None
            median = statistics.median(v for _, v in readings)
            full = 1.0 if GPU_METRICS[metric].unit == RATIO else 0.0
            return metric, median if median >= MIN_MEDIAN * full else None
        return None, None


# -- rules, as --on-dip has them --------------------------------------------------------------------

_DEFAULT_HOLD_S = 5.0

_METRICS = {"sm": ("sm_active", "gpu_util"), "util": ("gpu_util",), "tensor": ("tensor_active",),
            "dram": ("dram_active",), "power": ("power_w",)}
_RULE = re.compile(r"(?P<metric>[a-z]+)\s*<\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>\*\s*median|%|w)?"
                   r"(?:\s+for\s+(?P<hold>\d+(?:\.\d+)?)\s*s)?", re.IGNORECASE)
_SHORT = re.compile(r"\s*([a-z]+)\s*[<>=]", re.IGNORECASE)


def parse_rule(text: str) -> DipRule:
    """Raises GputopError (wrong usage) with what a rule looks like."""
    match = _RULE.fullmatch(text.strip())
    metrics = _METRICS.get(match["metric"].lower()) if match else None
    if match is None or metrics is None:
        return _condition(text)
    number, unit = float(match["number"]), re.sub(r"\s", "", match["unit"] or "").lower()
    hold_s = float(match["hold"]) if match["hold"] else _DEFAULT_HOLD_S
    if not 1 <= hold_s <= 3600:
        raise _usage(text, "a dip can last 1 to 3600 s")
    plain = " ".join(text.split())
    if unit == "*median":
        if not 0 < number < 1:
            raise _usage(text, "a fraction of the median must be between 0 and 1")
        return DipRule(plain, metrics, hold_s, factor=number)
    expected = GPU_METRICS[metrics[0]].unit
    if unit == "%":
        number /= 100
    if (unit == "w") != (expected == WATTS) or (expected == RATIO and not 0 < number <= 1):
        raise _usage(text, "power is in W; other metrics are ratios (0.3) or percentages (30%)")
    return DipRule(plain, metrics, hold_s, level=number)


def _condition(text: str) -> DipRule:
    short = _SHORT.match(text)
    if short is not None and short[1].lower() in _METRICS:
        raise _usage(text, f"{short[1]} < needs a level or a fraction of the median: {short[1]}<0.6*median, "
                           f"{short[1]}<{'200W' if short[1].lower() == 'power' else '40%'}, optionally with 'for 5s'")
    when, _, lasts = text.rpartition(" for ")
    try:
        hold_s, unit = quantity(lasts.strip()) if when else (_DEFAULT_HOLD_S, SECONDS)
        parsed = condition(when or text, "live")
    except Mistake as mistake:
        raise _usage(text, f"{mistake.message}, at character {mistake.pos + 1}; or write METRIC < LEVEL with one of "
                           f"{', '.join(_METRICS)}") from None
    if not parsed.per_gpu:
        raise _usage(text, "gputop detects dips per GPU: use a per-GPU metric such as sm_active")
    if unit != SECONDS or not 1 <= hold_s <= 3600:
        raise _usage(text, "a dip can last 1 to 3600 s")
    return DipRule(" ".join(text.split()), (), hold_s, condition=parsed)


def _usage(text: str, reason: str) -> GputopError:
    return GputopError(f"{text!r} is not a valid dip rule: {reason}", f'For example: --on-dip "{DEFAULT_RULE}"',
                       EXIT_USAGE)
