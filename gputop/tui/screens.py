"""The screens that open over the monitor: details of a finding, help, attach, the last capture."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import HorizontalScroll, Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from gputop.advice.finding import Finding
from gputop.captures import CaptureRecord
from gputop.errors import GputopError
from gputop.gpu_numbers import GpuNumbers
from gputop.samples import GpuSample
from gputop.text import printable, ranges, reading
from gputop.tui.actions import evidence_lines, gain_text
from gputop.tui.keys import key
from gputop.tui.palette import ACCENT, BAD, BOLD, DIM, PLAIN, SEVERITY_MARK, SEVERITY_STYLE, WARN


def text_width(terminal: int) -> int:
    """Columns for text in a box on a terminal of this width, as the style sheet has it, with room for a scrollbar."""
    return min(104, terminal * 96 // 100) - 5


_GAP = re.compile(r"(?:^|\S) {2,}(?=\S)")


def hanging(text: Text, width: int) -> Text:
    """``text`` with lines longer than ``width`` broken at spaces; what follows stands under their last column.

    A column begins behind two spaces or more. A word that is longer than the room is left as it is.
    """
    out = Text()
    for line in text.split("\n", allow_blank=True):
        indent = max((gap.end() for gap in _GAP.finditer(line.plain[:width * 2 // 3])), default=0)
        while len(line.plain) > width:
            cut = line.plain.rfind(" ", indent + 1, width + 1)
            if cut <= indent or not line.plain[:cut].strip():
                break
            head, rest = line.divide([cut + 1])
            head.rstrip()
            out.append_text(head).append("\n")
            line = Text(" " * indent).append_text(rest)
        out.append_text(line).append("\n")
    out.right_crop(1)
    return out


@dataclass(frozen=True, slots=True)
class Code:
    """Lines to paste."""

    text: str


@dataclass(frozen=True, slots=True)
class Below:
    """Text that belongs to the one above it and stands further in."""

    text: Text


Part = Text | Code | Below


class Popup(ModalScreen[None]):
    """A box over the monitor; esc and q close it. Code among its texts scrolls sideways and never wraps."""

    BINDINGS: ClassVar[list[BindingType]] = [
        key("y", "copy", "copy", "the code into the terminal's clipboard (OSC 52: over SSH, too, where allowed)"),
        key("question_mark", "app.help", "help", "the keys of this screen"),
        key("escape,q", "dismiss", "close", "back to where you were"),
    ]
    HELP = "↑ ↓ and the wheel scroll.\n"

    def __init__(self, title: str, *content: Part) -> None:
        super().__init__()
        self._title, self._content = title, content

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="popup") as box:
            box.border_title, box.border_subtitle = Content(printable(self._title)), "esc: close"  # no markup
            for part in self._content:
                if isinstance(part, Text):
                    yield Static(part, markup=False)
                elif isinstance(part, Below):
                    yield Static(part.text, markup=False, classes="indented")
                else:
                    with HorizontalScroll(classes="code"):
                        yield Static(Text("\n".join(map(printable, part.text.splitlines())), ACCENT, no_wrap=True))

    def on_mount(self) -> None:
        self.query_one("#popup").focus()

    def copied(self) -> tuple[str, str]:
        """What y copies, and what it is called; empty where there is nothing."""
        return "\n".join(part.text for part in self._content if isinstance(part, Code)), "The code"

    def action_copy(self) -> None:
        from gputop.tui.clipboard import copy

        text, what = self.copied()
        if text:
            copy(self.app, text, what)
        else:
            self.notify("There is no code to copy here.", timeout=4)


class LivePopup(Popup):
    """A box whose text is made anew with each look at the node."""

    def __init__(self, title: str, make: Callable[[], Text]) -> None:
        self._make, self._shown = make, make()
        super().__init__(title, self._shown)

    def update_view(self) -> None:
        text = self._make()
        if text != self._shown:  # setting it lays the box out again
            self._shown = text
            for part in self.query("#popup Static").results(Static):
                part.update(text)


def finding_parts(finding: Finding, numbers: GpuNumbers | None = None) -> list[Part]:
    """Everything about one finding. Built with styles, never markup: names come from outside.

    ``numbers``: what the GPUs of the job are on this node; the texts of a trace have the job's own.
    """
    parts: list[Part] = []
    out = Text()
    gain = gain_text(finding) or "no figure"
    out.append(f"{SEVERITY_MARK[finding.severity]} {finding.severity}", SEVERITY_STYLE[finding.severity])
    gpus = f"   GPU {ranges(finding.gpus, ', ')}" if finding.gpus else ""
    origin = "a trace" if finding.origin == "trace" else "the live figures"
    out.append(f"   {finding.id}{gpus}   from {origin}\n\n", DIM)
    out.append(printable(finding.why) + "\n\n")
    out.append("What to do\n", BOLD)
    out.append(printable(finding.action) + "\n")
    if finding.snippet:
        parts += [out, Code(finding.snippet)]
        out = Text()
    out.append("\nGain  ", BOLD)
    out.append(gain, SEVERITY_STYLE[finding.severity])
    out.append(f"  {printable(finding.gain.how)}\n")
    if finding.evidence:
        out.append("\nEvidence\n", BOLD)
        for line in evidence_lines(finding):
            out.append("  " + printable(line) + "\n")
    if finding.consequences:
        out.append("\nAlso explains", BOLD)
        out.append("  with the cause they go, too", DIM)
        parts += [out, *_consequences(finding)]
        out = Text()
    if numbers is not None and finding.origin == "trace" and finding.gpus:
        out.append("\nGPUs  ", BOLD)
        out.append(printable(numbers.text()) + "\n")
    out.append("\nRule  ", BOLD)
    out.append(f"{finding.id}\n", PLAIN)
    out.append("Source  ", BOLD)
    out.append(printable(finding.source), DIM)
    return [*parts, out]


def _consequences(finding: Finding) -> Iterator[Part]:
    for other in finding.consequences:
        out = Text(f"  {SEVERITY_MARK[other.severity]} {printable(other.title)}", SEVERITY_STYLE[other.severity])
        out.append(f"  {other.id}{', live' if other.origin == 'live' else ''}", DIM)
        yield out
        yield Below(Text(printable(other.why)))
        yield from _consequences(other)


def capture_text(record: CaptureRecord) -> Text:
    """What a capture did and says; where it could not be analysed, why."""
    parts = [*map(printable, record.remarks), *(f"profiler: {printable(n)}" for n in record.notes)]
    parts += [record.report] if record.problem is None else [
        printable(str(record.path)), printable(record.problem.message), printable(record.problem.fix)]
    if record.path.exists():
        from gputop.launch.xprof import logdir_of, open_command

        parts.append(f"Open it in XProf: {printable(open_command(logdir_of(record.path)))}")
    return Text("\n".join(parts))


def gpu_text(gpu: GpuSample) -> Text:
    """Every reading of one GPU with its source, or why there is none."""
    from gputop.metrics import GPU_METRICS

    out = Text()
    node = "" if gpu.info.numa_node is None else f"   NUMA node {gpu.info.numa_node}"
    out.append(f"{printable(gpu.info.name)}   {gpu.info.uuid}   {gpu.info.pci_bus_id}{node}\n", DIM)
    if gpu.message:
        out.append(f"{gpu.state}: {printable(gpu.message)}\n", BAD)
    out.append("\n")
    for metric in GPU_METRICS.values():
        r = gpu[metric.id]
        out.append(f"{metric.label:<20}")
        out.append(f"{reading(r):>12}  ", DIM if r.value is None else BOLD)
        out.append(printable(r.reason or r.source) + (" (coarse)" if r.coarse else "") + "\n", DIM)
    for event in gpu.xids:
        out.append(f"\nXid {event.xid} at {time.strftime('%H:%M:%S', time.localtime(event.time_s))}", BAD)
    if gpu.xids_reason is not None:
        out.append(f"\nXid errors are not reported: {printable(gpu.xids_reason)}", DIM)
    if gpu.clock_event_reasons:
        out.append("\nClocks held down by: " + ", ".join(gpu.clock_event_reasons), WARN)
    return out


class Ask(ModalScreen[str | None]):
    """One line of input; dismissed with the text, or None on escape."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "cancel", "cancel")]

    def __init__(self, title: str, hint: str, value: str = "", placeholder: str = "",
                 check: Callable[[str], str | None] = lambda _: None) -> None:
        """``check`` says what is wrong with a text, which is then asked for again."""
        super().__init__()
        self._title, self._hint, self._value, self._placeholder = title, hint, value, placeholder
        self._check = check

    def compose(self) -> ComposeResult:
        with Vertical(id="ask") as box:
            box.border_title, box.border_subtitle = self._title, "enter: ok   esc: cancel"
            yield Input(value=self._value, placeholder=self._placeholder)
            yield Static(self._hint, id="hint", markup=False)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        text = event.value.strip()
        problem = self._check(text) if text else None
        if problem is None:
            self.dismiss(text)
        else:
            self.query_one("#hint", Static).update(Text(printable(problem), WARN))

    def action_cancel(self) -> None:
        self.dismiss(None)


def ask_attach() -> Ask:
    """Where the profiler server is."""
    def problem(address: str) -> str | None:
        from gputop.profiler.workers import addresses

        try:
            addresses([address])
        except GputopError as error:
            return f"{error.message} {error.fix}"
        return None

    hint = ("The profiler server of a TensorFlow or JAX process. In the job:\n"
            "tf.profiler.experimental.server.start(6009) or jax.profiler.start_server(6009)\n"
            "A job that runs without one is given one by: gputop attach PID")
    return Ask("Attach to HOST:PORT", hint, placeholder="localhost:6009", check=problem)
