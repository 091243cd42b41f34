"""A table described once, and how it is drawn: on the screen, as text, as HTML. Pure.

Whoever shows tables of an analysis takes them from :mod:`gputop.diagnosis.tables`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from msgspec import Struct, field

from gputop.render.styled_text import wrap
from gputop.text.commands import cut_path
from gputop.text.markup import esc
from gputop.text.units import BLANK, NA, fit, percent, portion, printable
from gputop.text.units import wrap as wrap_all

_MIN_NAME_COLUMNS, _LEAST_NAME_COLUMNS = 40, 16  # enough to tell most names apart; with which one can begin
_MOST_COLUMNS = 24  # of a column that is not wide

CALL = "StatefulPartitionedCall/"  # TensorFlow puts it before each op of a function

_CODE = re.compile(r"[<(:]")  # of a kernel's name, which begins with what matters
_SENTENCE_LINES, _MOST_SENTENCE_LINES = 2, 4
_TEXT_ROWS, _TEXT_LINES, _PAGE_ROWS = 20, 9, 50

BARS = "▁▂▃▄▅▆▇█"
_LEAST_LANE, _GOOD_LANE, _LEAST_REMARK = 10, 16, 24  # cells of a lane: at least, and before a name grows

Lane = tuple[float | None, ...]  # shares of full scale over time, the oldest first; None: nothing was measured
Value = str | float | None


class Column(Struct, frozen=True):
    """``show`` formats a number; a column without it holds text. A ``wide`` one gets the remaining room.

    Where that is too little, ``spare`` ones are left out: those with the highest number first, of these the last one.
    ``missing``: why a value may be unknown. A ``lane`` is drawn in the room beside the wide column.
    """

    title: str
    show: Callable[[float], str] | None = None
    wide: bool = False
    spare: int = 0
    prose: bool = False  # wrapped where it is too long, whether it ends as a sentence or not
    missing: str = ""
    lane: bool = False
    least: int = 0  # cells, so that the table of what changes stands still
    most: int = _MOST_COLUMNS

    def text(self, value: Value) -> str:
        if value is None:
            return NA
        return printable(value) if isinstance(value, str) else (self.show or str)(value)

    def fit(self, text: str, width: int) -> str:
        return fit(text, width, right=self.show is not None)


class Table(Struct, frozen=True):
    """Rows hold one value per column, None where it is unknown; ``empty`` says why there are no rows.

    ``note`` explains how to read the table. ``parents``: of a tree that unfolds, the place of the row above each.
    """

    name: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    empty: str
    note: str = ""
    parents: tuple[int | None, ...] = ()
    picture: tuple[str, ...] = ()  # lines, below a whole row
    commands: Mapping[str, str] = field(default_factory=dict)  # how to look at a row of that name (the last column)
    opened: tuple[int, ...] = ()  # rows of a tree that are unfolded at first, beside those without one above
    gap: int = 2  # cells between two columns
    lanes: tuple[Lane, ...] = ()  # of each row

    @property
    def open_first(self) -> set[int]:
        return {i for i, parent in enumerate(self.parents) if parent is None} | set(self.opened)

    def unfolded(self, open_rows: Collection[int]) -> list[int]:
        """The rows of a tree of which all rows above are open, in their order."""
        shown: list[int] = []
        seen: set[int | None] = {None}
        for i, parent in enumerate(self.parents):
            if parent in seen:
                shown.append(i)
                if i in open_rows:
                    seen.add(i)
        return shown

    def largest(self, most: int) -> list[int]:
        """The first rows; of a tree those with most in its first column, in which none has more than the one above."""
        places = range(len(self.rows))
        return [*places[:most]] if not self.parents else sorted(sorted(places, key=lambda i: -float(
            self.rows[i][0] or 0))[:most])

    def branch(self, row: int, open_rows: Collection[int] | None = None) -> tuple[Value, ...]:
        """A row of a tree, its name with the depth and, with ``open_rows``, a mark: whether more is below it."""
        if not self.parents:
            return self.rows[row]
        depth, parent = 0, self.parents[row]
        while parent is not None:
            depth, parent = depth + 1, self.parents[parent]
        mark = "" if open_rows is None else "  " if row not in self.parents else "▾ " if row in open_rows else "▸ "
        return (*self.rows[row][:-1], f"{'  ' * depth}{mark}{self.rows[row][-1]}")


def cell_lines(column: Column, value: Value, width: int, most: int = 1) -> list[str]:
    """A cell in ``width`` columns: a sentence in ``most`` lines where it needs them; of a path, as of an op, the end is
    kept, too: ops differ there."""
    text = column.text(value)
    if column.wide and len(text) > width:
        if (column.prose or text.endswith(".")) and most > 1:
            return wrap(text, width, most)
        if "/" in text and not _CODE.search(text):
            return [fit(cut_path(text.replace(CALL, ""), width), width)]
    return [column.fit(text, width)]


def sentence_lines(table: Table, rows: Sequence[Sequence[Value]], shown: Mapping[int, int], room: int) -> int:
    """Number of lines that a sentence may have so that all rows fit in ``room`` lines; two where they do not fit
    anyway."""
    if len(rows) > room:
        return _SENTENCE_LINES
    for most in range(_MOST_SENTENCE_LINES, 1, -1):
        if sum(max(len(cell_lines(table.columns[i], row[i], size, most)) for i, size in shown.items())
               for row in rows) <= room:
            return most
    return 1


def arranged(table: Table, pattern: str, by: int | None, reverse: bool) -> list[tuple[Value, ...]]:
    """The rows whose text holds ``pattern``, by column ``by`` (None: as they came), what is not known last.

    Numbers go from the largest, text from A; ``reverse`` turns both.
    """
    wanted = pattern.casefold()
    rows = [r for r in table.rows if not wanted or any(wanted in v.casefold() for v in r if isinstance(v, str))]
    if by is None:
        return rows[::-1] if reverse else rows
    with_value = [r for r in rows if r[by] is not None]
    down = table.columns[by].show is not None
    with_value.sort(key=lambda r: r[by], reverse=down != reverse)  # type: ignore[arg-type,return-value]
    return with_value + [r for r in rows if r[by] is None]


def widths(table: Table, rows: Iterable[Sequence[Value]], room: int, by: int | None = None) -> dict[int, int]:
    """The columns to show with their widths: what the cells need, the wide one what is left of ``room``.

    ``by``: the column by which they are sorted, whose head has an arrow. A column of which no row knows anything is not
    shown; the whole row has it.
    """
    rows = [*rows]
    needs = [len(c.title) + 2 * (i == by) for i, c in enumerate(table.columns)]
    for row in rows:
        needs = [max(n, len(c.text(v))) for n, c, v in zip(needs, table.columns, row, strict=True)]
    needs = [min(max(n, c.least), c.most) if not c.wide else n for n, c in zip(needs, table.columns, strict=True)]
    if any(column.lane for column in table.columns):
        return _beside_lane(table, needs, room)
    shown = {i: need for i, need in enumerate(needs) if not rows or any(row[i] not in (None, "") for row in rows)}

    def left() -> int:
        return room - sum(n + table.gap for i, n in shown.items() if not table.columns[i].wide) - table.gap

    least = _MIN_NAME_COLUMNS if any(column.wide for column in table.columns) else -table.gap
    for i in _spare(table):
        if i in shown and left() < least:
            del shown[i]
    return {i: max(_LEAST_NAME_COLUMNS, min(n, left())) if table.columns[i].wide else n for i, n in shown.items()}


def _spare(table: Table) -> list[int]:
    """The columns that may be left out, the first ones first."""
    return sorted((i for i, column in enumerate(table.columns) if column.spare),
                  key=lambda i: (table.columns[i].spare, i), reverse=True)


def _beside_lane(table: Table, needs: Sequence[int], room: int) -> dict[int, int]:
    """The widths of columns, a lane and a wide column: a third of what the others leave is the wide one's."""
    lane, wide = (next(i for i, c in enumerate(table.columns) if getattr(c, kind)) for kind in ("lane", "wide"))
    shown = {i: c.least or needs[i] for i, c in enumerate(table.columns) if i not in (lane, wide)}

    def left() -> int:
        return max(0, room - sum(shown.values()) - table.gap * (len(shown) + 1))

    for i in _spare(table):
        if left() < _LEAST_LANE + _LEAST_REMARK:
            del shown[i]
    remark = min(left(), max(_LEAST_REMARK, left() // 3))
    for i in shown:
        shown[i] += max(0, min(needs[i] - shown[i], left() - remark - _GOOD_LANE))
    return dict(sorted({**shown, lane: left() - remark, wide: remark}.items()))


def lane_means(lane: Lane, columns: int) -> list[float | None]:
    """A mean for each of so many equal parts of a lane."""
    begins = [i * len(lane) // columns for i in range(columns)]
    parts = ([v for v in lane[begin:max(begin + 1, (i + 1) * len(lane) // columns)] if v is not None]
             for i, begin in enumerate(begins))
    return [sum(part) / len(part) if part else None for part in parts]


def bars(lane: Lane, columns: int) -> str:
    return "".join(BLANK if v is None else BARS[min(7, max(0, round(8 * v) - 1))] for v in lane_means(lane, columns))


def grid(table: Table, rows: Iterable[Sequence[Value]], shown: Mapping[int, int]) -> list[str]:
    """The titles and the rows in lines; a cell has several where it needs them."""
    lines = [[table.columns[i].fit(table.columns[i].title, n) for i, n in shown.items()]]
    for number, row in enumerate(rows):
        cells = [[bars(table.lanes[number], n)] if table.columns[i].lane else
                 cell_lines(table.columns[i], row[i], n, _TEXT_LINES) for i, n in shown.items()]
        lines += [[cell[line] if line < len(cell) else " " * n for cell, n in zip(cells, shown.values(), strict=True)]
                  for line in range(max(map(len, cells)))]
    return [(" " * table.gap).join(line).rstrip() for line in lines]


def table_lines(table: Table, width: int) -> list[str]:
    """All rows below their titles, in lines of ``width`` columns."""
    return grid(table, table.rows, widths(table, table.rows, width))


def to_text(table: Table, width: int, most: int = _TEXT_ROWS) -> list[str]:
    """The name and how to read it, the largest rows in lines of ``width`` columns, and how many more there are."""
    rows = [table.branch(i) for i in table.largest(most)]
    shown = widths(table, rows, width)
    return [*(wrap_all(table.note, width, f"{table.name:<9}" + " " * (len(table.name) > 8)) or [table.name]),
            *(fit(f"  {line}", width).rstrip() for line in grid(table, rows, shown)), *_left_out(table, rows, "  "),
            *(f"  {line}"[:width] for line in table.picture)]


def _left_out(table: Table, rows: Sequence[Sequence[Value]], begin: str = "") -> list[str]:
    more = len(table.rows) - len(rows)
    return [f"{begin}and {more:,} more row{'s' * (more > 1)}"] if more else []


def to_html(table: Table, *, opened: bool = False, most: int = _PAGE_ROWS) -> str:
    """The same to fold and unfold; nothing of a table without rows."""
    rows = [table.branch(i) for i in table.largest(most)]
    if not rows:
        return ""
    return (f"<details{' open' * opened}><summary>{esc(f'{table.name}. {table.note}')}</summary>"
            + html_grid(table, rows) + "".join(f"<p>{line}</p>" for line in _left_out(table, rows)) + "</details>")


def html_grid(table: Table, rows: Iterable[Sequence[Value]], draw: Callable[[Lane], str] = lambda _: "") -> str:
    """The titles and the rows; ``draw`` makes the picture of a lane."""
    head = "".join(f"<th>{esc(c.title)}</th>" if c.show else f'<th class="l">{esc(c.title)}</th>'
                   for c in table.columns)
    body = "".join("<tr>" + "".join(
        f'<td class="past">{draw(table.lanes[number])}</td>' if column.lane else _html_cell(column, value)
        for column, value in zip(table.columns, row, strict=True)) + "</tr>" for number, row in enumerate(rows))
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _html_cell(column: Column, value: Value) -> str:
    if value is None:
        return html_none(column.missing)
    text = esc(column.text(value))
    if isinstance(value, str):
        side = "" if column.show else f' class="{"wrap" if column.wide else "l"}"'
        return f'<td{side}>{text.replace("  ", "&nbsp; ")}</td>'
    level = f"{100 * min(1.0, max(0.0, value)):.0f}"
    return f'<td class="level" style="--v:{level}%">{text}</td>' if column.show in (portion, percent) else (
        f"<td>{text}</td>")


def html_none(reason: str) -> str:
    return f'<td class="na" title="{esc(reason or "not in the analysis")}">{NA}</td>'
