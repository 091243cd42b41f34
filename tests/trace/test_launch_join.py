from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputop.trace import launch_join
from gputop.trace.launch_join import Launches

# Ids that lie close together, and some far away or unusable.
ID = st.one_of(st.integers(1, 30), st.integers(1, 30), st.sampled_from([-1, 0, 1 << 33, 1 << 39, 1 << 41, -(1 << 63)]))
CALL = st.tuples(ID, st.integers(-1, 2), st.integers(0, 5))


def joined(calls, events, devices):
    """The rule, row by row."""
    by_device = any(device >= 0 for _, device, _ in calls) and all(device in devices for _, device, _ in calls
                                                                   if device >= 0)
    first: dict[tuple[int, int | None], int] = {}
    for row, (id_, device, _) in sorted(enumerate(calls), key=lambda item: (item[1][2], item[0])):
        if 0 < id_ < 1 << 40:
            first.setdefault((id_, device if by_device and device >= 0 else None), row)
    return [first.get((id_, device), first.get((id_, None), -1)) if by_device else first.get((id_, None), -1)
            for id_, device in events]


def column(values):
    return np.array(values, np.int64)


@given(st.lists(CALL, max_size=30), st.lists(st.tuples(ID, st.integers(0, 2)), max_size=30),
       st.sampled_from([(), (0,), (0, 1), (0, 1, 2)]))
def test_each_event_has_the_first_call_of_its_id(calls, events, devices):
    ids, on, start = (column([call[i] for call in calls]) for i in range(3))
    found = Launches(ids, on, start, devices).find(column([id_ for id_, _ in events]), column([d for _, d in events]))
    assert found.tolist() == joined(calls, events, devices)


@given(st.permutations(range(1, 40)), st.integers(-1, 1))
def test_distinct_ids_in_any_order_are_found_without_a_search(ids, device):
    launches = Launches(column(ids), np.full(39, device), np.zeros(39, np.int64), (0, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch_join.np, "searchsorted", None)
        found = launches.find(column(range(-1, 43)), np.full(44, max(device, 0)))
    assert found.tolist() == [ids.index(id_) if id_ in ids else -1 for id_ in range(-1, 43)]
    if device == 0:
        assert launches.find(column(ids), np.full(39, 1)).tolist() == [-1] * 39
