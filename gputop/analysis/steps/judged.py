"""The part of a trace that is judged, and its steps: what every analysis and the timeline begin with."""

from __future__ import annotations

from gputop.analysis.steps.model import Steps
from gputop.analysis.steps.steps import find_steps
from gputop.core.findings import TraceNote
from gputop.trace.complete_part import longest_recording, up_to_last_gpu_event
from gputop.trace.model import Trace


def detect_steps(trace: Trace) -> tuple[Trace, Steps | None]:
    """The trace up to the last event of a GPU, without steps only its longest recording; and the steps."""
    trace = up_to_last_gpu_event(trace)
    steps = find_steps(trace)
    if steps is None and trace.unrecorded_ns:  # shares of the whole window would count what is missing as idle
        trace = longest_recording(trace)
        trace.quality = [*trace.quality, TraceNote("one_recording", "Without steps, gputop analyzes only the "
                                                                      "longest part of the recording.")]
    return trace, steps
