"""The tables of the last capture: kernels, ops, collectives, memory, copies, host ops, functions, input, layers,
limit, ranks, critical path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.screen import Screen
from textual.widgets import DataTable

from gputop.core.errors import GputopError
from gputop.core.own_program import install_command
from gputop.diagnosis.tables import tables
from gputop.profiler.capture.records import CaptureRecord
from gputop.render.palette import ACCENT, BOLD, DIM, PLAIN
from gputop.render.styled_text import StyledText, justify, wrap
from gputop.render.table import Table, Value, arranged, cell_lines, sentence_lines, widths
from gputop.text.units import counted, printable, seconds
from gputop.tui.keys import key
from gputop.tui.monitor.status_lines import SIMULATED_STYLE
from gputop.tui.screens.dialogs import Code, Part, Popup, ask_text
from gputop.tui.terminal.terminal_app import copy
from gputop.tui.widgets.cached_lines import LinesWidget, MessageAbout

_HEAD_LINES = 2  # the line of the capture, and that of the columns' names
_NARROW = 64  # columns: less has no room for the name of the capture
_KEYS = {  # by the columns that leave room for the capture before them
    116: "enter full row  t timeline  o sort  / filter  e CSV  ? help  esc back",
    _NARROW: "o sort  / filter  e CSV  ? help  esc back", 0: "? help  esc back"}
_MIN_NOTE_LINES = 2
# The keys of the tables, in their order: digits, then letters of their names.
TAB_KEYS = ("1", "2", "3", "4", "5", "6", "7", "8", "9", "0", "R", "P", "W", "G", "L")
_SHORT_NAMES = {"By op": "Op", "Collectives": "Coll.", "Host ops": "Host", "Functions": "Func"}
_LINES_PER_LINE_OF_TABS = 6  # of the screen; a note may have as many lines as the tabs


class Tabs(LinesWidget):
    """The names of the tables, the current one marked, in as many lines as they need and the screen has room for; below
    them how to read it."""

    class Chosen(MessageAbout[int]):
        """The table of this index is wanted."""

    def __init__(self, tables: Sequence[Table]) -> None:
        super().__init__(id="tabs")
        self._names = [(TAB_KEYS[i], t.name) for i, t in enumerate(tables)]
        self._has_rows = [bool(t.rows) for t in tables]
        self._ends: list[tuple[int, int, int]] = []  # line, the column after it, table
        self.lines_high = 0

    def draw(self, index: int, about: str) -> None:
        names, gap = self._forms()
        lines: list[list[StyledText]] = [[]]
        ends: list[tuple[int, int, int]] = []  # line, the column after it, table
        for i, name in enumerate(names):
            used = sum(len(part) for part, _ in lines[-1])
            if lines[-1] and used + gap + len(name) > self.size.width:
                lines.append([])
                used = 0
            before = gap if used else gap - 1
            style = BOLD + ACCENT if i == index else PLAIN if self._has_rows[i] else DIM
            lines[-1] += [(" " * before, PLAIN), (name, style)]
            ends.append((len(lines) - 1, used + before + len(name), i))
        room = max(1, self.screen.size.height // _LINES_PER_LINE_OF_TABS)
        current = next((line for line, _, i in ends if i == index), 0)
        first = max(0, min(current, len(lines) - room))
        lines = lines[first:first + room]
        self._ends = [(line - first, end, i) for line, end, i in ends]
        notes = [[(" " + line, DIM)] for line in wrap(about, self.size.width - 2, max(_MIN_NOTE_LINES, room))]
        self.lines_high = len(lines) + max(1, len(notes))
        self.styles.height = self.lines_high
        self.show([*lines, *(notes or [[]])])

    def _forms(self) -> tuple[list[str], int]:
        """The names with their keys, and the cells between two: the widest form that takes one line, where one does."""
        spaced, close = ([f"{key}{mark}{name}" for key, name in self._names] for mark in (" ", ":"))
        short = [f"{key}:{_SHORT_NAMES.get(name, name)}" for key, name in self._names]
        for names, gap in ((spaced, 3), (spaced, 2), (close, 2), (close, 1), (short, 1)):
            if gap - 1 + sum(map(len, names)) + gap * (len(names) - 1) <= self.size.width:
                return names, gap
        return spaced, 2

    def on_click(self, event: events.Click) -> None:
        offset = event.get_content_offset(self)
        if offset is None:
            return
        chosen = next((i for line, end, i in self._ends if line == offset.y and offset.x < end), None)
        if chosen is not None:
            self.post_message(self.Chosen(chosen))


class TablesScreen(Screen[None]):
    """One table at a time, sorted and filtered."""

    BINDINGS: ClassVar[list[BindingType]] = [
        key("tab,right_curly_bracket", "turn(1)", "next table", "the next table"),
        key("shift+tab,left_curly_bracket", "turn(-1)", "previous table", "the previous table"),
        key("j", "move(1)", "down", "the row below"),
        key("k", "move(-1)", "up", "the row above"),
        key("1", "table(0)", "first table", "open the table with that key: 1 to 9, 0, R, P, W, G, L"),
        *(key(letter, f"table({i})", f"table {letter}", "") for i, letter in enumerate(TAB_KEYS) if i),
        key("o", "sort(1)", "sort", "sort by the next column, or click a column header"),
        key("O", "reverse", "reverse", "reverse the order"),
        key("slash", "filter", "filter rows", "show only rows that contain a text"),
        key("space", "unfold", "unfold", "in a tree: show or hide the rows below this one"),
        key("enter", "row", "whole row", "show the full row, with full names"),
        key("y", "copy", "copy", "copy the Nsight Compute command for this kernel"),
        key("t", "timeline", "timeline", "show this row on the timeline"),
        key("question_mark,f1", "app.help", "help", "show the keys of this screen"),
        key("e", "export", "export as CSV", "export this table as a CSV file"),
        key("escape", "step_back", "step back", "show all rows again; if all are shown, go back to the monitor"),
        key("q,T", "dismiss", "back", "back to the monitor"),
    ]
    HELP = ("The line above a table explains its numbers: mostly means per step and GPU over the window. If steps do "
            "not fill the window, the numbers are for the whole window. N/A means that the trace does not show the "
            "value. Numbers sort in descending order.\n")

    def __init__(self, record: CaptureRecord, go: Callable[[str, Sequence[Value]], None],
                 folder: Path = Path()) -> None:
        """``go`` opens the timeline at the place of a row of the table of that name; exports go to ``folder``."""
        super().__init__()
        self._folder = folder
        self._go = go
        self._record = record
        self._tables = tables(record.analysis)
        self._index = next((i for i, t in enumerate(self._tables) if t.rows), 0)
        self._by: int | None = None
        self._reverse = False
        self._pattern = ""
        self._rows: list[tuple[Value, ...]] = []
        self._places: list[int] = []  # of a tree's rows in the table, as shown
        self._open: set[int] = set(self.table.open_first)
        self._shown: dict[int, int] = {}  # columns with their widths

    @property
    def table(self) -> Table:
        return self._tables[self._index]

    def compose(self) -> ComposeResult:
        yield LinesWidget(id="tables-head")
        yield Tabs(self._tables)
        yield DataTable(cursor_type="row", id="table")
        yield LinesWidget(id="tables-empty")

    def on_mount(self) -> None:
        self.query_one(DataTable).focus()

    def on_resize(self) -> None:
        self._draw()

    def _draw(self) -> None:
        width, table = self.size.width, self.table
        as_tree = table.parents and not self._pattern and self._by is None and not self._reverse
        self._places = table.unfolded(self._open) if as_tree else []
        self._rows = ([table.branch(i, self._open) for i in self._places] if as_tree else
                      arranged(table, self._pattern, self._by, self._reverse))
        record = self._record
        badge = [(" SIMULATED ", SIMULATED_STYLE)] * (record.analysis is not None and record.analysis.simulated)
        step = "" if record.step_s is None else f"{seconds(record.step_s)}/step  "
        self.query_one("#tables-head", LinesWidget).show([justify(
            [(" gputop ", BOLD), *badge, (" tables  ", BOLD), (step, PLAIN), (printable(record.path.name), DIM)]
            if width >= _NARROW else [*badge, (" " + step.strip(), PLAIN)],
            [(f" {next(keys for columns, keys in _KEYS.items() if width >= columns)} ", DIM)], width)])
        keys = "space: unfold a row." if table.parents else "enter: the roofline." if len(table.picture) > 1 else ""
        about = f"{table.note} {keys}".rstrip()
        if self._pattern:
            about = f"{len(self._rows)} of {len(table.rows)} rows contain “{self._pattern}”   {about}"
        tabs = self.query_one(Tabs)
        tabs.draw(self._index, printable(about))
        grid: DataTable[Text] = self.query_one(DataTable)
        grid.clear(columns=True)
        self._shown = widths(table, self._rows, width - 2, self._by)
        for i, size in self._shown.items():
            column = table.columns[i]
            arrow = "" if i != self._by else " ▴" if (column.show is None) != self._reverse else " ▾"
            right = column.show is not None
            grid.add_column(Text(column.title + arrow, BOLD, justify="right" if right else "left"), width=size)
        most = sentence_lines(table, self._rows, self._shown, self.size.height - tabs.lines_high - _HEAD_LINES)
        for row in self._rows:
            cells = [cell_lines(table.columns[i], row[i], size, most) for i, size in self._shown.items()]
            grid.add_row(*(Text("\n".join(lines), DIM if row[i] is None else PLAIN, no_wrap=True)
                           for i, lines in zip(self._shown, cells, strict=True)), height=max(map(len, cells)))
        if self._rows and not grid.display:
            self.call_after_refresh(grid.focus)  # an empty table, which is hidden, loses it
        grid.display = bool(self._rows)
        reason = table.empty if not table.rows else "" if self._rows else ("No row matches the filter. Press / to "
                                                                           "change it.")
        empty_text = self.query_one("#tables-empty", LinesWidget)
        empty_text.display = bool(reason)
        empty_text.show([[], *([("  " + line, PLAIN)] for line in wrap(printable(reason), width - 4, 4))])

    def on_tabs_chosen(self, message: Tabs.Chosen) -> None:
        self.action_table(message.subject)

    def action_turn(self, by: int) -> None:
        self.action_table((self._index + by) % len(self._tables))

    def action_table(self, index: int) -> None:
        if index >= len(self._tables):
            self.notify(f"No Python lines: gputop did not sample stacks. To get them: {install_command('stacks')}, "
                        "then press c again.")
            return
        self._index, self._by, self._reverse = index, None, False
        self._open = set(self.table.open_first)
        self._draw()

    def action_unfold(self) -> None:
        grid: DataTable[Text] = self.query_one(DataTable)
        if grid.cursor_row >= len(self._places):
            return
        cursor, row = grid.cursor_row, self._places[grid.cursor_row]
        self._open ^= {row}
        self._draw()
        grid.move_cursor(row=cursor)

    def action_move(self, by: int) -> None:
        grid = self.query_one(DataTable)
        (grid.action_cursor_down if by > 0 else grid.action_cursor_up)()

    def action_sort(self, by: int) -> None:
        columns = [*self._shown]
        self._by = columns[(columns.index(self._by) + by) % len(columns)] if self._by in columns else columns[0]
        self._reverse = False
        self._draw()

    def action_reverse(self) -> None:
        self._reverse = not self._reverse
        self._draw()

    def on_data_table_header_selected(self, message: DataTable.HeaderSelected) -> None:
        column = [*self._shown][message.column_index]
        self._reverse = self._by == column and not self._reverse
        self._by = column
        self._draw()

    def on_data_table_row_selected(self) -> None:
        self.action_row()

    @property
    def _selected(self) -> tuple[Value, ...]:
        """The selected row; empty where there is none."""
        return next(iter(self._rows[self.query_one(DataTable).cursor_row:]), ())

    def action_timeline(self) -> None:
        self._go(self.table.name, self._selected)

    def action_row(self) -> None:
        row = self._selected
        if not row:
            return
        out = Text()
        for column, value in zip(self.table.columns, row, strict=True):
            out.append(f"{column.title:<16}", DIM)
            out.append(column.text(value) + "\n")
        for line in self.table.picture:
            out.append(f"\n{line}", PLAIN)
        parts: list[Part] = [out]
        command = self.table.commands.get(str(row[-1]))
        if command:
            out.append("\nTo inspect it with Nsight Compute:\n", BOLD)
            parts.append(Code(command))
        self.app.push_screen(Popup(f"{self.table.name}, row {self.query_one(DataTable).cursor_row + 1}", *parts,
                                   keys=["y: copy the command"] if command else []))

    def action_copy(self) -> None:
        row = self._selected
        command = self.table.commands.get(str(row[-1])) if row else None
        if command:
            copy(self.app, printable(command), "The command")
        else:
            self.notify("Nothing to copy: the selected row is not a costly compute kernel.")

    def action_filter(self) -> None:
        ask_text(self.app, "Filter rows", "part of a name; leave empty to show all", self._pattern, self._show_matching)

    def _show_matching(self, pattern: str) -> None:
        self._pattern = pattern
        self._draw()

    def action_export(self) -> None:
        """The table as it is shown, all columns, in base units, into a file in the folder of the captures."""
        write_csv(self.app, self._folder, self.table.name.lower().replace(" ", "-"),
                  [column.title for column in self.table.columns], self._rows,
                  simulated=self._record.analysis is not None and self._record.analysis.simulated)

    def action_step_back(self) -> None:
        if self._pattern:
            self._show_matching("")
        else:
            self.dismiss()


def write_csv(app: App[Any], folder: Path, name: str, titles: Sequence[str],
              rows: Sequence[Sequence[str | float | None]], *, simulated: bool) -> None:
    """Write all columns in base units, and say where they are."""
    from gputop.core.files import write_new_files
    from gputop.export.write_tables import csv_text

    mark = "-SIMULATED" if simulated else ""
    try:
        [path] = write_new_files(folder, f"gputop-{name}{mark}", {".csv": csv_text(titles, rows).encode()})
    except GputopError as error:
        app.notify(printable(f"{error.message}\n{error.fix}"), severity="warning")
    else:
        app.notify(f"{counted(len(rows), 'row')} in {printable(str(path))}", title="Table written")
