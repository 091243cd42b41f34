"""The keys of the monitor. Help and command palette are made from these bindings, the footer names some of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from itertools import chain, zip_longest
from typing import Any

from textual.app import SystemCommand
from textual.binding import Binding, BindingType
from textual.dom import DOMNode
from textual.screen import Screen


def key(keys: str, action: str, title: str, sentence: str, footer: bool = False, priority: bool = False) -> Binding:
    """A binding: ``title`` is its name in the footer and the command palette, ``sentence`` says what it does.

    ``footer``: it is named in the line at the bottom of the screen.
    """
    # Textual's footer has a sign for enter that few know, and that ASCII has not.
    return Binding(keys, action, title, footer, "enter" if keys.split(",")[0] == "enter" else None,
                   tooltip=sentence, priority=priority)


def up_and_down(what: str) -> list[Binding]:
    """The keys of a list that select the one above or below; ``what`` a line of it is."""
    return [key("up,k", "move(-1)", "up", f"select the {what} above"),
            key("down,j", "move(1)", "down", f"select the {what} below")]


GROUPS: dict[str, list[Binding]] = {
    "Capture": [
        key("c", "capture", "capture a trace", "capture a trace and analyze it"),
        key("C", "capture(True)", "capture at full length", "capture at full length, without a short test first"),
        key("x", "stop_capture", "stop the capture", "stop the capture and keep its data"),
        key("a", "attach", "attach to a profiler server", "attach to HOST:PORT"),
        key("D", "next_job", "fix the demo's job", "in the demo: restart the job with or without the fix"),
    ],
    "Results": [
        key("r", "recommendations", "what to do", "go to What to do; enter: details"),
        key("t", "open('timeline')", "timeline", "timeline: GPUs, host threads, idle gaps"),
        key("T", "open('tables')", "tables", "tables: kernels, memory, layers, input"),
        key("J", "open('captures')", "captures", "all captures: open, compare, delete"),
        key("A", "open('mark')", "mark as A", "mark the capture as A, before a change"),
        key("B", "open('comparison')", "compare with A", "compare: what changed since A"),
        key("s", "open('snapshot')", "snapshot", "save a snapshot for a ticket: HTML, JSON, text"),
    ],
    "Time": [
        key("m", "metric(1)", "next metric", "show the next metric in the lanes"),
        key("M", "metric(-1)", "previous metric", "show the previous metric in the lanes"),
        key("v", "cursor", "time cursor", "time cursor: show values at a past moment"),
        key("left", "scroll(-1)", "scroll back", "scroll back, or move the cursor (v) back"),
        key("right", "scroll(1)", "scroll forward", "scroll forward, or move the cursor (v) forward"),
        key("shift+left", "cursor(-10)", "cursor back", "move the cursor ten slices back"),
        key("shift+right", "cursor(10)", "cursor forward", "move the cursor ten slices forward"),
        key("left_square_bracket", "zoom(1)", "zoom out", "show more time"),
        key("right_square_bracket", "zoom(-1)", "zoom in", "show less time"),
        key("end", "scroll_to_now", "back to now", "back to now"),
        key("escape", "step_back", "step back", "go back to now, or show all processes again"),
        key("p,space", "pause", "freeze", "freeze the screen while sampling continues; in a replay: pause"),
        key("plus,equals_sign", "interval(-1)", "sample more often", "sample, or replay, faster"),
        key("minus", "interval(1)", "sample less often", "sample, or replay, slower"),
        key("comma", "seek(-60)", "back in the recording", "go a minute back in a replay"),
        key("full_stop", "seek(60)", "forward in the recording", "go a minute forward in a replay"),
    ],
    "View": [
        key("h", "open('host')", "host", "host: cores, memory, limits"),
        key("i", "open('job')", "job", "job: profiler servers, step period"),
        key("question_mark,f1", "help", "help", "show the keys of this screen"),
        key("q", "quit", "quit", "quit; a running capture is stopped, and its data is kept"),
        key("ctrl+c", "quit", "quit", "quit; a running capture is stopped, and its data is kept", priority=True),
        key("ctrl+z", "suspend_process", "suspend", "suspend to the shell; fg resumes gputop"),
    ],
    "Processes": [
        key("slash", "filter", "filter processes", "show only processes that match a text"),
        key("o", "sort", "sort processes", "sort by the next column"),
        key("S", "open('stacks')", "stacks", "stacks: the line of code where each rank is"),
    ],
}
MONITOR: list[BindingType] = [binding for group in GROUPS.values() for binding in group]
_RANKS = {binding.action: rank for rank, binding in enumerate(chain.from_iterable(GROUPS.values()))}

# The line at the bottom of the monitor by what one does: keys and what is said of them. The last two always fit.
_ALWAYS = (("question_mark", "help"), ("q", "quit"))
FOOTERS: dict[str, tuple[tuple[str, str], ...]] = {
    "start": (("S", "stacks"), ("c", "capture"), ("a", "attach"), ("J", "captures"), ("l", "output"),
              ("R", "restart"), ("m", "metric"), ("v", "cursor"), ("s", "snapshot"), ("h", "host"), ("p", "freeze"),
              *_ALWAYS),
    "waiting": (("escape", "capture now"), ("x", "cancel"), ("l", "output"), ("m", "metric"), ("v", "cursor"),
                ("h", "host"), ("i", "job"), *_ALWAYS),
    "capturing": (("x", "stop"), ("l", "output"), ("m", "metric"), ("v", "cursor"), ("h", "host"), ("i", "job"),
                  *_ALWAYS),
    "captured": (("S", "stacks"), ("c", "capture again"), ("t", "timeline"), ("T", "tables"), ("D", "fix"),
                 ("J", "captures"), ("R", "restart"), ("l", "output"), ("B", "compare"), ("s", "snapshot"),
                 ("m", "metric"), ("v", "cursor"), ("p", "freeze"), *_ALWAYS),
    "cursor": (("left,right", "move"), ("left_square_bracket,right_square_bracket", "zoom"), ("escape", "back to now"),
               ("m", "metric"), ("shift+left,shift+right", "ten slices"), *_ALWAYS),
    "past": (("left,right", "scroll"), ("left_square_bracket,right_square_bracket", "zoom"),
             ("escape", "back to now"), ("v", "cursor"), ("m", "metric"), *_ALWAYS),
    "replay": (("p", "pause"), ("plus,minus", "speed"), ("comma,full_stop", "a minute"), ("left,right", "scroll"),
               ("v", "cursor"), ("m", "metric"), *_ALWAYS),
    "snapshot": (("left,right", "scroll"), ("t", "its capture"), ("T", "tables"), ("v", "cursor"), ("m", "metric"),
                 *_ALWAYS),
    "Processes": (("enter", "details"), ("K", "signal"), ("v", "tree"), ("o", "sort"), ("slash", "filter"),
                  ("tab", "next panel"), *_ALWAYS),
    "GPUs": (("enter", "details"), ("m", "metric"), ("v", "cursor"), ("left,right", "scroll"),
             ("left_square_bracket,right_square_bracket", "zoom"), ("tab", "next panel"), *_ALWAYS),
}

# Findings of which the stacks of the ranks tell the cause: S is named while there is one.
STACKS_TELL = frozenset({"collective_hang", "spinning", "idle_gpu", "slow_rank"})

# Actions that change the main screen; they have no effect while another screen covers it.
MAIN_VIEW_ACTIONS = frozenset({"metric", "interval", "scroll", "scroll_to_now", "zoom", "seek", "sort",
                               "filter", "cursor", "recommendations", "step_back"})

_NUMBER = re.compile(r"\(-?\d+\)$")
_MAX_KEYS, _MAX_DIFFERING_WORDS = 4, 6
_NAMES = {"plus": "+", "equals_sign": "=", "minus": "-", "left_square_bracket": "[", "right_square_bracket": "]",
          "comma": ",", "full_stop": ".", "slash": "/", "question_mark": "?", "left": "←", "right": "→", "up": "↑",
          "greater_than_sign": ">", "less_than_sign": "<", "left_curly_bracket": "{", "right_curly_bracket": "}",
          "down": "↓", "escape": "esc", "delete": "del", "pageup": "pgup", "pagedown": "pgdn"}


def name(key: str) -> str:
    """A key as the help names it: "plus" is +, "left" is ←."""
    *modifiers, last = key.split("+")
    return "+".join((*modifiers, _NAMES.get(last, last)))


def bindings(screen: Screen[Any]) -> Iterator[tuple[list[str], Binding, DOMNode]]:
    """The active keys of a screen by action: those of the focused widget, of the screen and of the app."""
    by_action: dict[tuple[DOMNode, str], tuple[list[str], Binding, DOMNode]] = {}
    for key_, active in screen.active_bindings.items():
        if active.binding.tooltip and active.enabled:
            entry = by_action.setdefault((active.node, active.binding.action), ([], active.binding, active.node))
            entry[0].append(name(key_))
    yield from by_action.values()


def key_groups(screen: Screen[Any]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """The same under headings, as keys and what they do, with the keys of the panels that are not focused.

    On the monitor they are grouped by use, and its panels come last; on a screen with keys of its own those are first.
    """
    here: dict[DOMNode, list[tuple[list[str], Binding]]] = {}
    for keys, binding, node in bindings(screen):
        here.setdefault(node, []).append((keys, binding))
    everywhere, of_screen = here.pop(screen.app, []), here.pop(screen, [])
    if of_screen:
        yield "This screen", _folded(of_screen)
    everywhere.sort(key=lambda line: _rank(line[1]))
    for title, group in GROUPS.items():
        actions = {binding.action for binding in group}
        lines = [line for line in everywhere if line[1].action in actions]
        # What Textual and the terminal add is about the view.
        lines += [line for line in everywhere if line[1].action not in _RANKS] if title == "View" else []
        if lines:
            yield title, _folded(lines)
    for node, lines in here.items():
        if node in screen.focus_chain:
            yield f"{_panel(node)}, where you are", _folded(lines)
    for widget in screen.focus_chain:
        keyed = [b for b in type(widget).BINDINGS if isinstance(b, Binding) and b.tooltip]
        if widget not in here and keyed:
            yield f"{_panel(widget)} (tab)", _folded([([name(k) for k in b.key.split(",")], b) for b in keyed])


def _rank(binding: Binding) -> int:
    """Place among the keys of the monitor; what Textual and the terminal add comes last."""
    return _RANKS.get(binding.action, len(_RANKS))


def _folded(lines: list[tuple[list[str], Binding]]) -> list[tuple[str, str]]:
    """One line for two keys that do the same to and fro: "select the one above or below"."""
    out: list[tuple[str, str]] = []
    before: tuple[list[str], Binding] | None = None
    for keys, binding in lines:
        keys = sorted(keys, key=lambda key: len(key) if key != "esc" else 1)  # what is typed most easily first
        if before is not None and _function(before[1]) == _function(binding) != binding.action:
            both = [k for pair in zip_longest(before[0], keys) for k in pair if k]
            out[-1] = (" ".join(both[:_MAX_KEYS]), _both(before[1].tooltip, binding.tooltip))
            before = None
        else:
            text = binding.tooltip  # Textual's own sentences begin with a capital
            out.append((" ".join(keys[:_MAX_KEYS // 2]), text[:1].lower() + text[1:] if text[1:2].islower() else text))
            before = keys, binding
    return out


def _function(binding: Binding) -> str:
    """The action without a number: "move(-1)" and "move(1)" are the same."""
    return _NUMBER.sub("()", binding.action)


def _common(a: list[str], b: list[str]) -> int:
    """Number of words at the beginning that are the same."""
    return next((i for i, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), min(len(a), len(b)))


def _both(first: str, second: str) -> str:
    """Two sentences in one, what both have said once: "a minute back" and "a minute on" is "a minute back or on"."""
    a, b = first.split(" "), second.split(" ")
    same = _common(a, b)
    tail = _common(a[same:][::-1], b[same:][::-1])
    one, other = a[same:len(a) - tail], b[same:len(b) - tail]
    if len(one) + len(other) > _MAX_DIFFERING_WORDS:
        return f"{first}; {second}"
    return " ".join([*a[:same], *one, "or", *other, *a[len(a) - tail:]] if one and other else a)


def _panel(node: DOMNode) -> str:
    return str(getattr(node, "PANEL", "This"))


def commands(screen: Screen[Any]) -> Iterator[SystemCommand]:
    """Every key of the screen and of its focused widget, as commands of the palette, by use."""
    keyed = [one for one in bindings(screen) if not one[1].action.startswith("move(")]  # nobody types "up"
    screen_has_keys = any(node is screen for _, _, node in keyed)

    def rank(one: tuple[list[str], Binding, DOMNode]) -> int:
        if one[2] is not screen.app:
            return -1 if screen_has_keys else len(_RANKS)
        return _rank(one[1])

    for keys, binding, node in sorted(keyed, key=rank):
        yield SystemCommand(binding.description[:1].upper() + binding.description[1:],
                            f"{binding.tooltip} · key {' or '.join(keys)}",
                            partial(screen.app.run_action, binding.action, node))
