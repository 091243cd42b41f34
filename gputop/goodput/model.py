"""The report over recordings as a document: base units, Unix times; null where a figure is not known."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

TRAINING, WAITING, CHECKPOINT = "training", "waiting", "checkpoint"
STARTING, RESTART, IDLE, UNKNOWN = "starting", "restart", "idle", "unknown"
STATES = (TRAINING, WAITING, CHECKPOINT, STARTING, RESTART, IDLE, UNKNOWN)
LOST = (WAITING, CHECKPOINT, STARTING, RESTART)  # a job had the GPU, or was about to have it again, and trained not


class Spent(Struct, kw_only=True):
    """GPU time by state (seconds, summed over GPUs), and the energy of the GPUs' boards meanwhile.

    ``goodput_ratio``: training of all time whose state is known; None where there is none. ``energy_unknown_s``: GPU
    time without a reading of power, which adds nothing to ``energy_j``; None: no power at all was read.
    ``training_activity_ratio``: the mean activity in the training time, SM active, or with
    ``training_activity_coarse`` at times the coarse utilization; None without training.
    """

    states_s: dict[str, float]
    goodput_ratio: float | None
    energy_j: float | None
    energy_unknown_s: float
    training_activity_ratio: float | None = None
    training_activity_coarse: bool = False


class GpuReport(Spent, kw_only=True):
    gpu: str
    uuid: str
    name: str


class JobReport(Spent, kw_only=True):
    """All processes of a user with the same command up to its first option. ``restarts``: the most on any one GPU."""

    job: str
    user: str | None
    gpus: list[str]
    begin_s: float
    end_s: float
    restarts: int


class Hour(Struct, kw_only=True):
    """GPU time by state in the hour that begins at ``begin_s``."""

    begin_s: float
    states_s: dict[str, float]


class HourFinding(Struct, kw_only=True):
    """A live finding, and the share of the evaluated moments in which it held."""

    id: str
    title: str
    gpus: list[int]
    held_ratio: float


class WorstHour(Hour, kw_only=True):
    """``findings`` are those of the live rules; ``not_judged`` says why they were not asked."""

    lost_s: float
    findings: list[HourFinding]
    not_judged: str | None = None


class Creep(Struct, kw_only=True):
    """Host memory that grows beyond doubt: of a process, of a control group, or of the node.

    ``full_in_s`` is the time from the last sample to the limit at that rate, ``full_in_low_s`` and ``full_in_high_s``
    by the faster and the slower half of the trend; None where the process has ended or no limit is known.
    """

    what: Literal["process", "cgroup", "node"]
    name: str
    pid: int | None
    begin_s: float
    end_s: float
    first_bytes: float
    last_bytes: float
    bytes_per_s: float
    limit: Literal["cgroup", "node"] | None
    limit_bytes: float | None
    full_in_s: float | None
    full_in_low_s: float | None
    full_in_high_s: float | None


class OwnRuleReport(Struct, kw_only=True):
    """A live rule of the user's own: for how long it held, of the time in which it was evaluated, and how often.
    ``missing``: why it was never evaluated."""

    id: str
    title: str
    severity: str
    gpus: list[int]
    judged_s: float
    held_s: float
    times: int
    longest_s: float
    last_s: float | None
    missing: str | None


class RecordingPart(Struct, kw_only=True):
    path: str
    samples: int
    begin_s: float
    end_s: float
    notes: list[str]


class Report(Struct, kw_only=True):
    """gputop report --json. ``interval_s``: the median time between the samples; ``read_every``: of how many one was
    evaluated."""

    schema: Literal["gputop.report/1"] = "gputop.report/1"
    gputop: str
    host: str
    simulated: bool
    recordings: list[RecordingPart]
    begin_s: float
    end_s: float
    recorded_s: float
    not_recorded_s: float
    interval_s: float
    read_every: int
    total: Spent
    price_per_kwh: float | None
    cost: float | None
    gpus: list[GpuReport]
    jobs: list[JobReport]
    hours: list[Hour]
    worst_hours: list[WorstHour]
    creep: list[Creep]
    own_rules: list[OwnRuleReport]
    notes: list[str]
