"""Names that a pattern matches, found by their words first, and those of the host alone."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gputop.analysis.host.host_spans import _NOT_ITS_OWN
from gputop.trace.lookups import host_rows, name_mask
from gputop.trace.model import DeviceEvents, HostEvents
from tests.trace.build import Builder

# Letters whose lower case is longer, or not theirs alone, and the one that stands between names.
TEXTS = st.text("abAİßK\n:", max_size=6)


@given(st.lists(TEXTS, max_size=6), st.lists(st.text("abk:", min_size=1, max_size=2), min_size=1, max_size=3))
def test_only_names_with_one_of_the_words_are_matched(names, words):
    trace = replace(Builder().host("call", 0, 1).build(), names=names, host=HostEvents.empty(),
                    device=DeviceEvents.empty())
    chosen = [any(word in name.lower() for word in words) for name in names]
    assert name_mask(trace, "", tuple(words)).tolist() == [*chosen, False]
    matched = [some and re.match("[ab]", name) is not None for some, name in zip(chosen, names, strict=True)]
    assert name_mask(trace, "[ab]", tuple(words)).tolist() == [*matched, False]


def test_the_host_of_a_part_is_asked_anew():
    """Parts of a trace share what was found in it: a name that only the whole has is found there all the same."""
    trace = Builder().host("early call", 0, 1).host("late call", 10, 1).run(0, 2, 1, "call of a GPU").build()
    late = replace(trace, host=HostEvents(*(getattr(trace.host, name)[1:] for name in (
        "line", "name", "start_ns", "end_ns"))))
    for _ in range(2):
        assert len(host_rows(late, ".*call")) == 1 and len(host_rows(late, ".*call", words=("late",))) == 1
        assert len(host_rows(trace, ".*call")) == 2 and len(host_rows(trace, ".*call", words=("early",))) == 1
    assert [trace.names[i] for i in range(len(trace.names)) if name_mask(trace, ".*GPU")[i]] == ["call of a GPU"]
    assert not name_mask(trace, ".*GPU", on_host=True).any()


@pytest.mark.parametrize(("name", "holds_others"), [
    ("b:PartitionedCall", True), ("x:RemoteCall", True), ("while:StatelessWhile", True), ("c:_HostSend", True),
    ("it:IteratorGetNextV2", True), ("i:OptionalGetValue", True), ("n:NoOp", True), ("n:_Retval", True),
    ("q:QueueDequeueManyV2", True), ("x:XlaLaunch", True), ("x:_XlaRun", True), ("b:BarrierTakeMany", True),
    ("c:CollectiveReduceV2", True), ("n:NcclAllReduce", True), ("m:MatMul", False), ("n:NoOpX", False),
    ("n:ArgMax", False), ("w:WhileX", False), ("If", False), ("a:If:b", False), ("ns::If<int>", False)])
def test_ops_that_hold_others_by_their_type(name, holds_others):
    assert (re.match(_NOT_ITS_OWN, name) is not None) is holds_others
