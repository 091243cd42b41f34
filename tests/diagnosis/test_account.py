"""The account of each recording here, and of random ones, by its own arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from gputop.diagnosis.diagnose import analyze, analyze_trace
from gputop.trace.model import Kind
from tests.advice.evidence import check_evidence
from tests.diagnosis.real_traces import DATA, analysis_of, needs_data
from tests.trace.build import Builder, keras_steps

OWN = Path(__file__).parents[1] / "data"
RECORDINGS = sorted((*OWN.glob("*.xplane.pb.gz"), *OWN.glob("*.trace.json.gz")))


@pytest.mark.parametrize("file", RECORDINGS, ids=lambda file: file.name)
def test_every_line_of_the_recordings_here_sums_to_its_window(file: Path) -> None:
    check_evidence(analyze(str(file)))


@needs_data
@pytest.mark.parametrize("folder", ["loaded", "cases_more"])
def test_every_line_of_the_shared_recordings_does(folder: str) -> None:
    for path in sorted((DATA / folder).iterdir()):
        if path.name != "truth.json":
            check_evidence(analysis_of(path))


events = st.lists(st.tuples(
    st.integers(0, 2), st.integers(0, 9000), st.integers(0, 900), st.integers(0, len(Kind) - 1),
    st.one_of(st.none(), st.integers(0, 3000))), max_size=25)


# A random recording is read as it stands: a smaller one is found by hand.
@settings(phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(events, st.lists(st.tuples(st.integers(0, 9000), st.integers(0, 800)), max_size=6), st.integers(0, 8),
       st.integers(0, 6))
def test_every_line_of_random_recordings_does(
    device: list[tuple[int, int, int, int, int | None]], waits: list[tuple[int, int]], steps: int, saves: int,
) -> None:
    b = keras_steps(Builder(gpus=3), steps, 1000, 700)
    for gpu, start, length, kind, before in device:
        b.run(gpu, start, length, list(Kind)[kind].name, kind=list(Kind)[kind],
              launch=None if before is None else max(start - before, 0))
    for start, length in waits:
        b.host("IteratorGetNextOp::DoCompute", start, length, line="tf_data_iterator_get_next/1")
    for i in range(saves):
        b.host("SaveV2", 1000 * i + 700, 250)
    b.host("python", 0, 1)  # else there may be no event at all
    check_evidence(analyze_trace(b.build()))
