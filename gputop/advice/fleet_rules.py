"""The records of the rules about the jobs of a cluster, in the order in which they are asked
(:mod:`gputop.advice.fleet.advise`)."""

from __future__ import annotations

from gputop.advice.rule import OWN, Limit, Rule

FLEET_RULES: tuple[Rule, ...] = (
    Rule(
        id="held_idle", module="fleet.idle", origin="fleet",
        limits=(
            Limit("held_idle.activity", 0.01, "ratio", f"{OWN}only a GPU that did practically nothing counts"),
            Limit("held_idle.window_s", 900.0, "s",
                  f"{OWN}start-up, compiling and loading of data and checkpoints are over by then"),
            Limit("held_idle.high_gpu_hours", 8.0, "GPU hours", f"{OWN}it is as much as a node of eight GPUs in an "
                                                                "hour"),
        ),
    ),
    Rule(
        id="partly_used_job", module="fleet.idle", origin="fleet", yields_to=("held_idle",),
        shared_limits=("held_idle.activity", "held_idle.window_s"),
        limits=(
            Limit("partly_used_job.high", 0.25, "ratio", f"{OWN}a quarter of what the job holds could serve others"),
        ),
    ),
    Rule(
        id="slow_node", module="fleet.stragglers", origin="fleet", yields_to=("held_idle",),
        shared_limits=("straggler_gpu.below", "straggler_gpu.high", "straggler_gpu.age_s"),
        limits=(
            Limit("slow_node.nodes", 3, "count", f"{OWN}two nodes are not compared: which one is slow is unknown"),
        ),
    ),
    Rule(
        id="straggler_gpu", module="fleet.stragglers", origin="fleet", yields_to=("held_idle", "slow_node"),
        shared_limits=("held_idle.activity",),
        limits=(
            Limit("straggler_gpu.peers", 3, "count", f"{OWN}the median represents a majority of the GPUs"),
            Limit("straggler_gpu.age_s", 600.0, "s",
                  f"{OWN}the uneven start of ranks is over, and a mean of five minutes holds this job only"),
            Limit("straggler_gpu.below", 0.15, "ratio",
                  f"{OWN}GPUs of one job differ by less if nothing is wrong"),
            Limit("straggler_gpu.leave", 0.10, "ratio", f"{OWN}a short time nearer to the other GPUs does not end the "
                                                        "finding"),
            Limit("straggler_gpu.mads", 3.0, "ratio",
                  "Leys and others, Detecting outliers (2013): three scaled median absolute deviations, the strict "
                  "choice"),
            Limit("straggler_gpu.high", 0.30, "ratio", f"{OWN}the job clearly waits for it"),
            Limit("straggler_gpu.clock", 0.90, "ratio", "same as power_capped.clock_enter"),
            Limit("straggler_gpu.hot_c", 83.0, "°C",
                  f"{OWN}GPUs of data centers stay below it unless their cooling fails"),
            Limit("straggler_gpu.power", 0.95, "ratio", f"{OWN}the power is at the limit, apart from noise"),
        ),
    ),
    Rule(
        id="low_clock_gpu", module="fleet.stragglers", origin="fleet",
        yields_to=("held_idle", "slow_node", "straggler_gpu"),
        shared_limits=("straggler_gpu.peers", "straggler_gpu.age_s", "straggler_gpu.below", "straggler_gpu.mads",
                       "straggler_gpu.hot_c", "straggler_gpu.power"),
        limits=(
            Limit("low_clock_gpu.busy", 0.20, "ratio", f"{OWN}the clocks of a GPU with little to do say nothing"),
            Limit("low_clock_gpu.clock", 0.85, "ratio",
                  f"{OWN}boards of one model at the same work and the same power limit differ by less"),
            Limit("low_clock_gpu.leave", 0.90, "ratio", f"{OWN}a short time nearer to the other GPUs does not end the "
                                                        "finding"),
            Limit("low_clock_gpu.high", 0.70, "ratio",
                  f"{OWN}steps bound by computing take at least two fifths longer"),
            Limit("low_clock_gpu.spread", 0.05, "ratio",
                  f"{OWN}a median absolute deviation above it: the GPUs have unequal work or are set differently"),
            Limit("low_clock_gpu.share", 0.25, "ratio", f"{OWN}more GPUs of the job are not outliers: they are set, "
                                                        "or loaded, differently"),
        ),
    ),
    Rule(
        id="activity_drop", module="fleet.idle", origin="fleet", yields_to=("held_idle",),
        limits=(
            Limit("activity_drop.before_s", 1800.0, "s", f"{OWN}the level before is not that of a warm-up"),
            Limit("activity_drop.after_s", 900.0, "s", f"{OWN}a validation or a checkpoint is over by then"),
            Limit("activity_drop.before", 0.20, "ratio", f"{OWN}GPUs that did almost nothing before are not compared"),
            Limit("activity_drop.ratio", 0.60, "ratio", f"{OWN}a smaller drop, as another data set causes, is not "
                                                        "reported"),
            Limit("activity_drop.steady", 0.75, "ratio", f"{OWN}work that comes and goes is not called a drop"),
        ),
    ),
)
