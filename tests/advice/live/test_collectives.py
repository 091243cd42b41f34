"""The live rule about a collective that some ranks never join."""

from __future__ import annotations

from gputop.core.findings import Advice
from gputop.ranks.model import RasReport
from gputop.ranks.ras_answers import read_json, read_text
from tests.advice.live.scene import STUCK, Job, Scene, abstained, after, get, ids, verdict
from tests.ranks import ras_double
from tests.records import replace

LATE = ras_double.Job((100, 100, 100, 100, 100, 99, 100, 100), first_pid=100)
# A process for each GPU; GPU 5 is idle, as its rank stands elsewhere.
RANKS = Scene(dict.fromkeys(range(8), 0.15) | {5: 0.0}, other=STUCK,
              jobs=[Job(100 + i, [i], f"python train.py --rank {i}") for i in range(8)])


def report(job: ras_double.Job = LATE, span_s: float = 90.0, last: ras_double.Job | None = None) -> RasReport:
    return RasReport(read_json(ras_double.as_json(job), 0.0), read_json(ras_double.as_json(last or job), span_s),
                     hosts=frozenset({"10.0.0.1"}))


def stuck(ranks: RasReport | None) -> Advice:
    return after(RANKS, 200, ranks)


def test_the_rank_the_others_wait_for_is_the_one_cause() -> None:
    advice = stuck(report())
    assert ids(advice) == ["collective_hang"]  # not idle_gpu, nor spinning beside it
    finding = get(advice, "collective_hang")
    assert finding.severity == "high" and finding.gpus == tuple(range(8))
    assert finding.evidence == {"unchanged_s": 90.0, "absent_ranks_count": 1.0, "waiting_ranks_count": 7.0}
    assert finding.snippet == "gputop stacks 105" and "105" in finding.why and "10.0.0.1" in finding.why


def test_ordinary_states_are_no_hang_and_without_an_answer_it_says_why() -> None:
    moving = ras_double.Job((120, 120, 120, 120, 120, 119, 120, 120), first_pid=100)
    even = ras_double.Job((100,) * 8, first_pid=100)
    for ranks in (None, report(span_s=59.0), report(last=moving), report(even)):
        assert "spinning" in ids(stuck(ranks)) and "collective_hang" not in ids(stuck(ranks))
    advice = stuck(RasReport(problem="nothing listens"))  # without an answer it says why
    assert abstained(advice)["collective_hang"].endswith("nothing listens") and "spinning" in ids(advice)


def test_a_rank_of_another_node_is_looked_at_there_and_one_without_a_name_is_counted() -> None:
    far = ras_double.Job((100,) * 12 + (99,) + (100,) * 3, first_pid=100)
    seen = verdict(RANKS, 200, "collective_hang", report(far))
    assert seen.processes == () and seen.gpus == tuple(range(8)) and seen.absence.absent[0].host == "10.0.0.2"
    assert get(stuck(report(far)), "collective_hang").snippet == "ssh 10.0.0.2 gputop stacks"
    gone = ras_double.Job((100,) * 16, first_pid=100, gone=frozenset({12}))
    assert get(stuck(report(gone)), "collective_hang").severity == "high"
    halves = read_text(ras_double.as_text(ras_double.Job((100,) * 4 + (99,) * 4, version="2.27.7")), 0.0)
    seen = verdict(RANKS, 200, "collective_hang", RasReport(halves, replace(halves, time_s=80.0)))
    assert seen.absence.absent_count == 4 and seen.processes == ()
