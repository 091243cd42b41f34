from __future__ import annotations

import pytest

from gputop.errors import GputopError
from gputop.samples import GpuInfo
from gputop.sources.select import select_gpus

GPUS = [GpuInfo(i, f"GPU-{i}a{i}b-77", "H100") for i in (0, 1, 2, 3, 5)]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ([], [0, 1, 2, 3, 4]),
        (["", " , "], [0, 1, 2, 3, 4]),
        (["0"], [0]),
        (["2-3"], [2, 3]),
        (["0,2-3", "1"], [0, 1, 2, 3]),
        (["5"], [4]),  # the index, not the position
        (["3,0,3"], [0, 3]),
        (["GPU-2a2b-77"], [2]),
        (["gpu-5a"], [4]),
        (["all"], [0, 1, 2, 3, 4]),
    ],
)
def test_selects_by_index_range_and_uuid(wanted: list[str], expected: list[int]) -> None:
    assert select_gpus(wanted, GPUS) == expected


@pytest.mark.parametrize(
    ("wanted", "word"),
    [
        ("4", "no GPU 4"),
        ("3-5", "no GPU 4"),
        ("3-1", "backwards"),
        ("GPU-", "5 GPUs"),
        ("GPU-9", "neither"),
        ("-1", "neither"),
        ("x", "neither"),
        ("0-99999999999", "no GPU 4"),  # found without counting up to the end
    ],
)
def test_says_what_is_wrong_and_what_exists(wanted: str, word: str) -> None:
    with pytest.raises(GputopError) as caught:
        select_gpus([wanted], GPUS)
    assert word in caught.value.message
    assert "0, 1, 2, 3, 5" in caught.value.fix
    assert caught.value.exit_code == 2


def test_a_node_without_gpus() -> None:
    assert select_gpus([], []) == []
    with pytest.raises(GputopError, match="no GPU 0"):
        select_gpus(["0"], [])
