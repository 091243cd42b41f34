"""The panel "What to do": findings by estimated saving, the selected one unfolded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal

import msgspec
from msgspec import Struct
from textual import events
from textual.binding import BindingType
from textual.message import Message

from gputop.core.findings import CombinedGain, Finding
from gputop.render.finding_text import culprits_text, gain_texts, kind_text, what_if_text
from gputop.render.palette import ACCENT, BOLD, DIM, GAIN, PLAIN, SEVERITY_MARK, SEVERITY_STYLE
from gputop.render.step_bar import step_lines
from gputop.render.styled_text import StyledText, justify, wrap, wrap_sentences
from gputop.session.gpu_numbers import GpuNumbers
from gputop.text.units import printable
from gputop.tui.keys import STACKS_TELL, key
from gputop.tui.widgets.cached_lines import DrawnLines, WheelMoves

_MIN_HEIGHT_OF_TWO_LINES = 8  # a lower panel has one line for what the chosen cures save together
_LEAD = 3  # lines above a finding of low severity, at most
_ONE_FINDING = 3  # lines of a panel that has room for its title, its reason and its action, and nothing above them


class CaptureView(Struct, frozen=True):
    """View of the last capture in the panel, besides its findings."""

    breakdown: Mapping[str, float | None] = {}
    median_s: float | None = None  # of the steps, whose mean the breakdown is
    what_if: tuple[CombinedGain, ...] = ()  # what it saves to fix several of its findings at once
    not_judged: bool = False  # some causes could not be judged
    earlier: tuple[str, ...] | None = None  # the verdict on an earlier job, if the capture is of one


_NO_CAPTURE = CaptureView()


class FindingView(Struct, frozen=True):
    """View of a finding: how it is drawn."""

    chosen: bool = False  # it is marked
    earlier: bool = False  # it is of an earlier job, which is no alarm
    unfolded: bool = False
    selected: bool = False
    keyed: bool = True  # there is a job to capture and ranks to look at
    remark: str = ""


def finding_lines(finding: Finding, width: int, room: int, view: FindingView) -> list[list[StyledText]]:
    """One finding as at most ``room`` lines: title with gain and, unfolded, its culprits, remark, reason and action.
    """
    most, style = room, SEVERITY_STYLE[finding.severity]
    title_style = BOLD if view.selected else PLAIN
    title = ("[x] " if view.chosen else "") + finding.title
    gains = gain_texts(finding)
    gain = next((text for text in gains if len(title) + len(text) + 5 <= width), "".join(gains[-1:]))
    gain_style = PLAIN if finding.gain.per == "sample" else GAIN
    if not gain:
        gain, gain_style = kind_text(finding), DIM if finding.origin == "live" or finding.yours else style
    title, room_of_title = printable(title), width - len(gain) - 5
    if 4 < room_of_title < len(title):
        title = wrap(title, room_of_title, 1)[0]  # not within a figure
    pointer = "›" if view.selected else " "
    lines: list[list[StyledText]] = [justify(
        [(pointer, ACCENT), (SEVERITY_MARK[finding.severity] + " ", style), (title, title_style)],
        [(gain + " ", gain_style)], width)]
    if view.unfolded and room > 1:
        culprits = culprits_text(finding, width - 4) if room > 2 else ""
        lines += [[("   " + culprits, PLAIN)]] if culprits else []
        room -= len(lines) - 1
        reason, action = _reason_and_action(finding, width - 6, view.keyed)
        action_lines = wrap(printable(action), width - 6, max(1, room - 2))
        why_room = max(0, room - 1 - len(action_lines))
        if why_room and reason:
            reason_lines = wrap_sentences(view.remark + printable(reason), width - 4, why_room)
            lines += [[("   " + text, DIM)] for text in reason_lines]
        for i, text in enumerate(action_lines):
            lines.append([("   → " if i == 0 else "     ", ACCENT), (text, PLAIN)])
    return _dimmed(lines[:most]) if view.earlier else lines[:most]


def _reason_and_action(finding: Finding, width: int, keyed: bool) -> tuple[str, str]:
    """The sentences below a title. Those of a live finding are one line where they fit, with the key that shows more
    if there is one (``keyed``); its details have the rest."""
    if not finding.brief:
        return finding.why, finding.action
    action = finding.action.partition(". ")[0].removesuffix(".") + "."
    if keyed and finding.unknown:
        action = f"Press {'S' if finding.id in STACKS_TELL else 'c'}: {finding.unknown}"
    together = f"{finding.brief} {action}"
    return ("", together) if len(printable(together)) <= width else (finding.brief, action)


def _dimmed(lines: list[list[StyledText]]) -> list[list[StyledText]]:
    return [[(text, DIM) for text, _ in line] for line in lines]


class ActionsPanel(WheelMoves, DrawnLines, can_focus=True):
    """A list of findings; up and down select, enter asks for the details."""

    BINDINGS: ClassVar[list[BindingType]] = [
        key("up,k", "move(-1)", "up", "select the one above"),
        key("down,j", "move(1)", "down", "select the one below"),
        key("enter", "details", "details", "evidence, code to paste, source"),
        key("w", "choose", "what if", "mark findings: estimate the step with their fixes"),
        key("y", "copy", "copy", "copy its code, or without code itself as Markdown (OSC 52)"),
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
        chosen = self._selected_lines(width, height)
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
        if len(chosen) + len(step) > room:
            step = []
        hint = self._hint_lines(width)
        if len(chosen) + len(hint) + len(self.findings) - 1 + len(step) <= room:  # no other finding makes room for it
            chosen = chosen + hint
        lines = lead
        self._line_ids = [""] * len(lines)
        hidden = 0
        if self.findings:
            finding_lines_shown, hidden = self._finding_lines(width, room - len(step), chosen)
            lines += finding_lines_shown
        step = what_if + step
        room = height - len(step)
        keys = [f"{hidden} more: ↑ ↓"] if hidden > 0 else []
        keys += ["esc: close"] if self.answer else []
        keys += ["enter: details"] if self.findings else ["enter: causes not judged"] if capture.not_judged else []
        keys += ["t: timeline", "T: tables", "B: compare"] if self.capture is not None else []
        keys += ["w: what if"] if self.check_action("choose", ()) else []
        while keys and len("   ".join(keys)) > width - 6:
            keys.pop()
        subtitle = "   ".join(keys)
        if subtitle != (self.border_subtitle or ""):
            self.border_subtitle = subtitle
        if len(lines) <= room:
            lines += [[]] * (room - len(lines)) + step
        self.show(lines[:height])

    def _lead_lines(self, texts: Sequence[str], width: int, height: int) -> list[list[StyledText]]:
        return [[(" " + part, PLAIN)] for text in texts for part in wrap_sentences(printable(text), width - 2, height)]

    def _selected_lines(self, width: int, room: int) -> list[list[StyledText]]:
        """The selected finding, unfolded; no line where there is none."""
        finding = self.selected
        if finding is None:
            return []
        view = msgspec.structs.replace(self._view_of(finding), unfolded=True, selected=self.has_focus, keyed=self.keyed,
                                       remark=self.numbers.remark(finding))
        return finding_lines(finding, width, room, view)

    def _hint_lines(self, width: int) -> list[list[StyledText]]:
        """Hint how to learn the line of Python that the selected finding is about."""
        if self.selected is None or not self.keyed:
            return []
        return [[("   " + text, DIM)] for text in wrap(printable(self.no_line(self.selected)), width - 4, 2) if text]

    def _view_of(self, finding: Finding) -> FindingView:
        """View of a finding that is not selected."""
        return FindingView(finding.id in self.chosen, self._is_earlier(finding))

    def _is_earlier(self, finding: Finding) -> bool:
        return self.capture is not None and self.capture.earlier is not None and finding.origin == "trace"

    def _key(self, finding: Finding) -> str:
        """Id of a finding; the live finding of the same id next to that of an earlier job is another one."""
        return f"earlier {finding.id}" if self._is_earlier(finding) else finding.id

    def _finding_lines(self, width: int, height: int,
                       selected: list[list[StyledText]]) -> tuple[list[list[StyledText]], int]:
        """The findings that fit, the ``selected`` one among them, and how many do not."""
        lines: list[list[StyledText]] = []
        chosen = self.selected
        index = self.findings.index(chosen) if chosen else 0
        if len(selected) > height:
            selected = self._selected_lines(width, height)
        others = min(len(self.findings) - 1, max(0, height - len(selected)))
        first = max(0, min(index, len(self.findings) - 1 - others))
        for i, finding in enumerate(self.findings[first:first + others + 1]):
            shown = selected if first + i == index else finding_lines(finding, width, 1, self._view_of(finding))
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
