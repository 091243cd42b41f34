"""The processes that hold GPUs, sorted and filtered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar

from msgspec import Struct
from textual import events
from textual.binding import BindingType
from textual.content import Content
from textual.message import Message

from gputop.core.samples import NodeSample, ProcessSample
from gputop.render.palette import ACCENT, BOLD, DIM, PLAIN
from gputop.render.styled_text import StyledText
from gputop.render.table import Column, Table, widths
from gputop.text.commands import short_command
from gputop.text.units import NA, bytes_, devices, fit, percent, printable, rate
from gputop.tui.keys import key as bind
from gputop.tui.keys import up_and_down
from gputop.tui.monitor.status_lines import bar
from gputop.tui.widgets.cached_lines import DrawnLines, WheelMoves

SORTS = ("gpu memory", "sm", "cpu", "pid")
_SORTS_WITHOUT_GPU = ("pid", "cpu")
_CONTAINER_CELLS = 23  # "containerd 0123456789ab"
_UNCUT = 1000  # cells


def container_name(process: ProcessSample) -> str:
    """The process's pod, of a long name the end, in which the pods of a job differ; or else its container. With the
    blank that sets it off from the figures before it."""
    if process.kubernetes is None or process.kubernetes.pod is None:
        return f" {process.container}" if process.container else ""
    name = printable(process.kubernetes.pod)
    return f" {name if len(name) <= _CONTAINER_CELLS else '…' + name[1 - _CONTAINER_CELLS:]}"


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


class ProcessColumn(Column, frozen=True, kw_only=True):
    """A column with the text of a process, which started ``now_s`` ago at most; None where it has none.

    ``from_cells`` is the width of the panel from which on it is shown beside the command: with headings, without.
    """

    of: Callable[[ProcessSample, float], str | None]
    from_cells: tuple[int, int] = (0, 0)
    label: str = ""  # without a heading each figure says what it is
    on_gpus: bool | None = None  # for processes that hold GPUs, or for those of a node without one; None: for both
    optional: bool = False  # not shown where no process has it


def _figure(value: float | None, show: Callable[[float], str]) -> str:
    return NA if value is None else show(value)


_BAR = ProcessColumn("", least=8, of=lambda p, _: " ", from_cells=(90, 90), on_gpus=True)
COLUMNS = (
    ProcessColumn("pid", str, least=5, of=lambda p, _: str(p.pid)),
    ProcessColumn("user", least=8, most=8, of=lambda p, _: p.user or "?", from_cells=(60, 60)),
    ProcessColumn("GPU", least=3, most=_UNCUT, of=lambda p, _: devices(p), label="GPU ", on_gpus=True),
    ProcessColumn("mem", str, least=5, of=lambda p, _: _figure(p.gpu_memory_bytes, bytes_), on_gpus=True),
    _BAR,
    ProcessColumn("sm", str, least=4, of=lambda p, _: _figure(p.mean_sm_ratio, percent), label="SM ", on_gpus=True),
    ProcessColumn("RAM", str, least=5, of=lambda p, _: _figure(p.rss_bytes.value, bytes_), on_gpus=False),
    ProcessColumn("cpu", str, least=5, of=lambda p, _: _figure(p.cpu_cores.value, percent), label="CPU "),
    ProcessColumn("I/O", str, least=9, of=lambda p, _: _figure(p.io_bytes_per_s, rate), from_cells=(100, 100)),
    ProcessColumn("time", str, least=6, label="up ", from_cells=(70, 110), optional=True,
                  of=lambda p, now_s: None if p.started_s is None else run_time(now_s - p.started_s)),
    ProcessColumn(" container", least=10, of=lambda p, _: container_name(p), from_cells=(110, 110), optional=True),
)


def shown_columns(processes: Sequence[ProcessSample], now_s: float, width: int, *, labeled: bool,
                  on_gpus: bool) -> list[tuple[ProcessColumn, int]]:
    """The columns that have room in the panel, with their cells. The command is what tells processes apart: the others
    take what they need and no more."""
    columns = tuple(column for column in COLUMNS if width >= column.from_cells[labeled]
                    and column.on_gpus in (None, on_gpus) and (processes or not column.optional))
    table = Table("Processes", columns, tuple(tuple(column.of(p, now_s) for column in columns) for p in processes), "")
    return [(columns[i], cells) for i, cells in widths(table, table.rows, width).items()]


class ProcessPanel(WheelMoves, DrawnLines, can_focus=True):
    """A table of processes; up and down select, enter asks for the details."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *up_and_down("process"),
        bind("enter", "details", "process details", "full command, GPUs, CPU, I/O"),
        bind("K", "signal", "signal…", "send a signal, after confirmation"),
        bind("v", "tree", "tree", "show children under their parents, or a flat list"),
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
        self._columns: list[tuple[ProcessColumn, int]] = []  # with their cells

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
        self._columns = shown_columns(processes, self._now_s, width, labeled=not self._heads, on_gpus=on_gpus)
        head = " ".join(column.fit(column.title, cells) for column, cells in self._columns)
        lines: list[list[StyledText]] = [[(fit(f" {head}  command", width), DIM)]][:self._heads]
        if not rows:
            text = ("no process matches the filter; press / to change "
                    "it") if self.pattern and self._processes else self._reason
            lines.append([(fit(" " + printable(text), width), DIM)])
        self.show([*lines, *self._shown_rows()])

    def _set_titles(self, hidden: int) -> None:
        """Say in the border what is listed, and how many rows have no room."""
        title = "Processes" + (f" matching “{printable(self.pattern)}”" if self.pattern else "")
        subtitle = ((f"{hidden} more: ↑ ↓   " if hidden > 0 else "") + ("tree, " if self.as_tree else "")
                    + f"sorted by {self.sort}")
        if (title, subtitle) != self._titles:  # setting them repaints the border
            self._titles = (title, subtitle)
            self.border_title, self.border_subtitle = Content(title), subtitle  # as Content: the pattern is not markup

    def _shown_rows(self) -> Iterator[list[StyledText]]:
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
            yield [*self._row(b, self.size.width - len(more), b.process is chosen and self.has_focus), (more, DIM)]

    def _row(self, branch: Branch, width: int, here: bool) -> list[StyledText]:
        p = branch.process
        if p is None:
            uses = ", uses no GPU" * any(column.on_gpus for column, _ in self._columns)
            return [(fit(f" {branch.parent_pid:>{self._columns[0][1]}} parent of these{uses}", width), DIM)]
        runs: list[StyledText] = [("›" if here else " ", ACCENT)]
        for column, cells in self._columns:
            label = "" if self._heads else column.label
            runs.append((f"{label}{column.fit(column.text(column.of(p, self._now_s)), cells)} ", PLAIN)
                        if column is not _BAR else self._memory_bar(p, cells))
        mark = "● " if (p.local_pid or p.pid) in self._attached_pids else ""  # servers are found by the PID in here
        command = f"N/A: {p.reason or 'command unknown'}" if p.command is None else (
            "ended: " * (p.reason is not None) + short_command(p.command))
        runs += [(" ", PLAIN), (branch.lead, DIM), (mark, ACCENT)]
        room = max(0, width - sum(len(text) for text, _ in runs))
        return [*runs, (fit(printable(command), room), BOLD if mark or here else PLAIN)]

    def _memory_bar(self, process: ProcessSample, cells: int) -> StyledText:
        """The memory it holds, as a share of that of its GPUs; blank where either is not known."""
        most = sum(self._memory_bytes.get(index, 0.0) for index, on in process.gpus.items() if on.mig is None)
        memory = process.gpu_memory_bytes
        text, style = bar(memory / most, cells) if memory is not None and most else (" " * cells, PLAIN)
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
