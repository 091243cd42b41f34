"""The host's side of the text report beside its tables: gaps, lines of Python, launch threads."""

from __future__ import annotations

from collections.abc import Iterator

from gputop.analysis.results import Analysis, LaunchThreads
from gputop.diagnosis.python_lines import cost_words, gap_words, worth_showing
from gputop.diagnosis.python_lines import lines_of_gaps as python_lines
from gputop.text.units import percent, printable, seconds
from gputop.text.wrapping import wrap

_NAMES = 5  # shown in a list
_NAME_WIDTH = 44
_WORTH_GAPS = 0.01  # share of the step


def gaps(a: Analysis, width: int) -> Iterator[str]:
    """Yield the work of the host in the steps' gaps."""
    g = a.gaps
    if g is None or a.steps is None or g.total_s_per_step < _WORTH_GAPS * a.steps.mean_s:
        return
    yield from _labeled("Gaps", f"{seconds(g.total_s_per_step)} per {a.steps.unit}, {g.what}", width)
    parts = [(work.name, work.s_per_step) for work in g.main]
    if g.no_event_s_per_step is not None:
        parts.append(("Python without events", g.no_event_s_per_step))
    parts.sort(key=lambda part: -part[1])
    for label, times in (("training loop", parts), ("executors", [(w.name, w.s_per_step) for w in g.executor])):
        shown = [f"{_short(name, _NAME_WIDTH)} {seconds(time)}" for name, time in times[:_NAMES] if time > 0]
        if shown:
            yield from _labeled("", f"{label}: {', '.join(shown)}", width)


def stacks(a: Analysis, width: int) -> Iterator[str]:
    if a.stacks is None:
        return
    period_s = a.steps.mean_s if a.steps is not None else a.trace.window_s
    if a.stacks.reason:
        if a.gaps is not None and a.gaps.total_s_per_step >= _WORTH_GAPS * period_s:
            text = f"It is unknown which lines of code ran in the gaps: {a.stacks.reason}"
            yield from _labeled("Python", text, width)
        return
    shown = worth_showing(a.stacks, period_s)
    for number, gaps in enumerate(shown):
        yield from _labeled("" if number else "Python", gap_words(gaps, a.stacks), width)
        for text in python_lines(gaps, a.stacks):
            yield from wrap(text, width, " " * 11, " " * 13)
    if shown:
        yield from _labeled("", cost_words(a.stacks, a.simulated), width)


def launch_threads(a: Analysis, width: int) -> Iterator[str]:
    """Yield the threads that launch, and whether tf.data was at work while launches were late."""
    t = a.launch_threads
    if t is None:
        return
    text = f"by one thread, {t.threads[0].name}"
    if len(t.threads) > 1:
        fewest, most = min(t.threads_per_gpu.values()), max(t.threads_per_gpu.values())
        text = (f"by {len(t.threads)} host threads, {fewest if fewest == most else f'{fewest} to {most}'} per GPU")
    if t.mode != "unknown":
        text += f"; TF_GPU_THREAD_MODE {t.mode}"
    yield from _labeled("Launches", text + _contention(t), width)


def _contention(t: LaunchThreads) -> str:
    text = ""
    if t.busy_threads_at_launch is not None and (t.cpus is not None or len(t.threads) > 1):
        cpus = "" if t.cpus is None else f" on {t.cpus} CPUs"
        text += f"; {t.busy_threads_at_launch:.1f} threads were busy during launches{cpus}"
    if t.input_busy_late is not None:
        text += f"; tf.data works for {percent(t.input_busy_late)} of the time in which GPUs wait for launches"
        if t.input_busy is not None:
            text += f", and for {percent(t.input_busy)} of the rest"
    return text


def _short(name: str, width: int) -> str:
    """A long name's end where it begins with scopes, else its beginning."""
    name = printable(name)
    if len(name) <= width:
        return name
    return "…" + name[1 - width:] if "/" in name else name[:width - 1] + "…"


def _labeled(label: str, text: str, width: int) -> list[str]:
    return wrap(text, width, f"{label:<9}")
