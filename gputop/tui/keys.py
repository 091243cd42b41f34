"""The keys of the monitor. Footer, help and command palette are all made from these bindings."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from textual.app import SystemCommand
from textual.binding import Binding, BindingType
from textual.dom import DOMNode
from textual.screen import Screen


def key(keys: str, action: str, title: str, sentence: str, footer: bool = False, priority: bool = False) -> Binding:
    """A binding: ``title`` is its name in the footer and the command palette, ``sentence`` says what it does.

    ``footer``: it is named in the line at the bottom of the screen.
    """
    return Binding(keys, action, title, footer, tooltip=sentence, priority=priority)


MONITOR: list[BindingType] = [
    key("c", "capture", "capture", "capture a trace from the job's profiler server and analyze it", footer=True),
    key("C", "capture(True)", "capture all that is asked",
        "the same without the probe that shortens it for the job's sake"),
    key("x", "stop_capture", "stop capture", "end the running capture, keeping what it has"),
    key("t", "last_capture", "timeline", "the last capture in time: GPUs, host threads, steps, idle gaps",
        footer=True),
    key("T", "open('tables')", "tables", "the last capture as tables: kernels, collectives, memory, copies, functions"),
    key("A", "open('mark')", "mark A", "mark the last capture as A, to compare later ones with it"),
    key("B", "open('comparison')", "compare", "what changed since A, noise or not, and what the advice brought"),
    key("h", "open('host')", "host", "the host in full: cores, memory, disk, network, the job's limits, who uses most"),
    key("J", "open('captures')", "captures", "the captures of this session and on disk: open, compare, delete"),
    key("i", "open('job')", "job", "the job: its profiler servers and its step period"),
    key("r", "recommendations", "recommendations", "go to what to do; ↑ ↓ select, enter opens the details"),
    key("s", "snapshot", "snapshot", "write a snapshot: json, text, svg and an html page for a ticket", footer=True),
    key("m", "metric(1)", "metric", "next metric in the main lane", footer=True),
    key("a", "attach", "attach", "attach to a profiler server, HOST:PORT", footer=True),
    key("M", "metric(-1)", "previous metric", "previous metric in the main lane"),
    key("plus,equals_sign", "interval(-1)", "faster", "sample more often; in a replay, play faster"),
    key("minus", "interval(1)", "slower", "sample less often; in a replay, play slower"),
    key("space", "pause", "pause", "hold the screen, sampling goes on; in a replay, hold that"),
    key("v", "cursor", "cursor", "put a cursor in time: the figures are those of the slice under it; again: off"),
    key("shift+left", "cursor(-10)", "cursor back", "the cursor ten slices back"),
    key("shift+right", "cursor(10)", "cursor on", "the cursor ten slices on"),
    key("left", "scroll(-1)", "back in time", "scroll into the past; with the cursor on, a slice back"),
    key("right", "scroll(1)", "forward in time", "scroll back towards now; with the cursor on, a slice on"),
    key("end", "scroll_to_now", "back to now", "follow the newest samples again"),
    key("left_square_bracket", "zoom(1)", "more time", "zoom out: show more time"),
    key("right_square_bracket", "zoom(-1)", "less time", "zoom in: show less time"),
    key("comma", "seek(-60)", "back in the recording", "a minute back in a replay"),
    key("full_stop", "seek(60)", "on in the recording", "a minute on in a replay"),
    key("o", "sort", "sort", "sort the processes by the next column"),
    key("slash", "filter", "filter processes", "show only the processes that match a text"),
    key("question_mark", "help", "help", "the keys of the screen you are on, and how to read it", footer=True),
    key("q", "quit", "quit", "end gputop; a running capture is ended first and its data kept", footer=True),
    key("ctrl+c", "quit", "quit", "end gputop; a running capture is ended first and its data kept", priority=True),
    key("ctrl+z", "suspend_process", "suspend", "put gputop in the background of the shell; fg brings it back"),
]


# Actions that change the main screen; they have no effect while another screen covers it.
MAIN_VIEW_ACTIONS = frozenset({"metric", "interval", "pause", "scroll", "scroll_to_now", "zoom", "seek", "sort",
                               "filter", "cursor", "recommendations"})

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
    found: dict[tuple[DOMNode, str], tuple[list[str], Binding, DOMNode]] = {}
    for key_, active in screen.active_bindings.items():
        if active.binding.tooltip and active.enabled:
            entry = found.setdefault((active.node, active.binding.action), ([], active.binding, active.node))
            entry[0].append(name(key_))
    yield from found.values()


def key_groups(screen: Screen[Any]) -> Iterator[tuple[str, list[tuple[list[str], Binding]]]]:
    """The same under headings, with the keys of the panels that are not focused.

    The monitor's keys come first, on a screen with keys of its own last.
    """
    here: dict[DOMNode, list[tuple[list[str], Binding]]] = {}
    for keys, binding, node in bindings(screen):
        here.setdefault(node, []).append((keys, binding))
    order = {binding.action: i for i, binding in enumerate(MONITOR) if isinstance(binding, Binding)}
    everywhere = sorted(here.pop(screen.app, []), key=lambda line: order.get(line[1].action, len(order)))
    own = here.pop(screen, [])
    if everywhere and not own:
        yield "Everywhere", everywhere
    for node, lines in here.items():
        if node in screen.focus_chain:
            yield f"{_panel(node)}, where you are", lines
    for widget in screen.focus_chain:
        keyed = [b for b in type(widget).BINDINGS if isinstance(b, Binding) and b.tooltip]
        if widget not in here and keyed:
            yield f"{_panel(widget)} (tab)", [([name(k) for k in b.key.split(",")], b) for b in keyed]
    if own:
        yield "This screen", own
        if everywhere:
            yield "Everywhere", everywhere


def _panel(node: DOMNode) -> str:
    return str(getattr(node, "PANEL", "This"))


def commands(screen: Screen[Any]) -> Iterator[SystemCommand]:
    """Every key of the screen and of its focused widget, as commands of the palette."""
    for keys, binding, node in bindings(screen):
        yield SystemCommand(binding.description[:1].upper() + binding.description[1:],
                            f"{binding.tooltip} · key {' or '.join(keys)}",
                            partial(screen.app.run_action, binding.action, node))
