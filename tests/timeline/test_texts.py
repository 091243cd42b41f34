"""Names of a timeline by number, and a search in all of them."""

from __future__ import annotations

import numpy as np
import pytest

from gputop.timeline import range_columns as module
from gputop.timeline.range_columns import Texts

NAMES = ["MatMul", "", "conv2d/Größe", "matmul_grad", "a.b"]


def texts_of(names: list[str]) -> Texts:
    columns = {}
    for column, shown in (("text", names), ("folded", [name.casefold() for name in names])):
        raw = [name.encode() + b"\n" for name in shown]
        columns[column] = np.frombuffer(b"".join(raw), np.uint8)
        columns[f"{column}_end"] = np.cumsum([len(name) for name in raw], dtype=np.int64)
    return Texts(columns)


def test_each_number_has_its_name_however_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_NAMES_KEPT", 2)
    texts = texts_of(NAMES)
    for _ in range(2):
        assert [texts[i] for i in range(len(NAMES))] == NAMES
    assert texts[-1] == ""


@pytest.mark.parametrize(("text", "numbers"), [
    ("matmul", [0, 3]), ("MATMUL", [0, 3]), ("GRÖSSE", [2]), (".", [4]), ("", []), ("none", []), ("l\n", []),
])
def test_a_search_finds_the_names_that_contain_the_text(text: str, numbers: list[int]) -> None:
    texts = texts_of(NAMES)
    texts.containing("conv")
    for _ in range(2):
        found = texts.containing(text)
        assert np.flatnonzero(found).tolist() == numbers and len(found) == len(NAMES) + 1 and not found[-1]
    assert not texts_of([]).containing("a").any()
