"""The documents of an analysis: of ``gputop analyze --json``, with ``--all``, and of ``gputop capture --json``."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import UNSET, Struct, UnsetType, field

from gputop.analysis.results import Analysis
from gputop.comparison.compare import GateResult
from gputop.profiler.capture.facts import CaptureFacts
from gputop.timeline.idle_gap_report import IdleGapRow
from gputop.timeline.model import IdleTotal


class AnalyzeDocument(Analysis, frozen=True, kw_only=True):
    """gputop analyze --json: ``bubbles`` and ``idle_gap_causes`` with --idle-gaps, ``gates`` with gates or budgets."""

    idle_gaps: tuple[IdleGapRow, ...] | UnsetType = field(default=UNSET, name="bubbles")
    idle_gap_causes: tuple[IdleTotal, ...] | UnsetType = UNSET
    gates: tuple[GateResult, ...] | UnsetType = UNSET


class AnalysesDocument(Struct, frozen=True, tag_field="schema", tag="gputop.analyses/1"):
    """gputop analyze --all --json: the analysis of each run by its name, or why it could not be read."""

    runs: Mapping[str, AnalyzeDocument]
    unread: Mapping[str, str]


class CaptureDocument(Analysis, frozen=True, kw_only=True):
    """gputop capture --json: the analysis, and how the capture was made."""

    capture: CaptureFacts
