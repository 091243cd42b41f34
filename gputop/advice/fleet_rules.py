"""The records of the rules about the jobs of a cluster, in the order in which they are asked
(:mod:`gputop.advice.fleet.advise`)."""

from __future__ import annotations

from gputop.advice.rule import Limit, Rule

FLEET_RULES: tuple[Rule, ...] = (
    Rule(id="held_idle", module="fleet.idle", limits=(
        Limit("held_idle.activity", 0.01, "ratio", "gputop: considers only GPUs that are almost completely idle"),
        Limit("held_idle.window_s", 900.0, "s",
              "gputop: allows startup, compilation, and loading of data and checkpoints to finish"),
        Limit("held_idle.high_gpu_hours", 8.0, "GPU hours", "gputop: one hour on a node with eight GPUs"),
    )),
    Rule(id="partly_used_job", module="fleet.idle", yields_to=("held_idle",),
         shared_limits=("held_idle.activity", "held_idle.window_s"), limits=(
        Limit("partly_used_job.high", 0.25, "ratio",
              "gputop: high severity requires that many GPUs could serve other jobs"),
    )),
    Rule(id="slow_node", module="fleet.stragglers", yields_to=("held_idle",),
         shared_limits=("straggler_gpu.below", "straggler_gpu.high", "straggler_gpu.age_s"), limits=(
             Limit("slow_node.nodes", 3, "count", "gputop: does not compare two nodes: either may be the slow one"),)),
    Rule(id="straggler_gpu", module="fleet.stragglers", yields_to=("held_idle", "slow_node"),
         shared_limits=("held_idle.activity",), limits=(
        Limit("straggler_gpu.peers", 3, "count", "gputop: the median must represent most of the GPUs"),
        Limit("straggler_gpu.age_s", 600.0, "s",
              "gputop: waits until all ranks have started and a five-minute mean includes only this job"),
        Limit("straggler_gpu.below", 0.15, "ratio", "gputop: ignores the usual variation between GPUs of one job"),
        Limit("straggler_gpu.leave", 0.10, "ratio",
              "gputop: keeps the finding if the GPU briefly comes close to the other GPUs"),
        Limit("straggler_gpu.mads", 3.0, "ratio",
              "Leys et al., Detecting outliers (2013): three scaled median absolute deviations"),
        Limit("straggler_gpu.high", 0.30, "ratio",
              "gputop: high severity requires that the job is clearly waiting for this GPU"),
        Limit("straggler_gpu.clock", 0.90, "ratio", "same as power_capped.clock_enter"),
        Limit("straggler_gpu.hot_c", 83.0, "°C",
              "gputop: data-center GPUs stay below this value unless their cooling fails"),
        Limit("straggler_gpu.power", 0.95, "ratio", "gputop: treats power this close to the limit as at the limit"),
    )),
    Rule(id="low_clock_gpu", module="fleet.stragglers", yields_to=("held_idle", "slow_node", "straggler_gpu"),
         shared_limits=("straggler_gpu.peers", "straggler_gpu.age_s", "straggler_gpu.below", "straggler_gpu.mads",
                        "straggler_gpu.hot_c", "straggler_gpu.power"), limits=(
        Limit("low_clock_gpu.busy", 0.20, "ratio", "gputop: ignores low clocks on a GPU that has little work"),
        Limit("low_clock_gpu.clock", 0.85, "ratio",
              "gputop: ignores the usual variation between identical boards with the same work and power limit"),
        Limit("low_clock_gpu.leave", 0.90, "ratio",
              "gputop: keeps the finding if the GPU briefly comes close to the other GPUs"),
        Limit("low_clock_gpu.high", 0.70, "ratio",
              "gputop: high severity requires that compute-bound steps take at least 40% longer"),
        Limit("low_clock_gpu.spread", 0.05, "ratio",
              "gputop: does not blame a GPU if the median absolute deviation is higher, because the GPUs then have "
              "unequal work or different settings"),
        Limit("low_clock_gpu.share", 0.25, "ratio",
              "gputop: does not treat a larger share of the job's GPUs as outliers, because their settings or loads "
              "differ"),
    )),
    Rule(id="activity_drop", module="fleet.idle", yields_to=("held_idle",), limits=(
        Limit("activity_drop.before_s", 1800.0, "s", "gputop: excludes warm-up before the drop"),
        Limit("activity_drop.after_s", 900.0, "s", "gputop: allows a validation or a checkpoint to finish"),
        Limit("activity_drop.before", 0.20, "ratio", "gputop: excludes GPUs that were almost idle before the drop"),
        Limit("activity_drop.ratio", 0.60, "ratio",
              "gputop: ignores smaller drops, for example those caused by another dataset"),
        Limit("activity_drop.steady", 0.75, "ratio", "gputop: does not treat work that comes and goes as a drop"),
    )),
)
