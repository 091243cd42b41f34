"""The processes that hold GPUs, sorted and filtered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

from msgspec import Struct
from textual import events
from textual.binding import BindingType
from textual.content import Content
from textual.message import Message

from gputop.core.samples import NodeSample, ProcessSample
from gputop.render.palette import ACCENT, BOLD, DIM, PLAIN
from gputop.render.styled_text import StyledText
from gputop.text.commands import short_command
from gputop.text.units import NA, bytes_, devices, fit, percent, printable, rate
from gputop.tui.keys import key as bind
from gputop.tui.monitor.status_lines import bar
from gputop.tui.widgets.cached_lines import DrawnLines, WheelMoves

SORTS = ("gpu memory", "sm", "cpu", "pid")
_SORTS_WITHOUT_GPU = ("pid", "cpu")
# From these widths of the panel on, these columns are shown beside the command.
_TIME_FROM, _LABELED_TIME_FROM, _BAR_FROM, _IO_FROM, _CONTAINER_FROM = 70, 110, 90, 100, 110
_TIME_WIDTH, _BAR_WIDTH, _IO_WIDTH = 6, 9, 9
_CONTAINER_WIDTH = 23  # "containerd 0123456789ab"


def container_name(process: ProcessSample, width: int) -> str:
    """The process's pod, of a long name the end, in which the pods of a job differ; or else its container."""
    if process.kubernetes is None or process.kubernetes.pod is None:
        return printable(process.container or "")
    name = printable(process.kubernetes.pod)
    return name if len(name) <= width else "…" + name[1 - width:]


def arrange(processes: Iterable[ProcessSample], sort: str, pattern: str) -> list[ProcessSample]:
    """Processes whose pid, user, container, pod or command holds ``pattern``, largest first (pids ascending)."""
    wanted = pattern.casefold()
    kept = [p for p in processes if not wanted
            or wanted in f"{p.pid} {p.user or ''} {p.container or ''} {p.command or ''} "
                         f"{p.kubernetes.label if p.kubernetes is not None else ''}".casefold()]
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


def run_time(duration_s: float) -> str:
    """Run time of a process, in its two largest units and at most five cells: <1m, 12m, 3h05, 2d04h."""
    minutes = int(max(0.0, duration_s) // 60)
    if minutes < 60:
        return f"{minutes}m" if minutes else "<1m"
    hours, minutes = divmod(minutes, 60)
    days, rest = divmod(hours, 24)
    return f"{hours}h{minutes:02}" if not days else f"{days}d{rest:02}h" if days < 100 else f"{days}d"


class ProcessColumns(Struct, frozen=True):
    """The cells of each column of the table; 0: it is not shown."""

    pid: int
    user: int
    gpu: int
    bar: int
    io: int
    time: int
    container: int
    labeled: bool  # without a heading: each figure says what it is


def _headings(columns: ProcessColumns) -> str:
    """The line above the rows."""
    on_gpus = f"{'GPU':<{columns.gpu}} {'mem':>5} {'':{columns.bar}}{'sm':>4}" if columns.gpu else f"{'RAM':>5}"
    return (f" {'pid':>{columns.pid}} {'user':<9}"[:columns.pid + 2 + columns.user] + on_gpus
            + f" {'cpu':>5}" + (f" {'I/O':>{columns.io}}" if columns.io else "")
            + (f" {'time':>{columns.time}}" if columns.time else "")
            + (f"  {'container':<{columns.container}}" if columns.container else "") + "  command")


class ProcessPanel(WheelMoves, DrawnLines, can_focus=True):
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
        self._memory_bytes: dict[int, float] = {}  # of each whole GPU
        self._now_s = 0.0
        self._reason = ""
        self._titles = ("", "")

    @property
    def selected(self) -> ProcessSample | None:
        """The selected process; the first one if the selected one no longer exists."""
        shown = [b.process for b in self._rows if b.process is not None]
        return next((p for p in shown if p.pid == self.selected_pid), shown[0] if shown else None)

    def update_view(self, sample: NodeSample, attached: frozenset[int], reason: str = "") -> None:
        """``attached`` are pids with a profiler server; ``reason`` why no process is listed, should there be none."""
        self._processes, self._attached_pids, self._reason = sample.processes, attached, reason
        self._now_s = sample.time_s
        self._memory_bytes = {gpu.info.index: total for gpu in sample.gpus
                              if gpu.info.mig is None and (total := gpu["memory_total_bytes"].value) is not None}
        self.draw()

    def draw(self) -> None:
        width, height = self.size.width, self.size.height
        if width <= 0 or height <= 0:
            return
        # On a node without GPUs their columns would say N/A, of which nothing can be learned.
        on_gpus = not self._processes or any(p.gpus for p in self._processes)
        self._sorts = SORTS if on_gpus else _SORTS_WITHOUT_GPU
        self.sort = self.sort if self.sort in self._sorts else self._sorts[0]
        processes = arrange(self._processes, self.sort, self.pattern)
        rows = self._rows = tree(processes) if self.as_tree else [Branch(p) for p in processes]
        self._heads = 0 if self.has_class("bare") else min(1, height - 1)
        self._set_titles(len(rows) - (height - self._heads))
        columns = self._columns(processes, on_gpus=on_gpus)
        lines: list[list[StyledText]] = [[(fit(_headings(columns), width), DIM)]][:self._heads]
        if not rows:
            text = "no process matches the filter: / changes it" if self.pattern and self._processes else self._reason
            lines.append([(fit(" " + printable(text), width), DIM)])
        self.show([*lines, *self._shown_rows(columns)])

    def _set_titles(self, hidden: int) -> None:
        """Say in the border what is listed, and how many rows have no room."""
        title = "Processes" + (f" matching “{printable(self.pattern)}”" if self.pattern else "")
        subtitle = ((f"{hidden} more: ↑ ↓   " if hidden > 0 else "") + ("tree, " if self.as_tree else "")
                    + f"sorted by {self.sort}")
        if (title, subtitle) != self._titles:  # setting them repaints the border
            self._titles = (title, subtitle)
            self.border_title, self.border_subtitle = Content(title), subtitle  # as Content: the pattern is not markup

    def _columns(self, processes: Sequence[ProcessSample], *, on_gpus: bool) -> ProcessColumns:
        """The columns that have room. The command is what tells processes apart: the others take what they need and no
        more."""
        width, labeled = self.size.width, not self._heads
        names = [container_name(p, _CONTAINER_WIDTH) for p in processes] if width >= _CONTAINER_FROM else []
        time_from = _LABELED_TIME_FROM if labeled else _TIME_FROM
        return ProcessColumns(
            pid=max([5, *(len(str(p.pid)) for p in processes)]), user=9 if width >= 60 else 0,
            gpu=max([3, *(len(devices(p)) for p in processes)]) if on_gpus else 0,
            bar=_BAR_WIDTH if on_gpus and width >= _BAR_FROM else 0, io=_IO_WIDTH if width >= _IO_FROM else 0,
            time=_TIME_WIDTH if width >= time_from and any(p.started_s is not None for p in processes) else 0,
            container=min(_CONTAINER_WIDTH, max([9, *map(len, names)])) if any(names) else 0, labeled=labeled)

    def _shown_rows(self, columns: ProcessColumns) -> Iterator[list[StyledText]]:
        """The rows that have room, the selected one among them."""
        rows, chosen, room = self._rows, self.selected, self.size.height - self._heads
        index = next((i for i, b in enumerate(rows) if b.process is chosen), 0)
        self._top = max(0, min(max(self._top, index - (room - 1)), index, len(rows) - room))
        hidden = len(rows) - room
        for b in rows[self._top:self._top + room]:
            # Without a frame nothing else says that there are more, or of a filter.
            more = ""
            if not self._heads and b is rows[-1 if hidden <= 0 else self._top + room - 1]:
                more = f" {hidden} more" if hidden > 0 else ""
                more += f" with “{printable(self.pattern)}”" if self.pattern else ""
            yield [*self._row(b, self.size.width - len(more), columns, b.process is chosen and self.has_focus),
                   (more, DIM)]

    def _row(self, branch: Branch, width: int, columns: ProcessColumns, here: bool) -> list[StyledText]:
        p = branch.process
        if p is None:
            text = f" {branch.parent_pid:>{columns.pid}} parent of these" + ", uses no GPU" * bool(columns.gpu)
            return [(fit(text, width), DIM)]
        sm, io, rss = p.mean_sm_ratio, p.io_bytes_per_s, p.rss_bytes.value
        user = fit(printable(p.user or "?"), columns.user - 1) + " " if columns.user else ""
        labels = ("GPU ", "SM ", "CPU ") if columns.labeled else ("", "", "")
        begin = f"{p.pid:>{columns.pid}} {user}"
        share: StyledText = ("", PLAIN)
        if columns.gpu:
            memory = p.gpu_memory_bytes
            begin += f"{labels[0]}{devices(p):<{columns.gpu}} {NA if memory is None else bytes_(memory):>5} "
            share = self._memory_bar(p, columns.bar)
            middle = f"{labels[1]}{NA if sm is None else percent(sm):>4}"
        else:
            middle = f"{NA if rss is None else bytes_(rss):>5}"
        cpu = p.cpu_cores.value
        age = NA if p.started_s is None else run_time(self._now_s - p.started_s)
        figures = (middle + f" {labels[2]}{NA if cpu is None else percent(cpu):>5}"
                   + (f" {NA if io is None else rate(io):>{columns.io}}" if columns.io else "")
                   + (f" {'up ' * columns.labeled}{age:>{columns.time}}" if columns.time else "")
                   + (f"  {fit(container_name(p, columns.container), columns.container)}" if columns.container else "")
                   + "  ")
        mark = "● " if (p.local_pid or p.pid) in self._attached_pids else ""  # servers are found by the PID in here
        command = f"N/A: {p.reason or 'command unknown'}" if p.command is None else (
            "ended: " * (p.reason is not None) + short_command(p.command))
        room = max(0, width - 1 - len(begin) - len(share[0]) - len(figures) - len(branch.lead) - len(mark))
        return [("›" if here else " ", ACCENT), (begin, PLAIN), share, (figures, PLAIN), (branch.lead, DIM),
                (mark, ACCENT), (fit(printable(command), room), BOLD if mark or here else PLAIN)]

    def _memory_bar(self, process: ProcessSample, cells: int) -> StyledText:
        """The memory it holds, as a share of that of its GPUs; blank where either is not known."""
        most = sum(self._memory_bytes.get(index, 0.0) for index, on in process.gpus.items() if on.mig is None)
        memory = process.gpu_memory_bytes
        if not cells or memory is None or not most:
            return " " * cells, PLAIN
        text, style = bar(memory / most, cells - 1)
        return text + " ", style

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

    def next_sort(self) -> str:
        """Sort by the next column; returns its name."""
        self.sort = self._sorts[(self._sorts.index(self.sort) + 1) % len(self._sorts)]
        self.draw()
        return self.sort
