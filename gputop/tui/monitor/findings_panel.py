"""The panel "What to do": findings by estimated saving, the selected one unfolded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal

from msgspec import Struct
from msgspec.structs import replace
from rich.style import Style
from textual import events
from textual.binding import BindingType
from textual.message import Message

from gputop.core.findings import CombinedGain, Finding
from gputop.render.finding_text import DO, WHY, gain_texts, kind_text, what_if_text, where_rows
from gputop.render.palette import ACCENT, BOLD, DIM, GAIN, PLAIN, SEVERITY_MARK, SEVERITY_STYLE
from gputop.render.step_bar import step_lines
from gputop.render.styled_text import StyledText, justify, whole_sentences, wrap, wrap_sentences
from gputop.session.gpu_numbers import GpuNumbers
from gputop.text.units import printable
from gputop.tui.keys import STACKS_TELL, key, up_and_down
from gputop.tui.widgets.cached_lines import DrawnLines, WheelMoves

_MIN_HEIGHT_OF_TWO_LINES = 8  # a lower panel has one line for what the chosen cures save together
_LEAD = 3  # lines above a finding of low severity, at most
_ONE_FINDING = 3  # lines of a panel that has room for its title, its reason and its action, and nothing above them
_INDENT = 8  # of the texts below a title
_WHY_LINES = 2  # of a reason, while other lines need the room


class CaptureView(Struct, frozen=True):
    """View of the last capture in the panel, besides its findings."""

    breakdown: Mapping[str, float | None] = {}
    median_s: float | None = None  # of the steps, whose mean the breakdown is
    what_if: tuple[CombinedGain, ...] = ()  # what it saves to fix several of its findings at once
    not_judged: bool = False  # some causes could not be judged
    earlier: tuple[str, ...] | None = None  # the verdict on an earlier job, if the capture is of one


_NO_CAPTURE = CaptureView()


class FindingView(Struct, frozen=True):
    mark: str = ""  # of a what-if: "[x] " if it is chosen, "[ ] " if not
    earlier: bool = False  # it is of an earlier job, which is no alarm
    selected: bool = False
    keyed: bool = True  # there is a job to capture and ranks to look at
    remark: str = ""


def finding_lines(finding: Finding, width: int, room: int, view: FindingView,
                  reason_lines: int = _WHY_LINES, *, code: bool = False) -> list[list[StyledText]]:
    """One finding as at most ``room`` lines: title with what the fix brings and, where there is room, what to do with
    its ``code``, the reason in at most ``reason_lines`` lines, and the lines or ops that it is about."""
    style = SEVERITY_STYLE[finding.severity]
    gains = gain_texts(finding)
    title = printable(view.mark + finding.title)
    gain = next((text for text in gains if len(title) + len(text) + 5 <= width), "".join(gains[-1:]))
    gain_style = PLAIN if finding.gain.per == "sample" else GAIN
    if not gain:
        gain, gain_style = kind_text(finding), DIM if finding.origin == "live" or finding.yours else style
    room_of_title = width - len(gain) - 5
    if 4 < room_of_title < len(title):
        title = wrap(title, room_of_title, 1)[0]  # not within a figure
    pointer = "›" if view.selected else " "
    lines: list[list[StyledText]] = [justify(
        [(pointer, ACCENT), (SEVERITY_MARK[finding.severity] + " ", style),
         (title, BOLD if view.selected else PLAIN)], [(gain + " ", gain_style)], width)]
    columns = width - _INDENT - 1
    do, reason = _do_and_why(finding, view)
    do_lines = whole_sentences(do, columns, room - 1) if room > 1 else []
    where: list[list[StyledText]] = []
    for row in where_rows(finding) if room > len(do_lines) + 2 else ():
        most = 2 if room > len(do_lines) + _WHY_LINES + 2 else 1
        where = _labeled(row.label, wrap(row.text, columns, most), PLAIN)
    reason_lines = min(reason_lines, room - 1 - len(do_lines) - len(where))
    lines += _labeled(DO, do_lines, PLAIN)
    if code:
        lines += [[(" " * (_INDENT + 2), PLAIN), (printable(text), ACCENT)]
                  for text in (finding.snippet or "").splitlines()]
    lines += _labeled(WHY, wrap_sentences(reason, columns, reason_lines) if reason_lines > 0 and reason else [], DIM)
    lines += where
    return _dimmed(lines) if view.earlier else lines


def _labeled(label: str, texts: Sequence[str], style: Style) -> list[list[StyledText]]:
    return [[(f"  {'' if i else label:<{_INDENT - 2}}", ACCENT if label == DO else DIM), (text, style)]
            for i, text in enumerate(texts)]


def _do_and_why(finding: Finding, view: FindingView) -> tuple[str, str]:
    """Action and reason of a finding. Those of a live finding are one sentence each, with the key that shows more if
    there is one; its details have the rest."""
    action = finding.action
    if finding.brief:
        action = action.partition(". ")[0].removesuffix(".") + "."
        if view.keyed and finding.unknown:
            action = f"Press {'S' if finding.id in STACKS_TELL else 'c'}: {finding.unknown}"
    return printable(action), printable(view.remark + (finding.brief or finding.why))


def _dimmed(lines: list[list[StyledText]]) -> list[list[StyledText]]:
    return [[(text, DIM) for text, _ in line] for line in lines]


class ActionsPanel(WheelMoves, DrawnLines, can_focus=True):
    """A list of findings; up and down select, enter asks for the details."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *up_and_down("finding"),
        key("enter", "details", "details", "show evidence, code to paste, source"),
        key("w", "choose", "what if", "mark the finding: estimate the step with all marked fixes"),
        key("y", "copy", "copy", "copy the finding's code or, if there is none, the finding as Markdown (OSC 52)"),
        key("Y", "copy(True)", "copy as Markdown", "copy the finding as Markdown"),
    ]
    PANEL = "What to do"

    class Opened(Message):
        """The details of a finding are wanted, or of what could not be judged (None); or it is to be copied."""

        def __init__(self, finding: Finding | None, copy: Literal["", "code", "markdown"] = "") -> None:
            super().__init__()
            self.finding, self.copy = finding, copy

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.findings: tuple[Finding, ...] = ()
        self.lead: tuple[str, ...] = ()
        self.answer = False
        self.capture: CaptureView | None = None
        self.numbers = GpuNumbers()  # what the GPUs of the last capture are on this node
        # Why a finding names no line of Python, or how it would; "" if there is nothing to say.
        self.no_line: Callable[[Finding], str] = lambda _: ""
        self.keyed = True  # there is a job to capture and ranks to look at: not in a replay
        self.selected_id: str | None = None  # see :meth:`_key`
        self.chosen: frozenset[str] = frozenset()  # ids of the findings whose cures are tried
        self._line_ids: list[str] = []  # key of the finding of each drawn line

    @property
    def selected(self) -> Finding | None:
        """The selected finding; the first one if the selected one no longer exists."""
        for finding in self.findings:
            if self._key(finding) == self.selected_id:
                return finding
        return self.findings[0] if self.findings else None

    def update_view(self, findings: tuple[Finding, ...], title: str, lead: tuple[str, ...] = (),
                    capture: CaptureView | None = None, answer: bool = False) -> None:
        """Show these findings.

        ``lead`` is said before the findings (what there is to say where nothing is wrong); the breakdown of the step
        is drawn below them where there is room. ``answer``: the lead answers a key, and is shown whole. What is of an
        earlier job is dimmed: the live findings are not about it."""
        self.capture = capture
        self.chosen &= {finding.id for finding in findings if finding.gain.by == "replay"}
        self.findings, self.lead, self.answer = findings, lead, answer
        if title != self.border_title:  # setting it repaints the whole border
            self.border_title = title
        self.draw()

    def draw(self) -> None:
        width, height = self.size.width, self.size.height
        if width <= 0 or height <= 0:
            return
        capture = self.capture or _NO_CAPTURE
        lead = self._lead_lines(self.lead, width, height) if height > _ONE_FINDING or not self.findings else []
        what_if: list[list[StyledText]] = []
        if self.chosen and height > 1:
            text = printable(what_if_text(self.findings, self.chosen, capture.what_if))
            most = 2 if height >= _MIN_HEIGHT_OF_TWO_LINES else 1
            what_if = [[(" " + part, GAIN)] for part in wrap(text, width - 2, most)]
        # The titles of what can be chosen together stay on the screen with their marks.
        titles = max(0, len(self.findings) - 1) if self.chosen else 0
        chosen = self._selected_lines(width, max(1, height - len(what_if) - titles))
        if self.answer:
            lead = self._lead_lines(self.lead, width, height)[:max(1, height - bool(self.findings) - len(what_if))]
        elif len(lead) + len(chosen) + len(what_if) > height:  # the job line, too, says what is left out
            lead = self._lead_lines(self.lead[:1], width, height) if lead else []
            if len(lead) + len(chosen) + len(what_if) > height:
                # What costs no time says less than the line above it.
                most = _LEAD if self.selected is not None and self.selected.severity == "low" else 1
                lead = self._lead_lines(self.lead[:1], width, most) if lead else []
        room = max(1, height - len(lead) - len(what_if))
        # The selected finding comes first, then where the step's time goes, then the titles of the others.
        step = step_lines(capture.breakdown, width, capture.median_s)
        if capture.earlier is not None:
            step = _dimmed([[(" " + part, DIM)] for text in capture.earlier
                            for part in wrap_sentences(printable(text), width - 2, 2)] + step)
        if len(chosen) + len(step) + titles > room:
            step = []
        lines = lead
        self._line_ids = [""] * len(lines)
        hidden = 0
        if self.findings:
            finding_lines_shown, hidden = self._finding_lines(width, room - len(step), chosen)
            lines += finding_lines_shown
        step = what_if + step
        room = height - len(step)
        self._name_keys(hidden, width)
        if len(lines) <= room:
            lines += [[]] * (room - len(lines)) + step
        self.show(lines[:height])

    def _name_keys(self, hidden: int, width: int) -> None:
        """Name the keys on the border, as many as it has room for."""
        keys = [f"{hidden} more: ↑ ↓"] if hidden > 0 else []
        keys += ["esc: close"] if self.answer else []
        not_judged = (self.capture or _NO_CAPTURE).not_judged
        keys += ["enter: details"] if self.findings else ["enter: causes not checked"] if not_judged else []
        keys += ["t: timeline", "T: tables", "B: compare"] if self.capture is not None else []
        keys += ["w: what if"] if self.check_action("choose", ()) else []
        while keys and len("   ".join(keys)) > width - 6:
            keys.pop()
        subtitle = "   ".join(keys)
        if subtitle != (self.border_subtitle or ""):
            self.border_subtitle = subtitle

    def _lead_lines(self, texts: Sequence[str], width: int, height: int) -> list[list[StyledText]]:
        return [[(" " + part, PLAIN)] for text in texts for part in wrap_sentences(printable(text), width - 2, height)]

    def _selected_lines(self, width: int, room: int, reason_lines: int = _WHY_LINES, *,
                        code: bool = False) -> list[list[StyledText]]:
        """The selected finding, unfolded; no line where there is none."""
        finding = self.selected
        if finding is None:
            return []
        view = replace(self._view_of(finding), selected=self.has_focus, remark=self.numbers.remark(finding))
        return finding_lines(finding, width, room, view, reason_lines, code=code)

    def _grown(self, width: int, selected: list[list[StyledText]], spare: int) -> list[list[StyledText]]:
        """The selected finding with as many of the ``spare`` lines as it can use: its code, how to learn its line of
        Python, and its whole reason."""
        finding = self.selected
        if finding is None or spare < 1:
            return selected
        whole, code = len(selected) + spare, (finding.snippet or "").splitlines()
        fits = bool(code) and len(code) <= spare and max(map(len, code)) < width - _INDENT - 2
        texts = wrap(printable(self.no_line(finding)), width - _INDENT - 1, 2) if self.keyed else ()
        hint: list[list[StyledText]] = [[(" " * _INDENT + text, DIM)] for text in texts if text]
        hint = hint if len(hint) <= spare - fits * len(code) else []
        room = whole - fits * len(code) - len(hint)
        return self._selected_lines(width, room, room, code=fits) + hint

    def _view_of(self, finding: Finding) -> FindingView:
        mark = "" if not self.chosen or finding.gain.by != "replay" else (
            "[x] " if finding.id in self.chosen else "[ ] ")
        return FindingView(mark, self._is_earlier(finding), keyed=self.keyed)

    def _is_earlier(self, finding: Finding) -> bool:
        return self.capture is not None and self.capture.earlier is not None and finding.origin == "trace"

    def _key(self, finding: Finding) -> str:
        """Id of a finding; the live finding of the same id next to that of an earlier job is another one."""
        return f"earlier {finding.id}" if self._is_earlier(finding) else finding.id

    def _finding_lines(self, width: int, height: int,
                       selected: list[list[StyledText]]) -> tuple[list[list[StyledText]], int]:
        """The findings that fit, the ``selected`` one among them, and how many do not. Spare lines unfold the next
        ones."""
        lines: list[list[StyledText]] = []
        chosen = self.selected
        index = self.findings.index(chosen) if chosen else 0
        if len(selected) > height:
            selected = self._selected_lines(width, height)
        others = min(len(self.findings) - 1, max(0, height - len(selected)))
        first = max(0, min(index, len(self.findings) - 1 - others))
        spare = height - len(selected) - others
        selected = self._grown(width, selected, spare)
        spare = height - len(selected) - others
        for i, finding in enumerate(self.findings[first:first + others + 1]):
            shown = selected
            if first + i != index:
                shown = finding_lines(finding, width, 1 + (spare if spare > 1 else 0), self._view_of(finding))
                shown = shown if len(shown) <= spare + 1 else shown[:1]
                spare -= len(shown) - 1
            lines += shown
            self._line_ids += [self._key(finding)] * len(shown)
        return lines, len(self.findings) - others - 1

    def action_move(self, by: int) -> None:
        chosen = self.selected
        if chosen is not None:
            index = min(len(self.findings) - 1, max(0, self.findings.index(chosen) + by))
            self.selected_id = self._key(self.findings[index])
            self.draw()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Allow an action; with one saving there is nothing to add up."""
        if action == "choose":
            savings = sum(finding.gain.by == "replay" for finding in self.findings)
            return self.selected is not None and self.selected.gain.by == "replay" and savings > 1
        return super().check_action(action, parameters)

    def action_choose(self) -> None:
        if self.selected is not None:
            self.chosen ^= {self.selected.id}
            self.draw()

    def action_details(self) -> None:
        if self.selected is not None or (self.capture is not None and self.capture.not_judged):
            self.post_message(self.Opened(self.selected))

    def action_copy(self, markdown: bool = False) -> None:
        if self.selected is not None:
            self.post_message(self.Opened(self.selected, "markdown" if markdown else "code"))

    def on_click(self, event: events.Click) -> None:
        if event.chain > 1:  # what the click before has selected is unfolded: other lines are under the pointer now
            self.action_details()
            return
        row = event.get_content_offset(self)
        if row is None or not 0 <= row.y < len(self._line_ids):
            return
        finding_id = self._line_ids[row.y]
        if not finding_id:
            return
        if self.selected is not None and self._key(self.selected) == finding_id:
            self.action_details()
        else:
            self.selected_id = finding_id
            self.draw()
