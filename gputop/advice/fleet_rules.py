"""The records of the rules about the jobs of a cluster, in the order in which they are asked
(:mod:`gputop.advice.fleet.advise`)."""

from __future__ import annotations

from gputop.advice.rule import OWN, Limit, Rule

FLEET_RULES: tuple[Rule, ...] = (
    Rule(
        id="held_idle", module="fleet.idle", origin="fleet",
        limits=(
            Limit("held_idle.activity", 0.01, "ratio", f"{OWN}only a GPU that did almost nothing counts"),
            Limit("held_idle.window_s", 900.0, "s",
                  f"{OWN}startup, compilation, and the loading of data and checkpoints have finished by then"),
            Limit("held_idle.high_gpu_hours", 8.0, "GPU hours",
                  "gputop's choice: as many GPU hours as a node with eight GPUs provides in one hour"),
        ),
    ),
    Rule(
        id="partly_used_job", module="fleet.idle", origin="fleet", yields_to=("held_idle",),
        shared_limits=("held_idle.activity", "held_idle.window_s"),
        limits=(
            Limit("partly_used_job.high", 0.25, "ratio",
                  f"{OWN}severity is high only if many GPUs could serve other jobs"),
        ),
    ),
    Rule(
        id="slow_node", module="fleet.stragglers", origin="fleet", yields_to=("held_idle",),
        shared_limits=("straggler_gpu.below", "straggler_gpu.high", "straggler_gpu.age_s"),
        limits=(
            Limit("slow_node.nodes", 3, "count", f"{OWN}two nodes, of which either may be slow, are not compared"),
        ),
    ),
    Rule(
        id="straggler_gpu", module="fleet.stragglers", origin="fleet", yields_to=("held_idle", "slow_node"),
        shared_limits=("held_idle.activity",),
        limits=(
            Limit("straggler_gpu.peers", 3, "count", f"{OWN}the median represents a majority of the GPUs"),
            Limit("straggler_gpu.age_s", 600.0, "s",
                  f"{OWN}the uneven start of the ranks is past, and a five-minute mean includes only this job"),
            Limit("straggler_gpu.below", 0.15, "ratio",
                  f"{OWN}the usual variation between GPUs of one job is not reported"),
            Limit("straggler_gpu.leave", 0.10, "ratio",
                  f"{OWN}the finding remains if the GPU is close to the other GPUs for a short time"),
            Limit("straggler_gpu.mads", 3.0, "ratio",
                  "Leys and others, Detecting outliers (2013): three scaled median absolute deviations"),
            Limit("straggler_gpu.high", 0.30, "ratio",
                  f"{OWN}severity is high only if the job clearly waits for this GPU"),
            Limit("straggler_gpu.clock", 0.90, "ratio", "same as power_capped.clock_enter"),
            Limit("straggler_gpu.hot_c", 83.0, "°C",
                  f"{OWN}data-center GPUs stay below this value unless their cooling fails"),
            Limit("straggler_gpu.power", 0.95, "ratio", f"{OWN}only power at the limit, apart from noise, counts"),
        ),
    ),
    Rule(
        id="low_clock_gpu", module="fleet.stragglers", origin="fleet",
        yields_to=("held_idle", "slow_node", "straggler_gpu"),
        shared_limits=("straggler_gpu.peers", "straggler_gpu.age_s", "straggler_gpu.below", "straggler_gpu.mads",
                       "straggler_gpu.hot_c", "straggler_gpu.power"),
        limits=(
            Limit("low_clock_gpu.busy", 0.20, "ratio", f"{OWN}low clocks of a GPU with little work are not reported"),
            Limit("low_clock_gpu.clock", 0.85, "ratio",
                  f"{OWN}the usual variation between equal boards with the same work and power limit is not reported"),
            Limit("low_clock_gpu.leave", 0.90, "ratio",
                  f"{OWN}the finding remains if the GPU is close to the other GPUs for a short time"),
            Limit("low_clock_gpu.high", 0.70, "ratio",
                  f"{OWN}severity is high only if compute-bound steps take at least two fifths longer"),
            Limit("low_clock_gpu.spread", 0.05, "ratio",
                  f"{OWN}no GPU is blamed if the median absolute deviation is higher, because the GPUs then have "
                  "unequal work or different settings"),
            Limit("low_clock_gpu.share", 0.25, "ratio",
                  f"{OWN}a larger share of the job's GPUs does not count as outliers, because these GPUs have "
                  "different settings or loads"),
        ),
    ),
    Rule(
        id="activity_drop", module="fleet.idle", origin="fleet", yields_to=("held_idle",),
        limits=(
            Limit("activity_drop.before_s", 1800.0, "s", f"{OWN}the level before the drop is not that of a warm-up"),
            Limit("activity_drop.after_s", 900.0, "s", f"{OWN}a validation or a checkpoint has finished by then"),
            Limit("activity_drop.before", 0.20, "ratio", f"{OWN}GPUs that did almost nothing before are not compared"),
            Limit("activity_drop.ratio", 0.60, "ratio",
                  f"{OWN}a smaller drop, for example because of another data set, is not reported"),
            Limit("activity_drop.steady", 0.75, "ratio", f"{OWN}work that comes and goes does not count as a drop"),
        ),
    ),
)
