"""The records of the rules on traces, in the order in which they are asked (:mod:`gputop.advice.trace.advise`)."""

from __future__ import annotations

from gputop.advice.rule import Limit, Rule
from gputop.render.step_parts import PART_IDS

_COLLECTIVE = frozenset({"collective"})
_COPIES = frozenset({"h2d", "d2h", "d2d", "p2p", "copy"})
_COMPUTE = frozenset({"compute"})

TRACE_RULES: tuple[Rule, ...] = (
    Rule(id="input_bound", module="trace.input_wait", severity="by_share_capped",
         needs=("batch_waits", "gpu_idle_time"), shared_limits=("cpu_contention.full", "cpu_contention.others"),
         parts=("input", "open"), gaps=("input",), events=frozenset({"input"}), limits=(
        Limit("input_bound.share", 0.05, "ratio",
              "XProf: rates input as moderate at 5% of the step (high at 20%); PyTorch's plugin: flags data loading "
              "above 5%"),
        Limit("input_bound.steps", 2, "count", "TraceML: warns after 2 steps, with full confidence after 20"),
        Limit("input_bound.empty", 0.9, "ratio",
              "gputop: blames the input pipeline if its buffer is empty in nine out of ten calls"),
        Limit("input_bound.second_stage", 0.8, "ratio",
              "gputop: does not blame a stage if another one takes nearly as long (in a real job, two stages took 1.33 "
              "s and 1.31 s, but only one was slow)"),
    )),
    Rule(id="shuffle_refill", module="trace.shuffle_refill", severity="by_share_capped",
         parts=("input", "open", "between", "no_steps", "steps"), needs_training=True, silent_for=("pytorch",), limits=(
        Limit("shuffle_refill.share", 0.05, "ratio", "same as input_bound.share"),
        Limit("shuffle_refill.samples", 2, "count", "gputop: ignores a single sample, which may be a coincidence"),
    )),
    Rule(id="launch_bound", module="trace.launch", severity="by_share_capped", needs=("gpu_activity", "launch_calls"),
         shared_limits=("copies_pageable.bytes",), parts=("launch", "collectives"), gaps=("dispatch",), limits=(
        Limit("launch_bound.share", 0.03, "ratio",
              "XProf: rates kernel launches as moderate at 3% of the step (high at 15%)"),
        Limit("launch_bound.deep_queue_s", 0.01, "s",
              "gputop: treats a queue of tens of milliseconds as healthy (example: a V100 that is 98% busy)"),
        Limit("launch_bound.short_kernel_s", 40e-6, "s",
              "launch latency in TensorFlow is 20-40 µs, so shorter kernels leave the GPU waiting"),
        Limit("launch_bound.recording_s", 0.4e-6, "s",
              "measured with PyTorch 2.13: the profiler adds 0.3-0.6 µs of host time per op (0.5-1.1 µs with shapes) "
              "and 0.3-0.5 µs per Python function"),
        Limit("launch_bound.recorded_launch_s", 14e-6, "s",
              "measured with PyTorch 2.11 on an H200: recording added 14 to 23 µs per launch or copy to the steps of "
              "five jobs"),
        Limit("launch_bound.recording_share", 0.1, "ratio",
              "gputop: does not mention a smaller share, because it does not change any verdict"),
    )),
    Rule(id="small_kernels", module="trace.launch", severity="by_share_capped", needs=("gpu_activity",),
         training_only=True, parts=("launch", "idle"), limits=(
        Limit("small_kernels.kernel_s", 20e-6, "s",
              "a launch takes 20-40 µs in TensorFlow, so a series of shorter kernels cannot keep the GPU busy"),
        Limit("small_kernels.count", 0.5, "ratio", "gputop: applies the rule only if most kernels are short"),
        Limit("small_kernels.share", 0.03, "ratio", "same as launch_bound.share"),
        Limit("small_kernels.pace_s", 20e-6, "s",
              "a launch takes 20-40 µs in TensorFlow; if launches are faster, the host is not the bottleneck"),
    )),
    Rule(id="replica_imbalance", also=("gpu0_oversubscribed",), module="trace.multi_gpu", severity="by_share",
         needs=("gpu_activity",), parts=("collectives", "idle", "compute"), events=_COMPUTE, limits=(
        Limit("replica_imbalance.ratio", 1.10, "ratio", "TraceML: warns about stragglers at 10% (critical at 20%)"),
        Limit("replica_imbalance.share", 0.03, "ratio", "XProf: rates most categories as moderate at 3% of the step"),
        Limit("replica_imbalance.own_kernels", 0.5, "ratio",
              "gputop: attributes the extra time to extra work if extra kernels account for half of it"),
        Limit("replica_imbalance.alike", 0.9, "ratio",
              "gputop: does not blame a layer if nearly all layers are slower by the same factor"),
        Limit("replica_imbalance.same_work", 0.02, "ratio",
              "gputop: treats GPUs that run the same number of kernels of the same size as doing the same work"),
        Limit("replica_imbalance.took_part", 0.10, "ratio",
              "gputop: treats GPUs with less than 10% of the busiest GPU's work as unused, not as replicas"),
    )),
    Rule(id="serial_gpus", module="trace.multi_gpu", severity="by_share_capped", needs=("gpu_activity",),
         shared_limits=("replica_imbalance.took_part",), parts=("launch", "host", "idle"), limits=(
        Limit("serial_gpus.overlap", 0.4, "ratio",
              "gputop: treats GPUs as serial only if they overlap far less than independent GPUs would"),
        Limit("serial_gpus.share", 0.05, "ratio", "gputop: medium severity starts at 5%"),
    )),
    Rule(id="staggered_launch", module="trace.multi_gpu", severity="by_share_capped", needs=("gpu_activity",),
         shared_limits=("replica_imbalance.took_part",), parts=("launch", "host", "idle", "collectives"),
         gaps=("dispatch",), limits=(
        Limit("staggered_launch.share", 0.03, "ratio", "same as launch_bound.share"),
        Limit("staggered_launch.turn", 0.5, "ratio",
              "gputop: a thread serves GPUs in turn if it launches half a step before it switches to another GPU"),
        Limit("staggered_launch.jump", 0.6, "ratio",
              "gputop: excludes cases in which a single late GPU causes most of the delay"),
    )),
    Rule(id="communication_exposed", module="trace.collectives", severity="by_share_capped", needs=("gpu_activity",),
         shared_limits=("collectives.share",), parts=("collectives",), events=_COLLECTIVE),
    Rule(id="allreduce_count", module="trace.collectives", severity="by_share_capped", needs=("gpu_activity",),
         shared_limits=("collectives.share",), training_only=True, needs_training=True, parts=("collectives",),
         events=_COLLECTIVE, limits=(
        Limit("allreduce_count.many", 32, "count", "gputop: jobs that fuse their gradients stay below this value"),
        Limit("allreduce_count.bucket_bytes", 25e6, "bytes",
              "PyTorch's DistributedDataParallel: uses 25 MB buckets (TensorFlow packs all gradients together)"),
        Limit("allreduce_count.message_bytes", 4e6, "bytes",
              "gputop: treats messages of this size as already merged (NCCL's bandwidth saturates at a few MB)"),
        Limit("allreduce_count.latency_s", 250e-6, "s",
              "gputop: treats short AllReduces of unknown size as latency-bound on any link (NCCL: 15-200 µs)"),
    )),
    Rule(id="allreduce_slow", module="trace.collectives", severity="by_share_capped", needs=("gpu_activity",),
         shared_limits=("collectives.share",), training_only=True, needs_training=True, parts=("collectives",),
         events=_COLLECTIVE, limits=(
        Limit("allreduce_slow.factor", 2.0, "ratio", "gputop: NCCL's overhead can be tens of percent"),
        Limit("allreduce_slow.latency_s", 50e-6, "s",
              "gputop: adds this latency to the transfer time of each AllReduce (NCCL within a node: 15-50 µs)"),
    )),
    Rule(id="collective_waiting", module="trace.collectives", severity="by_share_capped", needs=("gpu_activity",),
         shared_limits=("collectives.share",), parts=("collectives", "idle", "host", "launch", "input", "compute"),
         events=_COLLECTIVE, limits=(
        Limit("collective_waiting.one", 2 / 3, "ratio",
              "gputop: names a single GPU only if it causes most of the waiting"),
    )),
    Rule(id="copies_excessive", module="trace.copies", severity="by_share", needs=("busy_gpus",),
         parts=("h2d", "d2h", "compute"), events=_COPIES, limits=(
        Limit("copies_excessive.share", 0.05, "ratio",
              "XProf: rates input (including H2D) and output as moderate at 5% of the step (high at 20%)"),
        Limit("copies_excessive.pageable", 0.5, "ratio",
              "gputop: recommends pinning only if most of the copy time is known to involve pageable memory"),
    )),
    Rule(id="copies_pageable", module="trace.blocking_copies", severity="by_share_capped", needs=("busy_gpus",),
         parts=("h2d", "d2h", "host", "launch", "idle"), events=_COPIES, limits=(
        Limit("copies_pageable.share", 0.03, "ratio",
              "same as small_kernels.share; nsys has an expert rule for pageable async copies"),
        Limit("copies_pageable.part", 0.5, "ratio", "same as copies_excessive.pageable"),
        Limit("copies_pageable.bytes", 65536, "bytes",
              "CUDA C++ Programming Guide: copies of up to 64 KB to the device are always asynchronous"),
    )),
    Rule(id="sync_copies", module="trace.blocking_copies", severity="by_share_capped", needs=("gpu_activity",),
         shared_limits=("copies_pageable.bytes",), parts=("host", "launch", "idle"), events=_COPIES, limits=(
        Limit("sync_copies.share", 0.02, "ratio", "nsys-ai: reports synchronization above 2% of the time"),
        Limit("sync_copies.one_by_one", 16, "count",
              "gputop: does not report loops that only read a loss, metrics, or gradient norms"),
    )),
    Rule(id="tensor_cores_unused", also=("sixteen_bit_unused",), module="trace.precision", severity="by_share_capped",
         needs=("gpu_activity",), training_only=True,
         shared_limits=("precision.share", "precision.sixteen_bit", "precision.speedup", "precision.tf32_speedup"),
         parts=("compute",), events=_COMPUTE),
    Rule(id="fp16_fallback", module="trace.precision", severity="by_share_capped", needs=("gpu_activity",),
         training_only=True, shared_limits=("precision.share", "precision.speedup", "precision.sixteen_bit"),
         parts=("compute",), events=_COMPUTE),
    Rule(id="dims_unaligned", module="trace.precision", severity="by_share_capped", needs=("gpu_activity",),
         shared_limits=("precision.share",), training_only=True, parts=("compute",), events=_COMPUTE, limits=(
        Limit("dims_unaligned.speedup", 2.0, "ratio",
              "NVIDIA, Matrix Multiplication Background: kernels can be several times faster if dimensions are "
              "multiples of 16 bytes; gputop: uses a conservative estimate"),
        Limit("dims_unaligned.bytes", 4, "bytes",
              "NVIDIA: tensor cores need operands that are aligned to 16 bytes; gputop: ignores 8-byte alignment, "
              "which costs little"),
    )),
    Rule(id="small_grids", module="trace.batch_size", needs=("gpu_activity",), parts=("compute",), events=_COMPUTE,
         limits=(
        Limit("small_grids.share", 0.15, "ratio",
              "gputop: excludes typical training jobs with a few small kernels (2% of the step on a V100)"),
        Limit("small_grids.medium", 0.3, "ratio", "gputop: an unused third of the GPU is worth investigating"),
        Limit("small_grids.high", 0.5, "ratio",
              "gputop: high severity requires that most of the GPU is empty while it appears busy"),
        Limit("small_grids.known", 0.8, "ratio",
              "gputop: grid sizes must be known for most of the kernel time; other kernels count as full"),
    )),
    Rule(id="loss_scaling", module="trace.loss_scaling", severity="by_share_capped", needs=("gpu_activity",),
         training_only=True, needs_training=True, shared_limits=("copies_pageable.bytes",),
         parts=("host", "launch", "idle", "compute"), limits=(
             Limit("loss_scaling.share", 0.02, "ratio", "gputop: ignores static scaling (about 0.1% of the step)"),)),
    Rule(id="batch_size_headroom", module="trace.batch_size", needs=("gpu_activity",),
         shared_limits=("input_bound.share",), training_only=True, needs_training=True, parts=("compute",), limits=(
        Limit("batch_size_headroom.memory", 0.9, "ratio",
              "PyTorch's TensorBoard plugin: treats memory use above 90% as a risk; TraceML: warns at 92%"),
        Limit("batch_size_headroom.factor", 2.0, "ratio",
              "gputop: ensures that the batch size can at least double, even if all used memory grows with it"),
        Limit("batch_size_headroom.factor_max", 8.0, "ratio",
              "gputop: prevents a single change in the batch size from affecting training too much"),
        Limit("batch_size_headroom.share", 0.05, "ratio",
              "gputop: medium severity starts at 5%; smaller savings do not justify changing the training setup"),
    )),
    Rule(id="memory_pressure", module="trace.memory", needs=("allocators",), training_only=True, limits=(
        Limit("trace_memory.warn", 0.92, "ratio", "TraceML: issues a memory warning at 92%"),
        Limit("trace_memory.critical", 0.97, "ratio", "TraceML: rates memory use as critical at 97%"),
        Limit("trace_memory.full", 0.99, "ratio", "gputop: no further tensor of typical size fits"),
        Limit("trace_memory.fragmented", 0.25, "ratio",
              "gputop: at least a quarter of the free memory is fragmented (TensorFlow: 0 for a single block)"),
    )),
    Rule(id="anomaly_mode", module="trace.torch_jobs", silent_for=("tensorflow", "jax"), parts=("host", "launch"),
         gaps=("dispatch",), limits=(
        Limit("anomaly_mode.checked", 0.5, "ratio", "gputop: excludes loss functions that check for NaN themselves"),
    )),
    Rule(id="double_precision", module="trace.torch_jobs", severity="by_share_capped", silent_for=("tensorflow", "jax"),
         parts=("host",), limits=(
        Limit("double_precision.saved", 0.5, "ratio", "CPU registers hold twice as many 32-bit as 64-bit numbers"),
        Limit("double_precision.products", 0.8, "ratio",
              "gputop: excludes models that intentionally use 64-bit precision only in one part, such as a loss"),
        Limit("double_precision.share", 0.05, "ratio", "same as time_outside_steps.share"),
    )),
    Rule(id="onednn_off", module="trace.torch_jobs", severity="by_share_capped", silent_for=("tensorflow", "jax"),
         parts=("host",), limits=(
        Limit("onednn_off.batch", 16, "count",
              "PyTorch's Convolution.cpp: smaller batches may run without oneDNN on one thread"),
        Limit("onednn_off.share", 0.1, "ratio", "gputop: ignores convolutions that take little time"),
    )),
    Rule(id="accumulation_sync", module="trace.torch_jobs", severity="by_share_capped",
         silent_for=("tensorflow", "jax"), training_only=True, needs_training=True, parts=("collectives", "host"),
         events=_COLLECTIVE, limits=(
        Limit("accumulation_sync.updates", 2, "count",
              "gputop: requires the backward passes of at least two complete updates"),
        Limit("accumulation_sync.reduced", 0.9, "ratio",
              "gputop: excludes models with forward passes that have no backward pass, such as a GAN's generator"),
        Limit("accumulation_sync.share", 0.05, "ratio", "gputop: medium severity starts at 5%"),
    )),
    Rule(id="gradients_zeroed", module="trace.torch_jobs", severity="by_share_capped", silent_for=("tensorflow", "jax"),
         training_only=True, needs_training=True, parts=("compute", "host"), limits=(
             Limit("gradients_zeroed.share", 0.05, "ratio", "gputop: medium severity starts at 5%"),)),
    Rule(id="ops_without_gradient", module="trace.torch_jobs", severity="by_share_capped",
         silent_for=("tensorflow", "jax"), training_only=True, needs_training=True, parts=("host",), limits=(
        Limit("ops_without_gradient.steps", 3, "count", "gputop: does not consider a single step typical"),
        Limit("ops_without_gradient.share", 0.1, "ratio", "gputop: ignores metrics that take a few percent"),
        Limit("ops_without_gradient.products", 0.3, "ratio",
              "gputop: excludes a second model that runs without training, such as a teacher"),
        Limit("ops_without_gradient.named", 0.1, "ratio", "gputop: names only ops that take a lot of time"),
    )),
    Rule(id="memory_growth", module="trace.memory", silent_for=("tensorflow", "jax"), costs_time=False, limits=(
        Limit("memory_growth.steps", 8, "count",
              "gputop: ignores growth in the first steps, in which caches and optimizer states fill up"),
        Limit("memory_growth.rising", 0.9, "ratio", "gputop: finds leaks despite occasional garbage collection"),
        Limit("memory_growth.halves", 0.6, "ratio",
              "same as in gputop's reports on recordings: both halves grow at about the overall rate"),
        Limit("memory_growth.bytes_per_hour", 1 << 28, "bytes", "same as in gputop's reports on recordings"),
    )),
    Rule(id="step_gap_host", module="trace.host_work", severity="by_share_capped", needs=("step_calls",),
         shared_limits=("host.steps", "input_bound.share", "input_bound.empty", "cpu_contention.full",
                        "cpu_contention.others"), parts=("host",), gaps=("gap",), limits=(
        Limit("step_gap_host.share", 0.05, "ratio",
              "XProf: rates most categories as moderate at 3% of the step; gputop: excludes the time of Keras's own "
              "loop"),
        Limit("step_gap_host.rare", 0.02, "ratio",
              "gputop: ignores pauses that are long in so few steps, such as the start of an epoch"),
        Limit("step_gap_host.named", 0.5, "ratio", "gputop: the main cause must fill at least half of the gap"),
    )),
    Rule(id="long_steps", module="trace.long_steps", severity="by_share_capped",
         shared_limits=("cpu_contention.full", "cpu_contention.others"), parts=PART_IDS, gaps=("gap",), limits=(
             Limit("long_steps.share", 0.03, "ratio", "XProf: rates most categories as moderate at 3% of the step"),
             Limit("long_steps.named", 0.4, "ratio", "gputop: names only work that causes much of the extra time"))),
    Rule(id="time_outside_steps", module="trace.wall_time", severity="by_share_capped",
         shared_limits=("host.steps", "cpu_contention.full", "cpu_contention.others", "step_gap_host.named",
                        "unfinished_step.medium"), parts=("between", "open", "no_steps"), limits=(
        Limit("time_outside_steps.share", 0.05, "ratio",
              "gputop: medium severity starts at 5%; the small pauses of an ordinary loop take less"),
        Limit("time_outside_steps.once", 0.2, "s", "gputop: ignores a single shorter pause"),
    )),
    Rule(id="evaluation_share", module="trace.wall_time", parts=("evaluation", "prediction"), limits=(
        Limit("evaluation_share.share", 0.05, "ratio", "same as time_outside_steps.share"),
        Limit("evaluation_share.medium", 0.2, "ratio",
              "gputop: keeps severity low up to a fifth of the time, because evaluation may be intentional"),
        Limit("evaluation_share.high", 0.5, "ratio",
              "gputop: high severity requires more evaluation than training, which is rarely intentional"),
    )),
    Rule(id="unfinished_step", module="trace.wall_time", parts=("open",),
         shared_limits=("time_outside_steps.share", "cpu_contention.full", "cpu_contention.others"), limits=(
        Limit("unfinished_step.steps", 3, "count", "gputop: requires enough steps to know the typical step time"),
        Limit("unfinished_step.medium", 0.5, "ratio",
              "gputop: uses low severity for a single recorded wait unless it fills most of the recording, which may "
              "mean that the job has stopped"),
    )),
    Rule(id="thread_contention", module="trace.cpus", severity="by_share_capped", needs=("launch_threads",),
         parts=("launch", "host", "collectives"), gaps=("dispatch",), limits=(
        Limit("thread_contention.share", 0.03, "ratio", "same as launch_bound.share"),
        Limit("thread_contention.busy", 0.5, "ratio",
              "gputop: requires tf.data's threads to fill the physical cores (most cores have two logical CPUs)"),
        Limit("thread_contention.stalled", 0.5, "ratio",
              "gputop: counts only individual late launches, which indicate a thread without a CPU; a slow host delays "
              "all launches"),
        Limit("thread_contention.together", 0.5, "ratio",
              "gputop: requires tf.data activity during most of the late launches (its work may come in bursts)"),
    )),
    Rule(id="threads_unused", module="trace.cpus", severity="by_share_capped",
         silent_for=("tensorflow", "jax"),  # they start a thread for each CPU
         parts=("host",), limits=(
        Limit("threads_unused.share", 0.1, "ratio",
              "gputop: excludes ops that do not parallelize well and cores that other processes occasionally use"),
        Limit("threads_unused.main", 0.8, "ratio",
              "gputop: requires that only the main thread computes ops (other compute threads would be about as busy, "
              "while loader and recorder threads are less busy)"),
        Limit("threads_unused.idle", 0.25, "CPUs",
              "gputop: treats a CPU that is busy for only a quarter of the time as idle"),
    )),
    Rule(id="thread_oversubscription", module="trace.cpus", severity="by_share_capped",
         silent_for=("tensorflow", "jax"), shared_limits=("cpu_contention.full", "cpu_contention.others"),
         parts=("host",), limits=(
        Limit("thread_oversubscription.threads", 1.5, "ratio",
              "gputop: ignores one or two threads that wait for the main thread"),
        Limit("thread_oversubscription.held_up", 0.05, "ratio", "same as time_outside_steps.share"),
    )),
    Rule(id="cpu_contention", module="trace.cpus", severity="by_share_capped", parts=("host", "launch", "input"),
         limits=(
        Limit("cpu_contention.share", 0.05, "ratio",
              "XProf: rates input as moderate at 5% of the step; at a smaller share, GPUs rarely wait for CPUs"),
        Limit("cpu_contention.full", 0.9, "ratio",
              "gputop: treats the CPUs as full if at most 10% of their time is idle (same as in comparisons)"),
        Limit("cpu_contention.others", 0.15, "ratio",
              "gputop: ignores monitors, shells, and the operating system's own work"),
        Limit("cpu_contention.named", 0.1, "ratio", "gputop: names only processes that use a lot of CPU time"),
    )),
    Rule(id="eager_execution", module="trace.compilation", severity="by_share_capped", needs=("eager_ops",),
         shared_limits=("launch_bound.recording_s",), parts=("host", "launch"), gaps=("eager", "dispatch"), limits=(
             Limit("eager_execution.share", 0.10, "ratio", "XProf: flags eager execution above 10%"),
             Limit("eager_execution.cost", 0.03, "ratio", "same as launch_bound.share"))),
    Rule(id="retracing", module="trace.compilation", severity="by_share_capped", shared_limits=("host.steps",),
         parts=("host", "launch"), gaps=("tracing",), limits=(
        Limit("retracing.count", 2, "count",
              "gputop: ignores a function that is traced once for another shape, such as an epoch's last batch"),
        Limit("retracing.share", 0.03, "ratio", "XProf: rates most categories as moderate at 3% of the step"),
        Limit("retracing.age_s", 120.0, "s",
              "gputop: notes that a younger job may still be starting (same as idle_gpu.age_s)"),
    )),
    Rule(id="xla_off", module="trace.compilation", needs=("gpu_activity", "xla_events"), silent_for=("jax", "pytorch"),
         training_only=True, parts=("compute",), limits=(
        Limit("xla_off.share", 0.02, "ratio",
              "gputop: does not estimate savings that are smaller than the usual variation between steps"),
        Limit("xla_off.chain", 3, "count",
              "gputop: ignores a bias followed by an activation, which libraries and graph optimizers fuse"),
    )),
    Rule(id="attention_unfused", module="trace.fusion", severity="by_share_capped", needs=("gpu_activity",),
         parts=("compute",), events=_COMPUTE, limits=(
        Limit("attention_unfused.share", 0.03, "ratio", "XProf: rates most categories as moderate at 3% of the step"),
        Limit("attention_unfused.in_memory_s", 50e-6, "s",
              "gputop: a longer softmax moves more data than fits in a cache (75 MB on an A100, 200 MB on an H100), as "
              "do the matrix multiplications"),
        Limit("attention_unfused.count", 2, "count",
              "gputop: ignores a single softmax per step, which may belong to the output layer (FlashAttention paper: "
              "memory traffic of unfused attention)"),
    )),
    Rule(id="layout_conversions", module="trace.fusion", severity="by_share_capped", needs=("gpu_activity",),
         silent_for=("jax",),  # XLA chooses layouts itself
         parts=("compute",), events=_COMPUTE, limits=(
        Limit("layout_conversions.share", 0.03, "ratio",
              "XProf: rates most categories as moderate at 3% of the step; NVIDIA, Convolutional Layers guide: tensor "
              "cores prefer NHWC, and conversions take time"),
    )),
    Rule(id="elementwise_unfused", module="trace.fusion", needs=("gpu_activity",), silent_for=("tensorflow", "jax"),
         training_only=True, shared_limits=("xla_off.chain",), parts=("compute",), events=_COMPUTE, limits=(
        Limit("elementwise_unfused.share", 0.05, "ratio",
              "gputop: requires a saving large enough for medium severity, because only a test can confirm it"),
    )),
    Rule(id="optimizer_unfused", module="trace.fusion", severity="by_share_capped", silent_for=("jax",),
         shared_limits=("launch_bound.recording_s",), training_only=True, needs_training=True,
         parts=("compute", "launch", "host"), limits=(
        Limit("optimizer_unfused.share", 0.03, "ratio", "same as launch_bound.share"),
        Limit("optimizer_unfused.count", 50, "count",
              "gputop: fused optimizers, which update hundreds of variables per kernel, stay below this value"),
        Limit("optimizer_unfused.kernel_s", 5e-6, "s",
              "gputop: considers only kernels that do little work: an empty kernel takes 2 µs, and a 5 µs kernel moves "
              "at most a few megabytes"),
        Limit("optimizer_unfused.cpu_share", 0.1, "ratio",
              "gputop: on CPUs, ignores an optimizer that takes little of the step"),
    )),
    Rule(id="embedding_dense", module="trace.embeddings", severity="by_share_capped", training_only=True,
         needs_training=True, parts=("compute", "host"), events=_COMPUTE, limits=(
        Limit("embedding_dense.share", 0.05, "ratio",
              "gputop: medium severity starts at 5%; smaller savings do not justify changing the optimizer"),
        Limit("embedding_dense.used", 0.25, "ratio",
              "gputop: ensures that the cost of sorting and merging indices does not outweigh the savings"),
    )),
    Rule(id="allocation_in_steps", module="trace.memory", severity="by_share_capped", needs=("gpu_activity",),
         shared_limits=("copies_pageable.bytes",), parts=("host", "launch"), limits=(
        Limit("allocation_in_steps.share", 0.03, "ratio",
              "same as launch_bound.share; CUDA Programming Guide: cudaMalloc and cudaFree synchronize implicitly"),
        Limit("allocation_in_steps.recurring", 0.5, "ratio",
              "gputop: ignores a caching allocator that is still filling its cache in the first steps"),
        Limit("allocation_in_steps.steps", 3, "count", "gputop: the trace must include steps after the first one"),
    )),
    Rule(id="graph_recapture", module="trace.launch", severity="by_share_capped", needs=("gpu_activity",),
         parts=("host", "launch"), gaps=("dispatch",), limits=(
        Limit("graph_recapture.share", 0.03, "ratio", "same as launch_bound.share"),
        Limit("graph_recapture.recurring", 0.5, "ratio",
              "gputop: ignores graphs that are recorded only once, or occasionally for a new shape"),
        Limit("graph_recapture.steps", 3, "count", "gputop: the trace must include steps after the first one"),
    )),
    Rule(id="managed_memory", module="trace.memory", severity="by_share_capped", needs=("busy_gpus",),
         parts=("compute", "h2d", "d2h"), events=_COPIES, limits=(
        Limit("managed_memory.share", 0.03, "ratio", "same as copies_pageable.share"),
        Limit("managed_memory.back", 0.25, "ratio",
              "gputop: does not treat results that are read once at the end of a step as oversubscription"),
    )),
    Rule(id="default_stream", module="trace.copies", severity="by_share_capped", needs=("busy_gpus",),
         silent_for=("tensorflow", "jax"),  # they have streams of their own for copies
         parts=("h2d", "d2h"), events=_COPIES, limits=(
        Limit("default_stream.share", 0.03, "ratio",
              "same as copies_pageable.share; CUDA Best Practices: overlap requires non-default streams and pinned "
              "memory"),
    )),
    Rule(id="host_placement", module="trace.host_work", severity="by_share_capped", parts=("host", "launch"),
         gaps=("placement",), limits=(
        Limit("host_placement.share", 0.03, "ratio", "XProf: rates most categories as moderate at 3% of the step"),
    )),
)
