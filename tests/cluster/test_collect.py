"""What is asked, how often, and what is made of the answers; the Prometheus is a double."""

from __future__ import annotations

import pytest

from gputop.advice.fleet.advise import fleet_advice
from gputop.cluster.collect import QUERIES, Collector, complete_fleet
from gputop.cluster.model import NO_JOB, Fleet, FleetView
from gputop.core.errors import GputopError, NoDataError
from gputop.export.cluster import summary
from tests.cluster.fleets import LIMITS, NOW, CannedClient
from tests.cluster.squeue_double import squeue
from tests.cluster.stragglers import DCGM, JOB, LOW, NODE_1, NODE_2, OTHER, by_label, straggler
from tests.records import replace


def collector(client: CannedClient, slurm: bytes | None = None) -> Collector:
    def said() -> bytes:
        if slurm is None:
            raise FileNotFoundError
        return slurm
    return Collector(client, LIMITS, said, clock=lambda: NOW)  # type: ignore[arg-type]


def settled(own: Collector, view: FleetView) -> Fleet:
    """The fleet once all that the view wants has been asked for."""
    for _ in range(4):
        fleet = own.refresh(view)
    return fleet


def test_jobs_come_from_labels_and_their_people_from_slurm() -> None:
    fleet = collector(by_label(), squeue()).refresh(FleetView())
    jobs = {own.id: own for own in fleet.jobs}
    assert set(jobs) == {"7", "8"} and fleet.gpus == 56
    own = jobs["7"]
    assert (own.user, own.name, own.start_s, own.nodes, own.gpus, own.mapped) == ("ada", "train", 100, 4, 32, "label")
    assert (own.activity, own.power_w, own.median, own.mad, own.idle_gpus) == (0.9, 20_000.0, 0.9, 0.01, 0)
    assert [g.name for g in own.low_gpus] == ["n1:3"]
    assert (jobs["8"].user, jobs["8"].idle_gpus, jobs["8"].power_w) == (None, 3, None)
    assert fleet.free is not None and fleet.free.gpus == 16 and fleet.kinds == ("sm_active",)
    (problem,) = fleet.problems
    assert problem.message.startswith("1 of 5 exporters does not answer: n9;")


@pytest.mark.parametrize(("fields", "label", "names", "not_named"), [
    ({"job_id": 10, "array_job_id": 3, "array_task_id": 0}, "10", ("10", "3_0", "3"), ("1", "0", "")),
    ({"job_id": 5, "het_job_id": 4, "het_job_offset": 1}, "5", ("5", "4+1", "4"), ("1",)),
    ({"job_id": 7}, "7", ("7",), ("",)),
])
def test_tasks_of_arrays_and_parts_of_jobs_have_both_names(fields: dict[str, object], label: str,
                                                           names: tuple[str, ...], not_named: tuple[str, ...]) -> None:
    own = {"hpc_job": label}
    client = CannedClient(DCGM, ["hpc_job"], activity=[(own, 0.9)], gpus=[(own, 8)])
    (job,) = collector(client, squeue(**fields)).refresh(FleetView()).jobs
    assert all(map(job.is_named, names)) and not any(map(job.is_named, not_named)) and job.id == label


@pytest.mark.parametrize("value", [9e13, -9e13, 0.0, -1.0])
def test_no_count_and_no_activity_of_a_server_ends_the_look(value: float) -> None:
    """9e13 GPUs were counted one by one."""
    for slurm in (None, squeue()):
        client = by_label() if slurm is None else straggler(
            activity=[(NODE_1, value), (NODE_2, value)], gpus=[(NODE_1, value), (NODE_2, value)])
        client.arms = {figure: [(labels, value) for labels, _ in rows] for figure, rows in client.arms.items()}
        client.history = lambda labels, at_s: value
        own = collector(client, slurm)
        for _ in range(4):
            fleet = own.refresh(FleetView(open_jobs=("7",)))
            fleet_advice(fleet)
        assert all(0 <= holder.gpus <= 2 * 10**7 for holder in (fleet, *fleet.jobs))
    if value < 1:  # no exporter has so many series
        with pytest.raises(GputopError, match="no GPU metrics"):
            collector(CannedClient(dict.fromkeys(DCGM, value), ["hpc_job"])).refresh(FleetView())  # type: ignore[arg-type]


H100 = {"model": "H100"}


def test_a_low_clock_has_its_peers_its_past_and_no_more_queries_than_four() -> None:
    client = CannedClient({**DCGM, "DCGM_FI_DEV_SM_CLOCK": 1600}, ["hpc_job"],
                          activity=[(JOB, 0.9), ({**JOB, **LOW}, 0.97)], gpus=[(JOB, 32)],
                          low_clock=[({**JOB, **LOW, **H100}, 1.2e9)], clock_median=[({**JOB, **H100}, 2e9)],
                          clock_mad=[({**JOB, **H100}, 1e7)], clocks=[({**JOB, **H100}, 31)],
                          low_clocks=[({**JOB, **H100}, 1)], gpu_clock=[(LOW, 1.2e9)],
                          peer_sm_clock_hz=[(JOB, 1.98e9)])
    client.history = lambda labels, at_s: 1.2e9 if "UUID" in labels and "hpc_job" not in labels else 0.97
    own = collector(client)
    for _ in range(4):
        fleet = own.refresh(FleetView())
        assert fleet.queries <= QUERIES
    (low,) = fleet.jobs[0].low_clocks
    assert (low.gpu.name, low.clock_hz, low.median_hz, low.gpus, low.low) == ("n1:3", 1.2e9, 2e9, 31, 1)
    assert fleet.jobs[0].peers == {"sm_clock_hz": 1.98e9}
    assert any("peer_sm_clock_hz" in query for query in client.queries)
    assert any('"figure", "gpu_clock", ' in query and "DCGM_FI_DEV_SM_CLOCK" in query for query in client.queries)
    client.fails["clock_median"] = GputopError("did not answer within 20 s", "")
    fleet = own.refresh(FleetView())
    assert [problem.message for problem in fleet.problems] == ["did not answer within 20 s"]
    assert fleet.jobs[0].low_clocks == (low,)  # what was known stays


def test_where_groups_are_nodes_the_peers_are_all_nodes_of_the_job_and_the_median_is_of_gpus() -> None:
    client = straggler(activity=[(NODE_1, 0.8), (NODE_2, 0.9)], gpus=[(NODE_1, 8), (NODE_2, 8)],
                       lowest=[(NODE_1, 0.1), (NODE_2, 0.9)], median=[(NODE_1, 0.91)],
                       low_gpu=[(LOW, 0.1)],
                       peer_sm_clock_hz=[(NODE_1, 1.97e9), (NODE_2, 1.98e9)])
    own = collector(client, squeue())
    fleet = settled(own, FleetView())
    (job,) = fleet.jobs
    assert job.peers == {"sm_clock_hz": 1.98e9} and job.median == 0.91 and job.node_median == 0.9


def test_a_refresh_has_at_most_four_queries_and_what_is_known_is_not_asked_again() -> None:
    client = by_label()
    own = collector(client)
    view = FleetView(open_jobs=("7",))
    for _ in range(6):
        assert own.refresh(view).queries <= QUERIES
        if own.settled:
            break
    assert own.settled
    before = len(client.queries)
    own.refresh(FleetView())
    # The figures, what differs and the GPUs that do; the history of these minutes is known.
    assert len(client.queries) - before == 3


def test_a_complete_fleet_has_cost_what_its_refreshes_have() -> None:
    client = by_label()
    fleet = complete_fleet(collector(client), FleetView(open_jobs=("7",)))
    assert fleet.queries == len(client.queries) > QUERIES and all(job.history is not None for job in fleet.jobs)


def test_the_past_comes_at_once_and_ends_now() -> None:
    client = by_label()
    client.history = lambda labels, at_s: 0.9 if at_s < NOW - 3600 else 0.3
    own = collector(client)
    fleet = settled(own, FleetView(span_s=7200, step_s=120))
    history = fleet.jobs[0].history
    assert history is not None and len(history.values) == 60 and NOW - 120 < history.time_s(59) <= NOW
    assert history.values[0] == 0.9 and history.values[-1] == 0.3
    assert fleet.jobs[0].low_gpus[0].history is not None


def by_node() -> CannedClient:
    nodes = ((NODE_1, 0.9), (NODE_2, 0.5))
    return CannedClient(DCGM, (), activity=nodes, gpus=[(NODE_1, 8), (NODE_2, 8)], median=nodes)


def test_without_labels_and_slurm_that_is_said() -> None:
    fleet = collector(by_node()).refresh(FleetView())
    assert fleet.jobs == () and fleet.free is not None and fleet.free.gpus == 16
    assert [(node.name, node.activity, node.history) for node in fleet.free_nodes] == [
        ("n1", 0.9, None), ("n2.example", 0.5, None)]
    collecting = collector(by_node())
    fleet = settled(collecting, FleetView(open_jobs=(NO_JOB,)))
    assert all(node.history is not None for node in fleet.free_nodes)  # asked for where they are shown
    assert "no job label" in fleet.problems[0].message and fleet.problems[0].fix


def test_before_the_first_answer_a_fault_is_an_error_and_after_it_the_rest_stays() -> None:
    client = by_label()
    client.fails["count by (__name__"] = GputopError("gone", "mend it")
    own = collector(client)
    with pytest.raises(GputopError, match="gone"):
        own.refresh(FleetView())
    client.fails.clear()
    assert own.refresh(FleetView()).figures_s == NOW
    client.fails['"levels"'] = GputopError("401", "a token")
    fleet = own.refresh(FleetView())
    assert len(fleet.jobs) == 2 and ("401", "a token") in [(p.message, p.fix) for p in fleet.problems]
    client.fails = {'"mad"': GputopError("refused")}
    assert any(p.message == "refused" for p in own.refresh(FleetView()).problems)


def test_what_is_refused_is_not_asked_for_again_at_once() -> None:
    client = by_label()
    client.fails["avg_over_time(DCGM_FI_PROF_SM_ACTIVE[120s])"] = GputopError("too many points")
    own = collector(client)
    own.refresh(FleetView())
    fleet = own.refresh(FleetView())
    assert own.settled and fleet.jobs[0].history is None


def test_simulated_figures_are_called_so() -> None:
    client = by_label()
    assert not collector(client).refresh(FleetView()).simulated
    client._labels = ["hpc_job", "simulated"]
    fleet = collector(client).refresh(FleetView())
    assert fleet.simulated and summary(fleet).startswith("SIMULATED · 2 jobs")


def test_no_rows_are_not_no_gpus() -> None:
    client = by_label()
    own = collector(client)
    own.refresh(FleetView())
    client.arms.clear()
    fleet = own.refresh(FleetView())
    assert len(fleet.jobs) == 2 and "no GPU metrics for this time" in fleet.problems[0].message


def test_where_the_activity_goes_missing_it_is_looked_for_anew() -> None:
    client = by_label()
    own = collector(client)
    own.refresh(FleetView())
    activity = client.arms.pop("activity")
    fleet = own.refresh(FleetView())  # a GPU whose activity is unknown is none that is gone
    assert (len(fleet.jobs), fleet.gpus) == (2, 56) and "no longer has GPU activity" in fleet.problems[0].message
    client.arms["activity"] = activity
    del client._names["DCGM_FI_PROF_SM_ACTIVE"]
    assert own.refresh(FleetView()).kinds == ("util",)
    client._names["DCGM_FI_PROF_GR_ENGINE_ACTIVE"] = 1600
    client.arms["empty_target"] = [({"instance": "n3:9400", "job": "dcgm"}, 1.0)]
    assert own.refresh(FleetView()).kinds == ("util",)
    assert own.refresh(FleetView()).kinds == ("gr_active",)


def test_what_lacks_of_the_fleet_is_told_before_what_slurm_lacks() -> None:
    fleet = collector(by_label(), b"slurm_load_jobs error").refresh(FleetView())
    first, *_, last = fleet.problems
    assert len(fleet.jobs) == 2 and "1 of 5 exporters does not answer: n9" in first.message and "squeue" in last.message


A, B = {"cluster": "a"}, {"cluster": "b"}


def test_jobs_and_nodes_with_one_name_in_two_clusters_stay_apart() -> None:
    client = CannedClient(DCGM, ["hpc_job"], activity=[({**JOB, **A}, 0.9), ({**JOB, **B}, 0.1)],
                          gpus=[({**JOB, **A}, 8), ({**JOB, **B}, 16)], clusters=("a", "b"))
    jobs = {own.id: own for own in collector(client, squeue(cluster="b")).refresh(FleetView()).jobs}
    assert {name: (own.gpus, own.user) for name, own in jobs.items()} == {"a/7": (8, None), "b/7": (16, "ada")}
    assert all(own.is_named("7") for own in jobs.values()) and jobs["b/7"].is_named("b/7")
    assert any("avg by (hpc_job, cluster)" in query for query in client.queries)
    *_, problem = collector(client, squeue(cluster="c")).refresh(FleetView()).problems
    assert "2 clusters" in problem.message
    alone = by_label()
    alone._clusters = ("a",)
    assert {own.id for own in collector(alone).refresh(FleetView()).jobs} == {"7", "8"}, "one cluster is not named"
    assert not any("by (hpc_job, cluster)" in query for query in alone.queries)


def test_a_prometheus_without_gpus_is_no_data() -> None:
    with pytest.raises(GputopError, match="has no GPU metrics") as caught:
        collector(CannedClient({"DCGM_FI_DEV_FAN_SPEED": 3})).refresh(FleetView())
    assert caught.value.exit_code == NoDataError("").exit_code


def test_open_nodes_have_their_gpus() -> None:
    client = by_label()
    own = collector(client)
    view = FleetView(open_jobs=("7",), open_nodes=(("7", "n1"),))
    client.arms["activity"] = [({**JOB, **NODE_1, "UUID": "GPU-1", "gpu": "3"}, 0.5),
                               ({**OTHER, **NODE_1, "UUID": "GPU-2", "gpu": "4"}, 0.6), *client.arms["activity"]]
    fleet = settled(own, view)
    opened = next(n for n in fleet.jobs[0].each if n.name == "n1")
    assert [(g.gpu, g.activity) for g in opened.each] == [("3", 0.5)]  # not those that others hold there
    assert replace(view) == view


@pytest.mark.parametrize(("own_s", "words"), [
    (-1800.0, "30 min behind the clock of Prom"), (1800.0, "30 min ahead of the clock")])
def test_where_the_clocks_differ_the_time_is_that_of_prometheus(own_s: float, words: str) -> None:
    client = by_label()
    own = Collector(client, LIMITS, None, clock=lambda: NOW + own_s)  # type: ignore[arg-type]
    fleet = settled(own, FleetView())
    assert fleet.figures_s == fleet.time_s == NOW
    assert [problem.message for problem in fleet.problems if words in problem.message]
    history = next(job.history for job in fleet.jobs if job.id == "7")
    assert history is not None and history.values[-2] == 0.9


def test_a_label_with_a_new_name_is_looked_for_at_once() -> None:
    client = by_label()
    own = collector(client)
    own.refresh(FleetView())
    client._labels = ["slurm_job_id"]
    client.arms = {arm: [({"slurm_job_id": labels["hpc_job"]} if "hpc_job" in labels else labels, value)
                         for labels, value in rows] for arm, rows in client.arms.items()}
    own.refresh(FleetView())
    assert {job.id for job in own.refresh(FleetView()).jobs} == {"7", "8"}


def test_slurms_nodes_are_those_of_its_own_cluster() -> None:
    nodes = [({**NODE_1, **A}, 0.9), ({**NODE_2, **A}, 0.9), ({**NODE_1, **B}, 0.1), ({**NODE_2, **B}, 0.3)]
    client = CannedClient(DCGM, (), activity=nodes, gpus=[(own, 8) for own, _ in nodes], clusters=("a", "b"))
    fleet = collector(client, squeue(cluster="b")).refresh(FleetView())
    assert [(own.id, own.activity) for own in fleet.jobs] == [("7", pytest.approx(0.2))]
    assert [node.name for node in fleet.free_nodes] == ["a/n1", "a/n2.example"]


def test_one_cluster_is_not_named() -> None:
    client = by_label()
    client._clusters = ("a",)
    assert {own.id for own in collector(client).refresh(FleetView()).jobs} == {"7", "8"}
    assert not any("by (hpc_job, cluster)" in query for query in client.queries)
