"""The processes that hold GPUs, sorted and filtered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from msgspec import Struct
from textual import events
from textual.binding import BindingType
from textual.content import Content
from textual.message import Message

from gputop.core.samples import ProcessSample
from gputop.render.palette import ACCENT, BOLD, DIM, PLAIN
from gputop.render.styled_text import StyledText
from gputop.text.commands import short_command
from gputop.text.units import bytes_, devices, fit, printable, rate, ratio
from gputop.tui.keys import key as bind
from gputop.tui.widgets.cached_lines import DrawnLines

SORTS = ("gpu memory", "sm", "cpu", "pid")
_SORTS_WITHOUT_GPU = ("pid", "cpu")
# From these widths of the panel on, these columns are shown beside the command.
_IO_FROM, _CONTAINER_FROM = 100, 110
_CONTAINER_WIDTH = 23  # "containerd 0123456789ab"


def arrange(processes: Iterable[ProcessSample], sort: str, pattern: str) -> list[ProcessSample]:
    """Those whose pid, user, container or command holds ``pattern``, largest first (pids ascending)."""
    wanted = pattern.casefold()
    kept = [p for p in processes if not wanted
            or wanted in f"{p.pid} {p.user or ''} {p.container or ''} {p.command or ''}".casefold()]
    keys = {"gpu memory": lambda p: p.gpu_memory_bytes, "sm": lambda p: p.mean_sm_ratio,
            "cpu": lambda p: p.cpu_cores.value}
    if sort == "pid":
        return sorted(kept, key=lambda p: p.pid)
    key = keys[sort]
    return sorted(kept, key=lambda p: (-(key(p) if key(p) is not None else -1.0), p.pid))


class Branch(Struct, frozen=True):
    """A line of the table: a process, or the parent of several that holds no GPU itself."""

    process: ProcessSample | None
    lead: str = ""  # the tree's lines before the command
    parent_pid: int | None = None


def tree(processes: Sequence[ProcessSample]) -> list[Branch]:
    """Children under their parents, in the given order. Children of a parent that is not listed stand under its PID."""
    listed = {p.local_pid or p.pid: p for p in processes}
    children: dict[int | None, list[ProcessSample]] = {}
    for p in processes:
        children.setdefault(p.parent_pid, []).append(p)
    out: list[Branch] = []
    seen: set[int] = set()

    def add(p: ProcessSample, before: str, knot: str) -> None:
        pid = p.local_pid or p.pid
        if pid in seen:  # PIDs of two namespaces can form a ring
            return
        seen.add(pid)
        out.append(Branch(p, before + knot))
        below = [c for c in children.get(pid, []) if c is not p]
        deeper = before + {"": "", "├ ": "│ ", "└ ": "  "}[knot]
        for i, child in enumerate(below):
            add(child, deeper, "└ " if i == len(below) - 1 else "├ ")

    for p in processes:
        if p.parent_pid in listed and p.parent_pid != (p.local_pid or p.pid):
            continue
        siblings = children[p.parent_pid]
        if p.parent_pid is None or p.parent_pid <= 1 or len(siblings) < 2:
            add(p, "", "")
        elif p is siblings[0]:
            out.append(Branch(None, "", p.parent_pid))
            for i, child in enumerate(siblings):
                add(child, "", "└ " if i == len(siblings) - 1 else "├ ")
    for p in processes:  # those of a ring
        add(p, "", "")
    return out


class ProcessPanel(DrawnLines, can_focus=True):
    """A table of processes; up and down select, enter asks for the details."""

    BINDINGS: ClassVar[list[BindingType]] = [
        bind("up,k", "move(-1)", "up", "select the process above"),
        bind("down,j", "move(1)", "down", "select the process below"),
        bind("enter", "details", "details of the process", "the whole command, GPUs, CPU, I/O"),
        bind("K", "signal", "signal…", "send a signal, after a question"),
        bind("v", "tree", "tree", "show children under their parents, or one list"),
    ]
    PANEL = "Processes"

    class Opened(Message):
        """The details of a process are wanted, or a signal is to be sent to it."""

        def __init__(self, process: ProcessSample, signal: bool = False) -> None:
            super().__init__()
            self.process, self.signal = process, signal

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._sorts: tuple[str, ...] = SORTS
        self.sort = SORTS[0]
        self.pattern = ""
        self.as_tree = False
        self.selected_pid: int | None = None
        self._top = self._heads = 0
        self._rows: list[Branch] = []
        self._processes: tuple[ProcessSample, ...] = ()
        self._attached_pids: frozenset[int] = frozenset()
        self._reason = ""
        self._titles = ("", "")

    @property
    def selected(self) -> ProcessSample | None:
        """The selected process; the first one if the selected one no longer exists."""
        shown = [b.process for b in self._rows if b.process is not None]
        return next((p for p in shown if p.pid == self.selected_pid), shown[0] if shown else None)

    def update_view(self, processes: tuple[ProcessSample, ...], attached: frozenset[int],
                    reason: str = "") -> None:
        """``attached`` are pids with a profiler server; ``reason`` why no process is listed, should there be none."""
        self._processes, self._attached_pids, self._reason = processes, attached, reason
        self.draw()

    def draw(self) -> None:
        width, height = self.size.width, self.size.height
        if width <= 0 or height <= 0:
            return
        # On a node without GPUs their columns would say N/A, of which nothing can be learned.
        on_gpus = not self._processes or any(p.gpus for p in self._processes)
        self._sorts = SORTS if on_gpus else _SORTS_WITHOUT_GPU
        self.sort = self.sort if self.sort in self._sorts else self._sorts[0]
        found = arrange(self._processes, self.sort, self.pattern)
        rows = self._rows = tree(found) if self.as_tree else [Branch(p) for p in found]
        title = "Processes" + (f" matching “{printable(self.pattern)}”" if self.pattern else "")
        self._heads = heads = 0 if self.has_class("bare") else min(1, height - 1)
        room, hidden = height - heads, len(rows) - (height - heads)
        subtitle = ((f"{hidden} more: ↑ ↓   " if hidden > 0 else "") + ("tree, " if self.as_tree else "")
                    + f"sorted by {self.sort}")
        if (title, subtitle) != self._titles:  # setting them repaints the border
            self._titles = (title, subtitle)
            self.border_title, self.border_subtitle = Content(title), subtitle  # as Content: the pattern is not markup
        # The command is what tells processes apart: the other columns take what they need and no more.
        pid_width = max([5, *(len(str(p.pid)) for p in found)])
        gpu_width = max([3, *(len(devices(p)) for p in found)]) if on_gpus else 0
        user_width = 9 if width >= 60 else 0
        io_width = 9 if width >= _IO_FROM else 0
        named = [len(printable(p.container)) for p in found if p.container] if width >= _CONTAINER_FROM else []
        container_width = min(_CONTAINER_WIDTH, max([9, *named])) if named else 0
        head = (f" {'pid':>{pid_width}} {'user':<9}"[:pid_width + 2 + user_width]
                + (f"{'GPU':<{gpu_width}} {'mem':>5} {'sm':>4}" if on_gpus else f"{'RAM':>5}") + f" {'cpu':>5}"
                + (f" {'I/O':>{io_width}}" if io_width else "")
                + (f"  {'container':<{container_width}}" if container_width else "") + "  command")
        lines: list[list[StyledText]] = [[(fit(head, width), DIM)]][:heads]
        if not rows:
            text = "no process matches the filter: / changes it" if self.pattern and self._processes else self._reason
            lines.append([(fit(" " + printable(text), width), DIM)])
        chosen = self.selected
        at = next((i for i, b in enumerate(rows) if b.process is chosen), 0)
        self._top = max(0, min(max(self._top, at - (height - heads - 1)), at, len(rows) - (height - heads)))
        widths = (pid_width, user_width, gpu_width, io_width, container_width)
        for b in rows[self._top:self._top + room]:
            # Without a frame nothing else says that there are more, or of a filter.
            more = ""
            if not heads and b is rows[-1 if hidden <= 0 else self._top + room - 1]:
                more = f" {hidden} more" if hidden > 0 else ""
                more += f" with “{printable(self.pattern)}”" if self.pattern else ""
            lines.append([*self._row(b, width - len(more), widths, b.process is chosen and self.has_focus),
                          (more, DIM)])
        self.show(lines)

    def _row(self, branch: Branch, width: int, widths: tuple[int, int, int, int, int], here: bool) -> list[StyledText]:
        pid_width, user_width, gpu_width, io_width, container_width = widths
        p = branch.process
        if p is None:
            text = f" {branch.parent_pid:>{pid_width}} parent of these" + ", uses no GPU" * bool(gpu_width)
            return [(fit(text, width), DIM)]
        memory, sm, cpu = p.gpu_memory_bytes, p.mean_sm_ratio, p.cpu_cores.value
        user = fit(printable(p.user or "?"), user_width - 1) + " " if user_width else ""
        io = p.io_bytes_per_s
        rss = p.rss_bytes.value
        of_gpus = (f"{devices(p):<{gpu_width}} {'N/A' if memory is None else bytes_(memory):>5}"
                   f" {'N/A' if sm is None else ratio(sm):>4}")
        figures = (f"{p.pid:>{pid_width}} {user}"
                   + (of_gpus if gpu_width else f"{'N/A' if rss is None else bytes_(rss):>5}")
                   + f" {'N/A' if cpu is None else ratio(cpu):>5}"
                   + (f" {'N/A' if io is None else rate(io):>{io_width}}" if io_width else "")
                   + (f"  {fit(printable(p.container or ''), container_width)}" if container_width else "") + "  ")
        mark = "● " if (p.local_pid or p.pid) in self._attached_pids else ""  # servers are found by the PID in here
        command = f"N/A: {p.reason or 'command unknown'}" if p.command is None else (
            "ended: " * (p.reason is not None) + short_command(p.command))
        room = max(0, width - 1 - len(figures) - len(branch.lead) - len(mark))
        return [("›" if here else " ", ACCENT), (figures, PLAIN), (branch.lead, DIM), (mark, ACCENT),
                (fit(printable(command), room), BOLD if mark or here else PLAIN)]

    def action_move(self, by: int) -> None:
        shown = [b.process for b in self._rows if b.process is not None]
        chosen = self.selected
        if chosen is not None:
            self.selected_pid = shown[min(len(shown) - 1, max(0, shown.index(chosen) + by))].pid
            self.draw()

    def action_details(self) -> None:
        if self.selected is not None:
            self.post_message(self.Opened(self.selected))

    def action_signal(self) -> None:
        if self.selected is not None:
            self.post_message(self.Opened(self.selected, signal=True))

    def show_matching(self, pattern: str) -> None:
        """Show only the processes with this text; all of them for an empty one."""
        self.pattern = pattern
        self.draw()

    def action_tree(self) -> None:
        self.as_tree = not self.as_tree
        self.draw()

    def on_click(self, event: events.Click) -> None:
        """A line selects, the selected one opens; the head sorts."""
        row = event.get_content_offset(self)
        if row is None:
            return
        line = row.y - self._heads
        if line < 0:
            self.next_sort()
            return
        branch = self._rows[self._top + line] if self._top + line < len(self._rows) else None
        if branch is None or branch.process is None:
            return
        if self.selected is branch.process:
            self.action_details()
        else:
            self.selected_pid = branch.process.pid
            self.draw()

    def on_mouse_scroll_down(self) -> None:
        self.action_move(1)

    def on_mouse_scroll_up(self) -> None:
        self.action_move(-1)

    def next_sort(self) -> str:
        """Sort by the next column; returns its name."""
        self.sort = self._sorts[(self._sorts.index(self.sort) + 1) % len(self._sorts)]
        self.draw()
        return self.sort
