"""The table of Xid numbers."""

from __future__ import annotations

import pytest

from gputop.core.xid import APPLICATION, CATALOG, DRIVER, HARDWARE, UNKNOWN, explain


@pytest.mark.parametrize(("fault", "numbers"), [
    (APPLICATION, (13, 31, 43, 45, 137)),
    (HARDWARE, (48, 63, 64, 74, 79, 92, 94, 95, 140)),
    (DRIVER, (38, 69, 109, 119, 120)),
])
def test_whose_fault_the_well_known_ones_are(fault: str, numbers: tuple[int, ...]) -> None:
    for number in numbers:
        found = explain(number)
        assert (found.number, found.fault) == (number, fault)
        assert found.meaning and found.action.endswith(".")


def test_a_number_that_is_not_in_the_table_points_to_the_catalog() -> None:
    found = explain(987)
    assert (found.number, found.fault) == (987, UNKNOWN)
    assert CATALOG in found.action
