"""A reading is a finite number or a reason."""

from __future__ import annotations

import pytest

from gputop.core.codec import convert
from gputop.core.samples import Reading
from tests.records import replace


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_missing(value: float) -> None:
    made = Reading(value, "W", "NVML")
    assert (made.value, made.reason, made.source) == (None, f"{value} is no measurement", "NVML")
    assert replace(Reading(1.0, "W"), value=value).value is None
    assert convert({"value": value, "unit": "W"}, Reading, any_number=True).value is None


@pytest.mark.parametrize(("value", "reason"), [(1.0, "too late"), (None, None)])
def test_a_value_and_a_reason_exclude_each_other(value: float | None, reason: str | None) -> None:
    with pytest.raises(ValueError, match="has a value or a reason"):
        Reading(value, "W", reason=reason)
