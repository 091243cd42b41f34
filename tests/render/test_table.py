"""A table described once: sorted, laid out, and drawn as text and as HTML."""

from __future__ import annotations

import re

from gputop.render.table import Column, Table, arranged, cell_lines, sentence_lines, to_html, to_text, widths
from gputop.text.units import bytes_, count, portion
from tests.records import replace

TABLE = Table("t", (Column("n", str), Column("name", wide=True)), ((2.0, "b"), (None, "a"), (3.0, "C")), "none")
TREE = Table("Tree", (Column("share", portion), Column("name", wide=True)), (
    (0.6, "a"), (0.1, "a little"), (0.5, "a lot"), (0.4, "b")), "", "Shares.", (None, 0, 0, None))


def test_sorting_goes_from_the_largest_and_keeps_what_is_not_known_last() -> None:
    def names(by: int | None, reverse: bool = False, pattern: str = "") -> str:
        return "".join(str(row[1]) for row in arranged(TABLE, pattern, by, reverse))

    assert names(None) == "baC" and names(0) == "Cba" and names(0, True) == "bCa"
    assert names(1) == "Cab" and names(None, pattern="c") == "C"


def test_the_wide_column_gets_the_room_that_is_left() -> None:
    assert widths(TABLE, TABLE.rows, 100)[1] == 16
    long = replace(TABLE, rows=((1.0, "x" * 300),))
    assert widths(long, long.rows, 100)[1] == 100 - widths(long, long.rows, 100)[0] - 4


def test_a_long_op_keeps_its_end_and_a_sentence_has_the_lines_that_are_there() -> None:
    op, kernel, what = Column("TF op", wide=True), Column("kernel", wide=True), Column("what it is", wide=True)
    name = "StatefulPartitionedCall/model_1/gradient_tape/block_8/mlp/dense/MatMul_1"
    assert cell_lines(op, name, 40)[0].strip() == "model_1/…/block_8/mlp/dense/MatMul_1"
    assert cell_lines(kernel, "ns::Kernel<a/b, float>(int, float*)", 12) == ["ns::Kernel<…"]
    sentence = "The GPU copies data from the host and runs no kernel."
    assert cell_lines(what, sentence, 30, 3) == ["The GPU copies data from the", "host and runs no kernel."]
    assert cell_lines(what, sentence, 30) == ["The GPU copies data from the …"[:29] + "…"]
    table = Table("Limit", (what,), ((sentence,), (sentence,)), "")
    rows, shown = table.rows, {0: 30}
    assert [sentence_lines(table, rows, shown, room) for room in (1, 2, 3, 4)] == [2, 1, 1, 4]


def test_a_column_of_which_nothing_is_known_is_in_the_whole_row_only() -> None:
    columns = (Column("bytes", bytes_), Column("count", count), Column("op", wide=True))
    assert [*widths(Table("x", columns, ((None, 1.0, "a"), (None, 2.0, "b")), ""), [(None, 1.0, "a")], 80)] == [1, 2]


def test_text_and_page_show_the_same_rows_and_say_how_many_they_leave_out() -> None:
    names = [f"kernel_{i:02d}" for i in range(60)]
    table = Table("Kernels", (Column("count", count), Column("kernel", wide=True)),
                  tuple((float(i), name) for i, name in enumerate(names)), "", "Counts.")
    text, page = to_text(table, 60), to_html(table)
    assert text[0] == "Kernels  Counts." and text[1] == "  count  kernel" and text[-1] == "  and 40 more rows"
    assert [line.split()[1] for line in text[2:-1]] == names[:20]
    assert re.findall(r">(kernel_\d+)<", page) == names[:50] and "and 10 more rows" in page
    few = replace(table, rows=table.rows[:21])
    assert to_text(few, 60)[-1] == "  and 1 more row" and "more" not in to_html(few)
    assert to_html(replace(table, rows=())) == ""


def test_of_a_tree_the_largest_rows_stay_with_all_above_them() -> None:
    assert to_text(TREE, 60, 3) == [
        "Tree     Shares.", "  share  name", "    60%  a", "    50%    a lot", "    40%  b", "  and 1 more row"]


def test_a_page_says_why_a_value_is_unknown_and_shows_foreign_names_literally() -> None:
    table = Table("t", (Column("rate", bytes_, missing="no size"), Column("share", portion), Column("op", wide=True)),
                  ((None, 0.25, "<b>&\x1b[31m"),), "")
    page = to_html(table, opened=True)
    assert page.startswith("<details open><summary>t. </summary>") and 'title="no size">N/A</td>' in page
    assert '--v:25%">25%</td>' in page and "&lt;b&gt;&amp;" in page and "\x1b" not in page


def test_lines_of_text_keep_to_the_width_and_a_sentence_is_whole() -> None:
    table = Table("Limit", (Column("part"), Column("what", wide=True, prose=True)),
                  (("x" * 30, " ".join(f"word{i}" for i in range(30))),), "")
    lines = to_text(table, 60)
    assert lines[0] == "Limit" and max(map(len, lines)) <= 60
    assert re.findall(r"word\d+", " ".join(lines)) == [f"word{i}" for i in range(30)]
