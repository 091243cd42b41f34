from __future__ import annotations

import csv
import io

import pytest

from gputop.export.write_tables import csv_text, without_formulas


def test_a_table_comes_back_as_it_was_and_no_cell_is_a_formula() -> None:
    text = csv_text(["time", "kernel"], [(0.5, "gemm, \"big\""), (None, "=1+1"), (-2, "a\x1b[2Jb\nc")])
    rows = list(csv.reader(io.StringIO(text)))
    assert rows == [["time", "kernel"], ["0.5", 'gemm, "big"'], ["", "'=1+1"], ["-2", "a\ufffd[2Jb c"]]


@pytest.mark.parametrize(("text", "cell"), [
    ("=cmd|' /C calc'!A0", "'=cmd|' /C calc'!A0"), ("+1", "'+1"), ("-1", "'-1"), ("@SUM(1)", "'@SUM(1)"),
    ("\t=1", "'\t'=1"), ("\r=1", "'\r'=1"), ("＝1", "'＝1"), ("a;=1", "a;'=1"), ("a\n@1", "a\n'@1"),
    ("NVIDIA H100-80 = fast", "NVIDIA H100-80 = fast"), ("", ""), ("a,=1", "a,=1"), (" =1", " =1"),
])
def test_no_text_of_a_csv_is_a_formula(text: str, cell: str) -> None:
    assert without_formulas((text, -1.5, None, -2)) == (cell, -1.5, None, -2)
