from __future__ import annotations

import csv
import io

from gputop.export.write_tables import csv_text


def test_a_table_comes_back_as_it_was_and_no_cell_is_a_formula() -> None:
    text = csv_text(["time", "kernel"], [(0.5, "gemm, \"big\""), (None, "=1+1"), (-2, "a\x1b[2Jb\nc")])
    rows = list(csv.reader(io.StringIO(text)))
    assert rows == [["time", "kernel"], ["0.5", 'gemm, "big"'], ["", "'=1+1"], ["-2", "a\ufffd[2Jb c"]]
