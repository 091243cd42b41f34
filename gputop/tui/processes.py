"""The processes that hold GPUs, sorted and filtered."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from textual.binding import BindingType
from textual.content import Content

from gputop.samples import ProcessSample
from gputop.text import bytes_, devices, fit, printable, rate, ratio
from gputop.tui.keys import key as bind
from gputop.tui.lines import LinesWidget
from gputop.tui.palette import ACCENT, BOLD, DIM, PLAIN
from gputop.tui.runs import Run

SORTS = ("gpu memory", "sm", "cpu", "pid")
# How wide the panel must be for columns that the command can do without.
_IO_FROM, _CONTAINER_FROM = 100, 110
_CONTAINER_WIDTH = 23  # "containerd 0123456789ab"


def memory_bytes(process: ProcessSample) -> float | None:
    """GPU memory over all GPUs; None where none of them says."""
    known = [p.memory_bytes.value for p in process.gpus.values() if p.memory_bytes.value is not None]
    return sum(known) if known else None


def sm_ratio(process: ProcessSample) -> float | None:
    """Mean SM share over the GPUs it holds; None where none of them says."""
    known = [p.sm_ratio.value for p in process.gpus.values() if p.sm_ratio.value is not None]
    return sum(known) / len(known) if known else None


def io_bytes_per_s(process: ProcessSample) -> float | None:
    """To and from storage together; None where either is not known."""
    read, written = process.io_read_bytes_per_s.value, process.io_write_bytes_per_s.value
    return None if read is None or written is None else read + written


def arrange(processes: Iterable[ProcessSample], sort: str, pattern: str) -> list[ProcessSample]:
    """Those whose pid, user, container or command holds ``pattern``, largest first (pids ascending)."""
    wanted = pattern.casefold()
    kept = [p for p in processes if not wanted
            or wanted in f"{p.pid} {p.user or ''} {p.container or ''} {p.command or ''}".casefold()]
    keys = {"gpu memory": memory_bytes, "sm": sm_ratio, "cpu": lambda p: p.cpu_cores.value}
    if sort == "pid":
        return sorted(kept, key=lambda p: p.pid)
    key = keys[sort]
    return sorted(kept, key=lambda p: (-(key(p) if key(p) is not None else -1.0), p.pid))


class ProcessPanel(LinesWidget, can_focus=True):
    """A table of processes; up and down scroll it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        bind("up,k", "move(-1)", "up", "scroll up"),
        bind("down,j", "move(1)", "down", "scroll down"),
    ]
    PANEL = "Processes"

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.sort = SORTS[0]
        self.pattern = ""
        self._top = 0
        self._processes: tuple[ProcessSample, ...] = ()
        self._attached_pids: frozenset[int] = frozenset()
        self._reason = ""
        self._titles = ("", "")

    def update_view(self, processes: tuple[ProcessSample, ...], attached: frozenset[int], reason: str = "") -> None:
        """``attached`` are pids with a profiler server; ``reason`` why no process could be listed."""
        self._processes, self._attached_pids, self._reason = processes, attached, reason
        self.draw()

    def draw(self) -> None:
        width, height = self.size.width, self.size.height
        if width <= 0 or height <= 0:
            return
        rows = arrange(self._processes, self.sort, self.pattern)
        title = "Processes" + (f" matching “{printable(self.pattern)}”" if self.pattern else "")
        subtitle = f"sorted by {self.sort}"
        if (title, subtitle) != self._titles:  # setting them repaints the border
            self._titles = (title, subtitle)
            self.border_title, self.border_subtitle = Content(title), subtitle  # the pattern is no markup
        # The command is what tells processes apart: the other columns take what they need and no more.
        pid_width = max([5, *(len(str(p.pid)) for p in rows)])
        gpu_width = max([3, *(len(devices(p)) for p in rows)])
        user_width = 9 if width >= 60 else 0
        io_width = 9 if width >= _IO_FROM else 0
        named = [len(printable(p.container)) for p in rows if p.container] if width >= _CONTAINER_FROM else []
        container_width = min(_CONTAINER_WIDTH, max([9, *named])) if named else 0
        head = (f" {'pid':>{pid_width}} {'user':<9}"[:pid_width + 2 + user_width]
                + f"{'GPU':<{gpu_width}} {'mem':>5} {'sm':>4} {'cpu':>5}"
                + (f" {'I/O':>{io_width}}" if io_width else "")
                + (f"  {'container':<{container_width}}" if container_width else "") + "  command")
        lines: list[list[Run]] = [[(fit(head, width), DIM)]]
        if not rows:
            text = self._reason or ("no process matches the filter: / to change it" if self.pattern
                                    else "no process holds a GPU")
            lines.append([(fit(" " + printable(text), width), DIM)])
        self._top = max(0, min(self._top, len(rows) - (height - 1)))
        lines += [self._row(p, width, (pid_width, user_width, gpu_width, io_width, container_width))
                  for p in rows[self._top:self._top + height - 1]]
        self.show(lines)

    def _row(self, p: ProcessSample, width: int, widths: tuple[int, int, int, int, int]) -> list[Run]:
        pid_width, user_width, gpu_width, io_width, container_width = widths
        memory, sm, cpu = memory_bytes(p), sm_ratio(p), p.cpu_cores.value
        user = fit(printable(p.user or "?"), user_width - 1) + " " if user_width else ""
        io = io_bytes_per_s(p)
        figures = (f" {p.pid:>{pid_width}} {user}{devices(p):<{gpu_width}}"
                   f" {'N/A' if memory is None else bytes_(memory):>5}"
                   f" {'N/A' if sm is None else ratio(sm):>4} {'N/A' if cpu is None else ratio(cpu):>5}"
                   + (f" {'N/A' if io is None else rate(io):>{io_width}}" if io_width else "")
                   + (f"  {fit(printable(p.container or ''), container_width)}" if container_width else "") + "  ")
        mark = "● " if (p.local_pid or p.pid) in self._attached_pids else ""  # servers are found by the PID in here
        command = printable(p.command if p.command is not None else f"N/A: {p.reason or 'command unknown'}")
        room = max(0, width - len(figures) - len(mark))
        return [(figures, PLAIN), (mark, ACCENT), (fit(command, room), BOLD if mark else PLAIN)]

    def on_resize(self) -> None:
        self.draw()

    def action_move(self, by: int) -> None:
        self._top = max(0, self._top + by)
        self.draw()

    def next_sort(self) -> str:
        """Sort by the next column; returns its name."""
        self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]
        self.draw()
        return self.sort
