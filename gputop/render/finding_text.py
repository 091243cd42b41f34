"""Short texts about findings, the same on the screen and in every export."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from gputop.core.findings import ABOUT, CombinedGain, Culprit, Finding, with_cures
from gputop.render.styled_text import wrap_sentences
from gputop.text.markup import as_code, without_marks
from gputop.text.units import percent, printable, ranges, seconds, wrap

PROFILE_KERNEL = "Look at its longest kernel with Nsight Compute:"
NOTHING_FOUND = "No findings."
BY_TRACER = ", from the trace's own tracer"  # behind "In Python"
_SHOWN_CULPRITS = 3
_NAMED_BY_WHY = ("retracing", "allocation_in_steps")
_CLAIMS = {"measured": "", "at most": "up to ", "at least": "at least ", "about": "about "}
_STEP_CLAIMS = {"at most": " at best", "at least": " or less"}  # behind the step time with the fix
_BOUNDS = {"at most": "an upper bound", "at least": "a lower bound", "about": "a typical value"}
_LEADS = {"launch_bound": "Waits for launches of "}  # of findings whose times are not those that the culprits take


def gain_texts(finding: Finding) -> tuple[str, ...]:
    """Effect of the fix, longest text first: "fix: 344 → 184 ms at best", "344 → 184 ms at best"; without a step
    "fix saves up to 13% of the time". None where there is no estimate."""
    gain = finding.gain
    share, times = gain.step_time, _times(gain.before_s, gain.after_s)
    if not share or share < 0.005 or gain.claim is None:
        return ()
    if times:
        text = times + _STEP_CLAIMS.get(gain.claim, "")
        return (f"fix: {text}", text) if gain.claim != "about" else (f"fix: about {times}", f"about {times}")
    per = {"sample": "per training sample", "recording": "of the time", "step": "of the step"}[gain.per]
    text = f"saves {_CLAIMS[gain.claim]}{percent(share)}"
    return f"fix {text} {per}", text if gain.per != "sample" else f"{text} per sample"


def _times(before_s: float | None, after_s: float | None) -> str:
    """The step time of today and with the gain: "344 → 184 ms"; "" where it is not known."""
    if before_s is None or after_s is None:
        return ""
    before, after = seconds(before_s), seconds(after_s)
    if before.split()[-1:] == after.split()[-1:]:
        before = before.split()[0]
    return f"{before} → {after}"


def what_if_text(findings: Iterable[Finding], chosen: Collection[str], what_if: Iterable[CombinedGain]) -> str:
    """Text on the step with the fixes of the chosen findings, and the other finding that saves most then."""
    head = f"With these {len(chosen)} fixes:" if len(chosen) > 1 else "With this fix:"
    several = tuple(findings)
    share, others = with_cures(several, chosen, what_if)
    if share is None:
        return f"{head} not computed"
    less = f"{percent(share)} less"
    step_s = next((f.gain.before_s for f in several if f.id in chosen and f.gain.before_s is not None), None)
    text = f"{head} {less} of the step" if step_s is None else (
        f"{head} {_times(step_s, step_s * (1 - share))} ({less})")
    if others is None:
        return text
    if not others:
        return f"{text}. No other fix adds anything."
    following, more = others[0]
    return f"{text}; next: {following.title} ({percent(more)} more)"


def kind_text(finding: Finding) -> str:
    """Text where there is no estimate: that a rule is the user's own, or live, else its severity."""
    return "yours" if finding.yours else "live" if finding.origin == "live" else finding.severity


def gain_text(finding: Finding) -> str:
    """The longest of :func:`gain_texts`; empty where there is no estimate."""
    return next(iter(gain_texts(finding)), "")


def gain_basis(finding: Finding) -> str:
    """Basis of the estimated saving and its assumption, in sentences."""
    gain = finding.gain
    if gain.by is None:
        return gain.how
    basis = "Estimated by replaying the recorded steps" if gain.by == "replay" else ""
    if gain.claim in _BOUNDS and (gain.by != "replay" or gain.claim == "at least"):
        basis = f"{basis}, as {_BOUNDS[gain.claim]}" if basis else f"The estimate is {_BOUNDS[gain.claim]}"
    if gain.claim == "about" and gain.step_time:
        basis += f" ({percent(gain.step_time * (1 - ABOUT))} to {percent(min(gain.step_time * (1 + ABOUT), 1.0))})"
    text = f"{basis}. {gain.assumption}"
    if gain.together is not None and gain.step_time is not None and gain.together > gain.step_time:
        text += f" Together with the fixes above, the saving is {percent(gain.together)}."
    return text


def gain_sentence(finding: Finding) -> str:
    """The basis of a saving that the head names: "An upper bound. …"; else "Saves nothing: this explains a value" or
    "Saving not estimated: …"."""
    reason = gain_basis(finding)
    if gain_text(finding):
        return reason
    nothing = reason.removeprefix("none: ")
    return f"Saving not estimated: {reason}" if nothing == reason else f"Saves nothing: {nothing}"


def culprits_text(finding: Finding) -> str:
    """Culprits of the finding by name: "Only on GPU 0: teacher/* 159 ms, compute_metrics/* 27 ms per step, and 14 more
    ops"; empty where no name is known, or where the finding's own words say all of it."""
    named = [culprit for culprit in finding.culprits if culprit.name]
    if not named or named[0].kind == "stage" or finding.id in _NAMED_BY_WHY:
        return ""
    scope, shown = _within(named[:_SHOWN_CULPRITS])
    first = shown[0]
    by_gpu: dict[tuple[int, ...], list[str]] = {}
    for culprit in shown:
        by_gpu.setdefault(culprit.only_on or first.only_on, []).append(_name_and_time(culprit))
    text = _where(finding, shown) + (f" in {scope}" if scope else "") + f": {', '.join(by_gpu.pop(first.only_on))}"
    for gpus, parts in by_gpu.items():
        text += f"; only on GPU {ranges(gpus)}: {', '.join(parts)}"
    if first.time_s is not None:
        text += " in the window" if first.per == "window" else f" per {printable(first.per)}"
    more = sum(culprit.names for culprit in finding.culprits[len(shown):])
    if more:
        text += f", and {more} more"
        if first.kind in ("layer", "op"):
            text += " op" if more == 1 else " ops"
    return text


def _within(several: Sequence[Culprit]) -> tuple[str, list[Culprit]]:
    """The scope that all of several are in ("": none), and them with the rest of their names."""
    parts = [printable(culprit.name).split("/") for culprit in several]
    same = 0
    if len(parts) > 1:
        while all(len(scopes) > same + 1 + (scopes[-1] == "*") and scopes[same] == parts[0][same] for scopes in parts):
            same += 1
    return "/".join(parts[0][:same]), [
        replace(culprit, name="/".join(scopes[same:])) for culprit, scopes in zip(several, parts, strict=True)]


def _where(finding: Finding, shown: Sequence[Culprit]) -> str:
    """Location or kind of the culprits: "Only on GPU 0", "On the host", "Layers and ops"."""
    first = shown[0]
    if first.only_on:
        return f"Only on GPU {ranges(first.only_on)}"
    if first.more_on:
        return f"Longer on GPU {ranges(first.more_on)} than on the others"
    if first.kind == "host":
        return "On the host"
    if first.kind == "line":
        return "In Python" + (BY_TRACER if first.traced else "")
    kinds = " and ".join(f"{kind}s" for kind in dict.fromkeys(culprit.kind for culprit in shown))
    return _LEADS[finding.id] + kinds if finding.id in _LEADS else kinds.capitalize()


def _name_and_time(culprit: Culprit) -> str:
    text = printable(culprit.name)
    if culprit.time_s is not None:
        text += f" {'+' if culprit.more_on else ''}{seconds(culprit.time_s)}"
    return text + (f" ({printable(culprit.source)})" if culprit.source else "")


DO, WHY = "Do", "Why"
_INDENT = 8  # of texts and code
_IN_PYTHON = "In Python: "
_WORD = re.compile(r"\(?[A-Z]?[a-z]+(?:['’-][a-z]*)*\)?[,:;]?")  # no name: no dot, underscore, capitals
_UNITS = ("ms", "s", "min", "h")


class VerdictRow(Struct, frozen=True):
    """A labeled text of a verdict, with the code that belongs to it."""

    label: str  # Do, Why, Line, Where, Seen, From; five letters at most
    text: str
    code: str = ""


class VerdictLines(Struct, frozen=True):
    """A verdict as lines in the order in which they are read: the head, what to do, why, which line, and where it is
    from. The console, the panel, the page, the picture and Markdown lay it out."""

    head: str  # what is wrong, with its share: "Input wait takes 48% of the step"; or "NO VERDICT"
    about: str = ""  # behind a head that is no sentence: "10 steps seen, 20 needed"
    fix: str = ""  # what the fix brings: "fix: 95 → 49 ms at best"
    rule: str = ""
    rows: tuple[VerdictRow, ...] = ()

    @property
    def text(self) -> str:
        """The verdict as a text of one line for its head and one for each row."""
        head = f"{self.head}: {self.about}" if self.about else self.head
        return "\n".join([head, *(f"{row.label}: {row.text}" for row in self.rows)])


def verdict_of(finding: Finding, *more: VerdictRow) -> VerdictLines:
    """The lines of a finding. Texts may come from outside: who draws them makes them printable."""
    rows = [VerdictRow(DO, finding.action, finding.snippet or ""), VerdictRow(WHY, finding.why), *where_rows(finding),
            *more]
    return VerdictLines(finding.title, "", gain_text(finding), finding.id + (", yours" if finding.yours else ""),
                        tuple(row for row in rows if row.text))


def where_rows(finding: Finding) -> list[VerdictRow]:
    """The row of the lines, ops or layers that the finding is about."""
    text = culprits_text(finding)
    if text.startswith(_IN_PYTHON):
        return [VerdictRow("Line", text.removeprefix(_IN_PYTHON))]
    return [VerdictRow("Where", text)] if text else []


def kernel_rows(finding: Finding) -> list[VerdictRow]:
    """The row with the command that has Nsight Compute profile the finding's longest kernel."""
    return [VerdictRow("Then", PROFILE_KERNEL, finding.ncu)] if finding.ncu else []


def plain_lines(verdict: VerdictLines, width: int, first: str = "", *, loud: bool = False,
                most: int | None = None) -> Iterator[str]:
    """The verdict as plain text of at most ``width`` columns, but for code and names. ``first`` stands before the head.
    ``loud``: the head in capitals, as there is no other type. ``most`` lines of a reason, by whole sentences; what to
    do is never cut."""
    head = _in_capitals(verdict.head) if loud else verdict.head
    lines = wrap(f"{head}  {verdict.about}" if verdict.about else head, width, first)
    behind = "  ".join(filter(None, (verdict.fix, f"[{verdict.rule}]" if verdict.rule else "")))
    if behind and len(lines[-1]) + 4 + len(behind) <= width:
        lines[-1] += f"    {behind}"
    elif behind:
        lines += wrap(behind, width, " " * max(2, len(first)))
    yield from lines
    for row in verdict.rows:
        label = f"  {row.label:<{_INDENT - 2}}"
        if most is None or row.label == DO:
            yield from wrap(row.text, width, label)
        else:
            text = wrap_sentences(printable(row.text), width - _INDENT, most)
            yield from (f"{' ' * _INDENT if i else label}{line}" for i, line in enumerate(text))
        yield from (" " * _INDENT + printable(line) for line in row.code.splitlines())


def _in_capitals(head: str) -> str:
    """The words up to a share in capitals; names and units stay as they are written."""
    words, sign, share = head.partition("%")
    return " ".join(word.upper() if _WORD.fullmatch(word) and word not in _UNITS else word
                    for word in words.split(" ")) + sign + share


def finding_markdown(finding: Finding, *, simulated: bool = False) -> str:
    """The verdict's lines with the code, and the evidence. Names come from outside: what Markdown or a chat would take
    for a mark or a mention stands as code."""
    from gputop.render.evidence_words import evidence

    verdict = verdict_of(finding, *kernel_rows(finding))
    gpus = f"GPU {ranges(finding.gpus)}" if finding.gpus else ""
    about = ", ".join(filter(None, (finding.severity, gpus, verdict.fix)))
    lines = [f"**{without_marks(verdict.head)}** ({about}){' SIMULATED' * simulated}"]
    for row in verdict.rows:
        lines += ["", f"{row.label}: {without_marks(row.text)}"]
        if row.code:
            fence = "`" * (max(map(len, re.findall("`+", row.code)), default=0) + 3)
            lines += ["", fence, *map(printable, row.code.splitlines()), fence]
    figures = [f"- {without_marks(label)}: {without_marks(value)}" for label, value in evidence(finding)]
    lines += ["", *figures] if figures else []
    return "\n".join([*lines, "", f"gputop, rule {as_code(printable(finding.id))}"]) + "\n"
