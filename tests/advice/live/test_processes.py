"""Live rules about processes: each on its fault, on what looks like it, over time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gputop.advice.live.advise import live_advice
from gputop.advice.live.jobs import same_job
from gputop.core.findings import Advice
from gputop.core.samples import GpuProcess, GpuSample, NodeSample, ProcessSample
from gputop.telemetry.history import History
from tests.advice.live.scene import START_S, Job, Level, Scene, abstained, after, get, ids, play, read, verdict
from tests.records import replace

# -- idle_gpu and unused_gpu ----------------------------------------------------------------------

def test_one_process_uses_one_of_the_gpus_it_holds() -> None:
    advice = after(Scene(dict.fromkeys(range(1, 8), 0.0)), 150)
    finding = get(advice, "idle_gpu")
    assert (finding.gpus, finding.severity) == (tuple(range(1, 8)), "high")
    assert finding.evidence["window_s"] == 60.0 and finding.evidence["held_gpus_count"] == 8.0
    assert finding.snippet is not None and "CUDA_VISIBLE_DEVICES=0 " in finding.snippet


def test_a_process_is_starting_up_for_two_minutes_after_it_came_or_started() -> None:
    scene = Scene({1: 0.0}, jobs=[Job(since_s=100)], gpus=2)
    _, advice = play(scene, 240)
    first = next(i for i, a in enumerate(advice) if "idle_gpu" in ids(a))
    assert first == 220  # 120 s after the process came
    scene = Scene({1: 0.0}, jobs=[Job(started_s=START_S - 1000)], gpus=2)
    _, advice = play(scene, 100)
    assert 45 <= next(i for i, a in enumerate(advice) if "idle_gpu" in ids(a)) <= 60


@pytest.mark.parametrize("pause_s", [20, 55])
def test_pauses_for_validation_are_not_idle(pause_s: float) -> None:
    def one_gpu_goes_on(t: float) -> float:
        return 0.0 if 150 <= t < 150 + pause_s else 0.9

    _, advice = play(Scene(dict.fromkeys((1, 2), one_gpu_goes_on), gpus=3), 260)
    assert all("idle_gpu" not in ids(a) and "gpu0_oversubscribed" not in ids(a) for a in advice)


def test_all_gpus_of_a_process_idle_takes_longer() -> None:
    def pause(t: float) -> float:
        return 0.9 if t < 150 else 0.0

    _, advice = play(Scene(dict.fromkeys((0, 1), pause), gpus=2), 290)
    first = next(i for i, a in enumerate(advice) if "idle_gpu" in ids(a))
    assert 150 + 0.95 * 120 <= first <= 150 + 121
    finding = get(advice[-1], "idle_gpu")
    assert finding.severity == "medium" and finding.gpus == (0, 1) and finding.snippet == "gputop stacks 100"
    assert not {"gpu0_oversubscribed", "unused_gpu"} & set(ids(advice[-1]))
    assert "compiling, loading, computing on the CPU, or stuck. The process uses 1.5 CPU cores" in finding.why
    waits = Job(gpus=[0], cores=0.0, started_s=START_S - 1000)
    quiet = get(after(Scene({0: 0.0}, jobs=[waits], gpus=1), 150), "idle_gpu")
    assert "because it is waiting or stuck. The process uses 0.0 CPU cores" in quiet.why


def test_what_is_not_idle_and_what_is_by_coarse_utilization() -> None:
    jobs = [Job(100, [0]), Job(200, [0, 1], "python other.py")]
    assert "idle_gpu" not in ids(after(Scene({0: 0.9, 1: 0.9}, jobs=jobs, gpus=2), 200))
    assert "idle_gpu" not in ids(after(Scene({7: 0.02}), 150))  # a little work is work
    assert get(after(Scene({7: 0.0}, fine=False), 150), "idle_gpu").gpus == (7,)  # idle with coarse utilization only


def test_idle_leaves_when_work_begins_and_does_not_flicker() -> None:
    _, advice = play(Scene({1: lambda t: 0.9 if t >= 200 else 0.0}, gpus=2), 230)
    assert "idle_gpu" in ids(advice[199]) and "idle_gpu" not in ids(advice[205])
    # A stray kernel now and then brings the mean to 2%: not idle by itself, but not a reason to leave.
    def stray(t: float) -> float:
        return 0.6 if t > 200 and t % 30 == 0 else 0.0

    scene = Scene({1: stray}, gpus=2)
    _, advice = play(scene, 400)
    shown = ["idle_gpu" in ids(a) for a in advice]
    assert shown.index(True) < 130 and all(shown[shown.index(True):])
    assert "idle_gpu" not in ids(after(scene, 400))


def test_unused_gpus_are_distinguished_from_idle_ones_and_from_those_between_two_jobs() -> None:
    advice = after(Scene(jobs=[Job(gpus=range(6))]), 150)
    assert ids(advice) == ["unused_gpu"]
    assert get(advice, "unused_gpu").gpus == (6, 7) and get(advice, "unused_gpu").severity == "low"
    jobs = [Job(gpus=[0]), Job(200, [1], until_s=100), Job(300, [1], since_s=150)]
    _, advice = play(Scene(jobs=jobs, gpus=2), 200)
    assert all("unused_gpu" not in ids(a) for a in advice)
    _, advice = play(Scene({1: lambda t: 0.6 if t > 100 and t % 30 == 0 else 0.0}, jobs=[Job(gpus=[0])], gpus=2), 250)
    shown = ["unused_gpu" in ids(a) for a in advice]
    assert shown.index(True) < 65 and all(shown[shown.index(True):])


def test_a_gpu_at_work_without_a_listed_process_is_not_free() -> None:
    """From inside a container the processes of others are hidden."""
    advice = after(Scene({6: 0.9, 7: 0.02}, jobs=[Job(gpus=range(6))]), 150)
    assert ids(advice) == [] and "GPUs 6-7" in abstained(advice)["unused_gpu"]
    advice = after(Scene({6: 0.9}, jobs=[Job(gpus=range(6))]), 150)
    assert get(advice, "unused_gpu").gpus == (7,)
    alone = after(Scene({6: 0.9}, jobs=()), 150)
    assert "the processes on GPU 6" in abstained(alone)["idle_gpu"]


def test_a_gpu_that_only_draws_runs_no_job() -> None:
    def draws(gpu: GpuSample, t: float) -> GpuSample:
        screen = GpuProcess(9, "G", None, read("memory_used_bytes", 1e9), read("sm_active", None))
        return replace(gpu, processes=(screen,))

    desktop = after(Scene({0: 0.03}, jobs=(), gpus=1, change=draws), 200)
    assert ids(desktop) == [] and desktop.limit == "No compute process is listed on GPU 0."
    assert "lists no process" not in abstained(desktop)["idle_gpu"]


def test_ranks_that_wait_for_another_one_and_those_of_another_pid_namespace() -> None:
    jobs = [Job(100 + gpu, (gpu,), f"python train.py --rank={gpu}", since_s=-300) for gpu in range(4)]
    seen = verdict(Scene({1: 0.0, 2: 0.0, 3: 0.0}, jobs=jobs, gpus=4), 300, "idle_gpu")
    assert seen.gpus == (1, 2, 3) and seen.busy_gpus == (0,)
    unseen = [replace(job, command=None, reason="not in this PID namespace") for job in jobs]
    advice = after(Scene(dict.fromkeys(range(4), 0.0), jobs=unseen, gpus=4), 300)
    assert not get(advice, "idle_gpu").snippet, "their PIDs mean other processes here"


def test_gpus_of_different_models_are_not_compared() -> None:
    def models(gpu: GpuSample, t: float) -> GpuSample:
        return replace(gpu, info=replace(gpu.info, name="L4")) if gpu.info.index == 0 else gpu

    assert "gpu0_oversubscribed" in ids(after(busy_first(0.95, 0.35), 100))
    assert "of one model" in abstained(after(busy_first(0.95, 0.35, change=models), 100))["gpu0_oversubscribed"]


def test_servers_and_notebooks_that_do_nothing_wait_and_are_not_stuck() -> None:
    for command, waits in (("python -m vllm.entrypoints.api_server", "requests"),
                           ("python -m ipykernel_launcher -f k.json", "its user")):
        job = Job(gpus=[0], command=command, cores=0.0, started_s=START_S - 1000)
        finding = get(after(Scene({0: 0.0}, jobs=[job], gpus=1), 150), "idle_gpu")
        assert finding.severity == "low" and f"waiting for {waits}" in finding.brief and not finding.unknown
        assert "stuck" not in f"{finding.why} {finding.brief} {finding.snippet}"
    jobs = [Job(100 + i, [i], f"python train.py --rank {i}", cores=0.0, started_s=START_S - 1000) for i in range(4)]
    finding = get(after(Scene(dict.fromkeys(range(4), 0.0), jobs=jobs, gpus=4), 150), "idle_gpu")
    assert "train.py (pid 100) and 3 other processes are waiting or stuck" in finding.brief
    assert finding.snippet == "gputop stacks 100 101 102 103" and finding.severity == "medium"


# -- job_on_cpu ---------------------------------------------------------------------------------

ON_CPU = Job(gpus=(), command="python train.py", framework="pytorch", started_s=START_S - 30, cores=1.0)


def test_a_job_that_computes_on_the_cpu_while_no_process_uses_a_gpu() -> None:
    _, advice = play(Scene(jobs=[ON_CPU], gpus=2), 100)
    first = next(i for i, one in enumerate(advice) if "job_on_cpu" in ids(one))
    assert 45 <= first <= 61 and all("job_on_cpu" in ids(one) for one in advice[first:]) and not advice[-1].limit
    finding = get(advice[-1], "job_on_cpu")
    assert (finding.gpus, finding.severity, finding.evidence["cpu_cores"]) == ((0, 1), "high", 1.0)
    assert finding.title.endswith("train.py runs on the CPU") and "torch.cuda.is_available" in (finding.snippet or "")
    hidden = get(after(Scene(jobs=[replace(ON_CPU, visible="-1")], gpus=2), 100), "job_on_cpu")
    assert "CUDA_VISIBLE_DEVICES=-1, which hides all GPUs" in hidden.why and "env -u" in (hidden.snippet or "")
    assert "CUDA_VISIBLE_DEVICES='', which" in get(
        after(Scene(jobs=[replace(ON_CPU, visible="")], gpus=2), 100), "job_on_cpu").why
    visible = get(after(Scene(jobs=[replace(ON_CPU, visible="0,1")], gpus=2), 100), "job_on_cpu")
    assert "CUDA_VISIBLE" not in visible.why and visible.snippet == finding.snippet


@pytest.mark.parametrize("scene", [
    Scene(jobs=[replace(ON_CPU, framework="")], gpus=2),  # a compiler
    Scene(jobs=[replace(ON_CPU, cores=0.2)], gpus=2),  # a notebook
    Scene(jobs=[replace(ON_CPU, started_s=START_S + 80)], gpus=2),  # has only begun
    Scene(jobs=[ON_CPU, Job(200, [1])], gpus=2),  # another job uses one
    Scene({0: 0.2}, jobs=[ON_CPU], gpus=2),  # somebody does, unseen from inside a container
    Scene(jobs=[ON_CPU], gpus=2, other={"memory_used_bytes": 30e9}),  # it may do so itself
    Scene(jobs=[ON_CPU], gpus=2, other={"memory_used_bytes": None}),
    Scene(jobs=[ON_CPU], gpus=2, watched=[0]),
    Scene(jobs=[], gpus=2),
], ids=["other program", "idle", "young", "gpu in use", "unlisted", "memory in use", "memory unknown", "partly watched",
        "none"])
def test_who_does_not_run_on_the_cpu_by_mistake(scene: Scene) -> None:
    assert all("job_on_cpu" not in ids(one) for one in play(scene, 120)[1])


def test_a_job_that_has_ended_is_no_pause() -> None:
    gone = Scene({i: (lambda t: 0.9 if t < 100 else 0.0) for i in (0, 1)}, jobs=[Job(gpus=(0, 1), until_s=100)], gpus=2)
    assert after(gone, 140).limit == "The last process on GPUs 0-1 ended 39 s ago."
    assert "no process is listed" in after(gone, 260).limit
    paused = Scene({i: (lambda t: 0.9 if t < 200 else 0.0) for i in (0, 1)}, jobs=[Job(gpus=(0, 1))], gpus=2)
    assert "fell from" in after(paused, 240).limit


def test_a_node_without_a_job_is_said_to_have_none() -> None:
    assert after(Scene(jobs=[], gpus=2), 60).limit == "GPUs 0-1 idle for 30 s, and no process is listed there."
    assert "No problem found" in after(Scene({0: 0.2}, jobs=[], gpus=2), 60).limit  # somebody does, unseen


def test_it_stays_while_the_job_waits_and_goes_once_it_is_idle() -> None:
    def cores(t: float) -> float:
        return 1.0 if t < 90 else 0.2 if t < 110 else 0.0

    _, advice = play(Scene(jobs=[replace(ON_CPU, cores=cores)], gpus=2), 120)
    assert "job_on_cpu" in ids(advice[105]) and "job_on_cpu" not in ids(advice[-1])


# -- a view of some GPUs only (--gpus) ----------------------------------------------------------------

def test_what_a_job_does_outside_the_view_is_not_denied() -> None:
    """A job on 0-7 of which only 6 and 7 are watched."""
    scene = Scene({7: 0.0}, watched=(6, 7))
    finding = get(after(scene, 150), "idle_gpu")
    seen = verdict(scene, 150, "idle_gpu")
    assert (seen.complete, seen.worst.held) == (False, 2) and "2 GPUs" not in finding.gain.how
    assert "CUDA_VISIBLE_DEVICES" not in (finding.snippet or "")
    assert finding.severity == "medium"  # one of eight for all that is known
    assert "held_gpus_count" not in finding.evidence and finding.evidence["held_gpus_watched_count"] == 2.0
    scene = Scene({6: 0.0, 7: 0.0}, watched=(6, 7))  # a job that works outside the view is not called stuck
    finding, seen = get(after(scene, 150), "idle_gpu"), verdict(scene, 150, "idle_gpu")
    assert not seen.complete and seen.worst.busy_activity is None and "--gpus" in finding.action
    assert "stuck" not in f"{finding.why} {finding.action} {finding.gain.how}"


def test_the_first_gpu_watched_need_not_be_the_first_of_the_job() -> None:
    uneven = dict.fromkeys(range(8), 0.3)
    advice = after(Scene(uneven | {4: 0.95}, watched=(4, 5, 6)), 60)
    assert "gpu0_oversubscribed" not in ids(advice) and "--gpus" in abstained(advice)["gpu0_oversubscribed"]
    # GPU 0 is watched, but the job is on others, the first of which is not.
    other = Scene(uneven | {5: 0.95}, watched=(0, 5, 6, 7), jobs=[Job(gpus=range(4, 8))])
    assert "gpu0_oversubscribed" in abstained(after(other, 60))
    seen = verdict(Scene(uneven | {0: 0.95}, watched=(0, 3)), 60, "gpu0_oversubscribed")
    assert (seen.gpus, seen.peers, seen.complete) == ((0,), (3,), False)


def test_no_process_on_the_gpus_watched_is_not_none_on_the_node() -> None:
    advice = after(Scene(jobs=[Job(gpus=range(4))], watched=(6, 7)), 150)
    assert ids(advice) == [] and "watched" in abstained(advice)["idle_gpu"]
    # All ranks hold a context on GPU 0; that each has its own GPU is out of view.
    jobs = [Job(100 + i, [0, i], f"python train.py --rank {i}") for i in (1, 2)]
    assert "shared_gpu" not in ids(after(Scene(jobs=jobs, watched=(0,)), 40))


# -- gpu0_oversubscribed --------------------------------------------------------------------------

def busy_first(first: Level, peers: Level, **more: object) -> Scene:
    return Scene({0: first} | dict.fromkeys(range(1, 8), peers), **more)  # type: ignore[arg-type]


def test_the_first_gpu_of_the_process_does_twice_the_work() -> None:
    advice = after(busy_first(0.95, 0.4), 60)
    finding = get(advice, "gpu0_oversubscribed")
    assert (finding.gpus, finding.severity) == ((0,), "high")
    assert finding.evidence["times_peers"] == pytest.approx(0.95 / 0.4)
    assert finding.evidence["slices_share_ratio"] == 1.0
    scene = Scene({4: 0.95, 5: 0.3, 6: 0.3, 7: 0.3}, jobs=[Job(gpus=range(4, 8))])
    assert get(after(scene, 60), "gpu0_oversubscribed").gpus == (4,)


@pytest.mark.parametrize(("first", "peers"), [(0.9, 0.75), (0.14, 0.03), (0.5, 0.5), (0.4, 0.95)])
def test_near_misses_of_an_uneven_job(first: float, peers: float) -> None:
    advice = after(busy_first(first, peers), 60)
    assert "gpu0_oversubscribed" not in ids(advice) and "gpu0_oversubscribed" not in abstained(advice)


def test_another_busy_gpu_validation_on_the_first_and_a_process_for_each_gpu_are_another_matter() -> None:
    scene = Scene({0: 0.95, 1: 0.95} | dict.fromkeys(range(2, 8), 0.3))
    assert "gpu0_oversubscribed" not in ids(after(scene, 60))
    _, advice = play(busy_first(0.9, lambda t: 0.0 if 60 <= t < 105 else 0.85, gpus=3), 200)
    assert all("gpu0_oversubscribed" not in ids(a) for a in advice)
    jobs = [Job(100 + i, [i], f"python train.py --rank {i}") for i in range(8)]  # one process per GPU is not compared
    advice = after(busy_first(0.95, 0.3, jobs=jobs), 60)
    assert "several GPUs" in abstained(advice)["gpu0_oversubscribed"]


def test_uneven_by_coarse_utilization_and_without_flicker() -> None:
    scene = busy_first(0.95, 0.4, fine=False)
    advice = after(scene, 60)  # waiting counts as busy: 100% everywhere
    assert "SM activity" in abstained(advice)["gpu0_oversubscribed"]
    uneven = replace(scene, change=lambda g, t: replace(
        g, readings={**g.readings, "gpu_util": read("gpu_util", 0.95 if g.info.index == 0 else 0.4)}))
    finding = get(after(uneven, 60), "gpu0_oversubscribed")
    assert "first_gpu_gpu_util_ratio" in finding.evidence
    assert verdict(uneven, 60, "gpu0_oversubscribed").metric == "gpu_util"
    # Ratio 1.4 for a while: too little to appear, too much to go.
    def peers(t: float) -> float:
        return 0.4 if t < 100 else 0.64 if t < 200 else 0.88

    scene = busy_first(0.9, peers, gpus=3)
    history, advice = play(scene, 200)
    shown = ["gpu0_oversubscribed" in ids(a) for a in advice]
    assert shown.index(True) < 31 and all(shown[shown.index(True):])
    assert "gpu0_oversubscribed" not in ids(live_advice(history, scene.sample(199)))
    _, rest = play(scene, 40, history, 200, advice[-1].findings)
    gone = ["gpu0_oversubscribed" in ids(a) for a in rest]
    assert gone[0] and not gone[-1] and gone == sorted(gone, reverse=True)


# -- shared_gpu -------------------------------------------------------------------------------------

def two(a: Job, b: Job, **more: object) -> Advice:
    return after(Scene(jobs=[a, b], **more), 40)  # type: ignore[arg-type]


def test_two_jobs_on_one_gpu() -> None:
    advice = two(Job(100, [0, 1], sm=0.6), Job(200, [1], "python other.py", "bob", sm=0.3))
    finding = get(advice, "shared_gpu")
    assert (finding.gpus, finding.severity) == ((1,), "high")
    assert finding.evidence["first_sm_ratio"] == 0.6 and finding.evidence["second_sm_ratio"] == 0.3
    assert "ana" in finding.why and "bob" in finding.why
    advice = two(Job(100, [0], "python train.py --lr 0.1"), Job(200, [0], "python train.py --lr 0.01"))
    assert "shared_gpu" in ids(advice)
    assert get(two(Job(100, sm=0.9), Job(200, [1], "jupyter", sm=0.0)), "shared_gpu").severity == "low"
    assert get(two(Job(100), Job(200, [1], "jupyter")), "shared_gpu").severity == "low"  # SM share not known
    jobs = [Job(100, [0]), Job(200, [0], "python b.py"), Job(300, [0], "nvidia-cuda-mps-server")]
    advice = after(Scene(jobs=jobs), 40)
    assert "MPS" in abstained(advice)["shared_gpu"]
    assert "pid 200" in abstained(two(Job(100, [0]), Job(200, [0], None)))["shared_gpu"]


@pytest.mark.parametrize(("a", "b"), [
    (Job(100, [0]), Job(200, [0], "python other.py", parent=100)),  # a child
    (Job(100, [0, 1], "python train.py --rank 0"), Job(200, [0, 2], "python train.py --rank 1")),  # ranks
    (Job(100, [0]), Job(200, [0])),  # a worker of the same program
    (Job(100, [0]), Job(200, [0], "python other.py", memory=0.5e9)),  # a bare context
    (Job(100, [0]), Job(200, [0], "python other.py", since_s=35)),  # just come
    (Job(100, [0]), Job(200, [1], "python other.py")),  # a GPU each
    (Job(100, [0]), Job(200, [0], "nv-hostengine -n")),  # a service
    (Job(100, [0]), Job(200, [0], None)),  # who knows
])
def test_what_is_not_sharing(a: Job, b: Job) -> None:
    assert "shared_gpu" not in ids(two(a, b))


def test_severity_of_sharing_does_not_flicker() -> None:
    history = History()
    severities, previous = [], ()
    for t in range(60):
        sm = 0.2 if t < 20 else 0.1 if t % 2 else 0.16  # around the limit of 0.15
        sample = Scene(jobs=[Job(100, [0], sm=0.6), Job(200, [0], "python b.py", sm=sm)]).sample(t)
        history.append(sample)
        advice = live_advice(history, sample, previous)
        previous = advice.findings
        severities += [f.severity for f in advice.findings if f.id == "shared_gpu"]
    assert severities == ["high"] * 50


def test_one_job() -> None:
    def process(job: Job) -> ProcessSample:
        return Scene(jobs=[job]).sample(0).processes[0]

    assert not same_job(process(Job(1, [0])), process(Job(2, [0], user="bob")))
    assert same_job(process(Job(1, [0], "mpirun -n 2 t", parent=7)), process(Job(7, [1], "mpirun", "root")))
    assert not same_job(process(Job(1, [0], None)), process(Job(2, [1], None)))
    spawned = "python -c from multiprocessing.spawn import spawn_main; spawn_main(pipe_handle="
    assert same_job(*(process(Job(pid, [0], f"{spawned}{pid})", parent=9)) for pid in (1, 2)))
    assert same_job(*(process(Job(pid, [0], f"python t.py --local-rank={pid}")) for pid in (1, 2)))
    assert not same_job(*(process(Job(pid, [0], f"python t.py --lr={pid}")) for pid in (1, 2)))


def ranks(gpus: Sequence[int], command: str = "python -u train.py", memory: float = 8e9, **more: object) -> Scene:
    """A process for each of these GPUs, of eight."""
    active = {gpu: 0.9 if gpu in gpus else 0.0 for gpu in range(8)}
    jobs = [Job(100 + n, [gpu], command.format(n), memory=memory, framework="pytorch") for n, gpu in enumerate(gpus)]
    return Scene(active, jobs=jobs, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("command", ["python -u train.py", "python train.py --local-rank {}"])
def test_ranks_of_one_job_that_landed_on_one_gpu(command: str) -> None:
    finding = get(after(ranks([0] * 8, command), 150), "shared_gpu")
    assert finding.title == "8 processes of train.py share GPU 0, while GPUs 1-7 are unused"
    assert (finding.gpus, finding.severity) == ((0,), "medium") and "set_device" in (finding.snippet or "")
    two_on_one = get(after(ranks([0, 1, 2, 3, 4, 5, 6, 0], command), 150), "shared_gpu")
    assert two_on_one.title == "2 processes of train.py share GPU 0, while GPU 7 is unused"
    assert "shared_gpu" not in ids(after(ranks(range(8), command), 150))
    assert "shared_gpu" not in ids(after(ranks([0] * 8 + [*range(1, 8)], command), 150))  # no GPU is free
    assert "shared_gpu" not in ids(after(ranks([0] * 8, "python -m vllm.serve"), 150))
    children = ranks([0, 0])
    children = replace(children, jobs=[children.jobs[0], replace(children.jobs[1], parent=100)])
    assert "shared_gpu" not in ids(after(children, 150))


def test_ranks_that_hold_memory_on_the_first_gpu_besides_their_own() -> None:
    jobs = [Job(100 + i, [0, i] if i else [0], f"python train.py --rank {i}") for i in range(4)]

    class Contexts(Scene):
        """On GPU 0, each rank but the first holds a context alone."""

        def sample(self, t: float) -> NodeSample:
            sample = super().sample(t)
            small = {p.pid: {g: replace(held, memory_bytes=read("memory_used_bytes", 0.5e9)) if g == 0 and p.pid != 100
                             else held for g, held in p.gpus.items()} for p in sample.processes}
            return replace(sample, processes=tuple(replace(p, gpus=small[p.pid]) for p in sample.processes))

    finding = get(after(Contexts(jobs=jobs, gpus=4), 60), "shared_gpu")
    assert finding.title == "3 processes of train.py also hold memory on GPU 0" and finding.severity == "low"
    assert finding.evidence["held_bytes"] == 1.5e9
    assert "shared_gpu" not in ids(after(Scene(jobs=jobs, gpus=4), 60))  # as much there as on their own


def test_a_job_that_only_holds_memory_does_not_take_turns() -> None:
    finding = get(two(Job(100, sm=0.9), Job(200, [1], "python -m ipykernel_launcher", "bob", sm=0.0)), "shared_gpu")
    assert "hardly computes" in finding.title and "user bob" in finding.brief and "turns" not in finding.why
