"""The records of the rules on traces, in the order in which they are asked (:mod:`gputop.advice.trace.advise`)."""

from __future__ import annotations

from gputop.advice.rule import OWN, Limit, Rule
from gputop.render.step_parts import PART_IDS

_COLLECTIVE = frozenset({"collective"})
_COPIES = frozenset({"h2d", "d2h", "d2d", "p2p", "copy"})
_COMPUTE = frozenset({"compute"})

TRACE_RULES: tuple[Rule, ...] = (
    Rule(
        id="input_bound", module="trace.input_wait", origin="trace", severity="by_share_capped",
        needs=("batch_waits", "idle_gpus_in_waits"), shared_limits=("cpu_contention.full", "cpu_contention.others"),
        parts=("input", "open"), gaps=("input",), events=frozenset({"input"}),
        limits=(
            Limit("input_bound.share", 0.05, "ratio",
                  "XProf: input 5% of the step is moderate (20% high); PyTorch's TensorBoard plugin: loader > 5%"),
            Limit("input_bound.steps", 2, "count", "TraceML: warns from 2 steps on (and is sure from 20)"),
            Limit("input_bound.empty", 0.9, "ratio",
                  f"{OWN}a buffer that is empty at nine of ten calls is never ahead: its pipeline sets the pace"),
            Limit("input_bound.second_stage", 0.8, "ratio",
                  f"{OWN}no stage is blamed if a second one takes nearly as long (in one real job 1.33 and 1.31 s, and "
                  "only one was slow)"),
        ),
    ),
    Rule(
        id="shuffle_refill", module="trace.shuffle_refill", origin="trace", severity="by_share_capped",
        parts=("input", "open", "between", "no_steps"), needs_training=True, silent_for=("pytorch",),
        limits=(
            Limit("shuffle_refill.share", 0.05, "ratio", "same as input_bound.share"),
            Limit("shuffle_refill.samples", 2, "count", f"{OWN}one sample alone names nothing"),
        ),
    ),
    Rule(
        id="launch_bound", module="trace.launch", origin="trace", severity="by_share_capped",
        needs=("gpu_activity", "launch_calls"), shared_limits=("copies_pageable.bytes",),
        parts=("launch", "collectives"), gaps=("dispatch",),
        limits=(
            Limit("launch_bound.share", 0.03, "ratio",
                  "XProf: kernel launch 3% of the step is moderate (15% high)"),
            Limit("launch_bound.deep_queue_s", 0.01, "s",
                  f"{OWN}a queue of tens of milliseconds, as of a V100 that is 98% busy, is called healthy"),
            Limit("launch_bound.short_kernel_s", 40e-6, "s",
                  "launch latency in TensorFlow is 20-40 µs: shorter kernels leave the GPU waiting"),
            Limit("launch_bound.recording_s", 0.4e-6, "s",
                  "measured with PyTorch 2.13: 0.3-0.6 µs of the host's time for each op that its profiler records "
                  "(0.5-1.1 µs with shapes), 0.3-0.5 µs for each Python function"),
            Limit("launch_bound.recorded_launch_s", 14e-6, "s",
                  "measured with PyTorch 2.11 on an H200: steps of five jobs took 14 to 23 µs longer for each launch "
                  "or copy while its profiler recorded them"),
            Limit("launch_bound.recording_share", 0.1, "ratio", f"{OWN}a smaller part, which changes no verdict, is "
                                                                "not named"),
        ),
    ),
    Rule(
        id="small_kernels", module="trace.launch", origin="trace", severity="by_share_capped",
        needs=("gpu_activity",), training_only=True,
        parts=("launch", "idle"),
        limits=(
            Limit("small_kernels.kernel_s", 20e-6, "s",
                  "TensorFlow takes 20-40 µs for a launch: shorter kernels, one by one, cannot keep the GPU busy"),
            Limit("small_kernels.count", 0.5, "ratio", f"{OWN}most kernels are short"),
            Limit("small_kernels.share", 0.03, "ratio", "same as launch_bound.share"),
            Limit("small_kernels.pace_s", 20e-6, "s",
                  "TensorFlow takes 20-40 µs for a launch: with faster launches the host is not the slow part"),
        ),
    ),
    Rule(
        id="replica_imbalance", also=("gpu0_oversubscribed",), module="trace.multi_gpu", origin="trace",
        severity="by_share", needs=("gpu_activity",),
        parts=("collectives", "idle", "compute"), events=_COMPUTE,
        limits=(
            Limit("replica_imbalance.ratio", 1.10, "ratio", "TraceML: straggler, warning at 10% (critical at 20%)"),
            Limit("replica_imbalance.share", 0.03, "ratio", "XProf: any other part of 3% of the step is moderate"),
            Limit("replica_imbalance.own_kernels", 0.5, "ratio",
                  f"{OWN}extra time counts as extra work if extra kernels account for half of it"),
            Limit("replica_imbalance.alike", 0.9, "ratio",
                  f"{OWN}no layer is blamed if nearly all take longer by the same factor"),
            Limit("replica_imbalance.same_work", 0.02, "ratio",
                  f"{OWN}kernels as many and as large as the others' are the same work"),
            Limit("replica_imbalance.took_part", 0.10, "ratio",
                  f"{OWN}GPUs with under a tenth of the heaviest one's work count as unused, not as light replicas"),
        ),
    ),
    Rule(
        id="serial_gpus", module="trace.multi_gpu", origin="trace", severity="by_share_capped",
        needs=("gpu_activity",), shared_limits=("replica_imbalance.took_part",),
        parts=("launch", "host", "idle"),
        limits=(
            Limit("serial_gpus.overlap", 0.4, "ratio",
                  f"{OWN}GPUs work by turns only if they overlap far less than independent ones would"),
            Limit("serial_gpus.share", 0.05, "ratio", "gputop's severities: 5% is medium"),
        ),
    ),
    Rule(
        id="staggered_launch", module="trace.multi_gpu", origin="trace", severity="by_share_capped",
        needs=("gpu_activity",), shared_limits=("replica_imbalance.took_part",),
        parts=("launch", "host", "idle", "collectives"),
        gaps=("dispatch",),
        limits=(
            Limit("staggered_launch.share", 0.03, "ratio", "same as launch_bound.share"),
            Limit("staggered_launch.turn", 0.5, "ratio",
                  f"{OWN}a thread that launches half of a GPU's step before it turns to the next one serves them "
                  "one by one"),
            Limit("staggered_launch.jump", 0.6, "ratio",
                  f"{OWN}one late GPU among several, most of the whole delay in one jump, is not called a "
                  "staggered launch"),
        ),
    ),
    Rule(
        id="communication_exposed", module="trace.collectives", origin="trace", severity="by_share_capped",
        needs=("gpu_activity",), shared_limits=("collectives.share",),
        parts=("collectives",), events=_COLLECTIVE,
    ),
    Rule(
        id="allreduce_count", module="trace.collectives", origin="trace", severity="by_share_capped",
        needs=("gpu_activity",), shared_limits=("collectives.share",), training_only=True, needs_training=True,
        parts=("collectives",), events=_COLLECTIVE,
        limits=(
            Limit("allreduce_count.many", 32, "count", f"{OWN}a job that fuses its gradients stays below"),
            Limit("allreduce_count.bucket_bytes", 25e6, "bytes",
                  "PyTorch's DistributedDataParallel: buckets of 25 MB (TensorFlow's NcclAllReduce: one pack for "
                  "all)"),
            Limit("allreduce_count.message_bytes", 4e6, "bytes",
                  f"{OWN}messages that use the links well (NCCL's bandwidth saturates at some MB) count as merged"),
            Limit("allreduce_count.latency_s", 250e-6, "s",
                  f"{OWN}an AllReduce this short, of unknown size, is mostly latency on any link (NCCL: 15-200 µs)"),
        ),
    ),
    Rule(
        id="allreduce_slow", module="trace.collectives", origin="trace", severity="by_share_capped",
        needs=("gpu_activity",), shared_limits=("collectives.share",), training_only=True, needs_training=True,
        parts=("collectives",), events=_COLLECTIVE,
        limits=(
            Limit("allreduce_slow.factor", 2.0, "ratio", f"{OWN}NCCL's own losses of tens of percent are not reported"),
            Limit("allreduce_slow.latency_s", 50e-6, "s",
                  f"{OWN}each AllReduce may take that long in addition to the time for its bytes (NCCL in a node: "
                  "15-50 µs)"),
        ),
    ),
    Rule(
        id="collective_waiting", module="trace.collectives", origin="trace", severity="by_share_capped",
        needs=("gpu_activity",), shared_limits=("collectives.share",),
        parts=("collectives", "idle", "host", "launch", "input", "compute"), events=_COLLECTIVE,
        limits=(
            Limit("collective_waiting.one", 2 / 3, "ratio",
                  f"{OWN}a single GPU is named only if it causes most of the wait"),
        ),
    ),
    Rule(
        id="copies_excessive", module="trace.copies", origin="trace", severity="by_share", needs=("busy_gpus",),
        parts=("h2d", "d2h", "compute"), events=_COPIES,
        limits=(
            Limit("copies_excessive.share", 0.05, "ratio",
                  "XProf: input (which holds H2D) and output 5% of the step are moderate (20% high)"),
            Limit("copies_excessive.pageable", 0.5, "ratio",
                  f"{OWN}pinning is advised only if most of the copy time is known to be pageable"),
        ),
    ),
    Rule(
        id="copies_pageable", module="trace.blocking_copies", origin="trace", severity="by_share_capped",
        needs=("busy_gpus",),
        parts=("h2d", "d2h", "host", "launch", "idle"), events=_COPIES,
        limits=(
            Limit("copies_pageable.share", 0.03, "ratio",
                  "same as small_kernels.share; nsys rule: pageable async copies"),
            Limit("copies_pageable.part", 0.5, "ratio", "same as copies_excessive.pageable"),
            Limit("copies_pageable.bytes", 65536, "bytes",
                  "CUDA C++ Programming Guide: copies to the device of 64 KB or less are asynchronous with any "
                  "memory"),
        ),
    ),
    Rule(
        id="sync_copies", module="trace.blocking_copies", origin="trace", severity="by_share_capped",
        needs=("gpu_activity",), shared_limits=("copies_pageable.bytes",),
        parts=("host", "launch", "idle"), events=_COPIES,
        limits=(
            Limit("sync_copies.share", 0.02, "ratio", "nsys-ai: synchronization 2% of the time and more"),
            Limit("sync_copies.one_by_one", 16, "count",
                  f"{OWN}a loss, metrics and the norms of gradients are fewer than the samples of a batch"),
        ),
    ),
    Rule(
        id="tensor_cores_unused", also=("sixteen_bit_unused",), module="trace.precision", origin="trace",
        severity="by_share_capped", needs=("gpu_activity",), training_only=True,
        shared_limits=("precision.share", "precision.sixteen_bit", "precision.speedup", "precision.tf32_speedup"),
        parts=("compute",), events=_COMPUTE,
    ),
    Rule(
        id="fp16_fallback", module="trace.precision", origin="trace", severity="by_share_capped",
        needs=("gpu_activity",), training_only=True,
        shared_limits=("precision.share", "precision.speedup", "precision.sixteen_bit"),
        parts=("compute",), events=_COMPUTE,
    ),
    Rule(
        id="dims_unaligned", module="trace.precision", origin="trace", severity="by_share_capped",
        needs=("gpu_activity",), shared_limits=("precision.share",), training_only=True,
        parts=("compute",), events=_COMPUTE,
        limits=(
            Limit("dims_unaligned.speedup", 2.0, "ratio",
                  "NVIDIA, Matrix Multiplication Background: dimensions of multiples of 16 bytes run fastest, up "
                  f"to several times; {OWN}the estimate is on the safe side"),
            Limit("dims_unaligned.bytes", 4, "bytes",
                  f"NVIDIA: tensor cores want operands aligned to 16 bytes; {OWN}8 bytes, which cost little, are not "
                  "reported"),
        ),
    ),
    Rule(
        id="small_grids", module="trace.batch_size", origin="trace", needs=("gpu_activity",),
        parts=("compute",), events=_COMPUTE,
        limits=(
            Limit("small_grids.share", 0.15, "ratio",
                  f"{OWN}ordinary training, with small kernels among its large ones, is not reported (2% of the step "
                  "in a healthy job on a V100)"),
            Limit("small_grids.medium", 0.3, "ratio", f"{OWN}a third of the GPU is worth a test, whose result is "
                                                      "unknown"),
            Limit("small_grids.high", 0.5, "ratio", f"{OWN}most of the GPU is empty while it counts as busy"),
            Limit("small_grids.known", 0.8, "ratio", f"{OWN}the grids of most of the kernels' time are known; the "
                                                     "others count as full"),
        ),
    ),
    Rule(
        id="loss_scaling", module="trace.loss_scaling", origin="trace", severity="by_share_capped",
        needs=("gpu_activity",), training_only=True, needs_training=True, shared_limits=("copies_pageable.bytes",),
        parts=("host", "launch", "idle", "compute"),
        limits=(
            Limit("loss_scaling.share", 0.02, "ratio", f"{OWN}static scaling, which takes about 0.1%, is not "
                                                       "reported"),
        ),
    ),
    Rule(
        id="batch_size_headroom", module="trace.batch_size", origin="trace", needs=("gpu_activity",),
        shared_limits=("input_bound.share",), training_only=True, needs_training=True,
        parts=("compute",),
        limits=(
            Limit("batch_size_headroom.memory", 0.9, "ratio",
                  "PyTorch's TensorBoard plugin: memory above 90% is a risk; TraceML warns at 92%"),
            Limit("batch_size_headroom.factor", 2.0, "ratio",
                  f"{OWN}the batch can at least double even if all memory in use grew with it"),
            Limit("batch_size_headroom.factor_max", 8.0, "ratio",
                  f"{OWN}one change of the batch does not change the training too much"),
            Limit("batch_size_headroom.share", 0.05, "ratio",
                  f"gputop's severities: 5% is medium; {OWN}a smaller saving, not worth a change of the training, "
                  "is not reported"),
        ),
    ),
    Rule(
        id="memory_pressure", module="trace.memory", origin="trace", needs=("allocators",), training_only=True,
        limits=(
            Limit("trace_memory.warn", 0.92, "ratio", "TraceML: memory, warning at 92%"),
            Limit("trace_memory.critical", 0.97, "ratio", "TraceML: memory, critical at 97%"),
            Limit("trace_memory.full", 0.99, "ratio", f"{OWN}no further tensor of ordinary size fits"),
            Limit("trace_memory.fragmented", 0.25, "ratio",
                  f"{OWN}a quarter of what is free is in pieces (TensorFlow's allocator reports 0 for one block)"),
        ),
    ),
    Rule(
        id="anomaly_mode", module="trace.torch_jobs", origin="trace",
        silent_for=("tensorflow", "jax"),
        parts=("host", "launch"), gaps=("dispatch",),
        limits=(
            Limit("anomaly_mode.checked", 0.5, "ratio",
                  f"{OWN}a loss function that looks for NaN itself is in few nodes of the backward pass"),
        ),
    ),
    Rule(
        id="double_precision", module="trace.torch_jobs", origin="trace", severity="by_share_capped",
        silent_for=("tensorflow", "jax"), parts=("host",),
        limits=(
            Limit("double_precision.saved", 0.5, "ratio",
                  "a register of a CPU holds twice as many numbers of 32 bits as of 64"),
            Limit("double_precision.products", 0.8, "ratio",
                  f"{OWN}a part of the model that is meant to have 64 bits, such as a loss, is not reported"),
            Limit("double_precision.share", 0.05, "ratio", "same as time_outside_steps.share"),
        ),
    ),
    Rule(
        id="onednn_off", module="trace.torch_jobs", origin="trace", severity="by_share_capped",
        silent_for=("tensorflow", "jax"), parts=("host",),
        limits=(
            Limit("onednn_off.batch", 16, "count",
                  "PyTorch's Convolution.cpp: smaller batches may run without oneDNN on one thread"),
            Limit("onednn_off.share", 0.1, "ratio", f"{OWN}a convolution that hardly counts is not reported"),
        ),
    ),
    Rule(
        id="accumulation_sync", module="trace.torch_jobs", origin="trace", severity="by_share_capped",
        silent_for=("tensorflow", "jax"), training_only=True, needs_training=True,
        parts=("collectives", "host"), events=_COLLECTIVE,
        limits=(
            Limit("accumulation_sync.updates", 2, "count", f"{OWN}the passes between two updates are counted twice"),
            Limit("accumulation_sync.reduced", 0.9, "ratio",
                  f"{OWN}models of which some passes have no backward pass, as a generator's, make none"),
            Limit("accumulation_sync.share", 0.05, "ratio", "gputop's severities: 5% is medium"),
        ),
    ),
    Rule(
        id="gradients_zeroed", module="trace.torch_jobs", origin="trace", severity="by_share_capped",
        silent_for=("tensorflow", "jax"), training_only=True, needs_training=True,
        parts=("compute", "host"),
        limits=(
            Limit("gradients_zeroed.share", 0.05, "ratio", "gputop's severities: 5% is medium"),
        ),
    ),
    Rule(
        id="ops_without_gradient", module="trace.torch_jobs", origin="trace", severity="by_share_capped",
        silent_for=("tensorflow", "jax"), training_only=True, needs_training=True,
        parts=("host",),
        limits=(
            Limit("ops_without_gradient.steps", 3, "count", f"{OWN}what one step does is not taken for all"),
            Limit("ops_without_gradient.share", 0.1, "ratio", f"{OWN}a metric of a few percent makes none"),
            Limit("ops_without_gradient.products", 0.3, "ratio",
                  f"{OWN}a second model that runs without training, as a teacher's, makes none"),
            Limit("ops_without_gradient.named", 0.1, "ratio", f"{OWN}only ops that count are named"),
        ),
    ),
    Rule(
        id="memory_growth", module="trace.memory", origin="trace", silent_for=("tensorflow", "jax"),
        costs_time=False,
        limits=(
            Limit("memory_growth.steps", 8, "count", f"{OWN}caches and optimizers fill in the first steps; eight "
                                                     "steps that all rise are not start-up"),
            Limit("memory_growth.rising", 0.9, "ratio", f"{OWN}a garbage collection now and then does not hide a leak"),
            Limit("memory_growth.halves", 0.6, "ratio", "same as in gputop's report of recordings: both halves rise at "
                                                        "about the rate of the whole"),
            Limit("memory_growth.bytes_per_hour", 1 << 28, "bytes",
                  "same as in gputop's report of recordings: 256 MiB"),
        ),
    ),
    Rule(
        id="step_gap_host", module="trace.host_work", origin="trace", severity="by_share_capped",
        needs=("step_calls",), shared_limits=("host.steps", "input_bound.share", "input_bound.empty",
                                              "cpu_contention.full", "cpu_contention.others"),
        parts=("host",), gaps=("gap",),
        limits=(
            Limit("step_gap_host.share", 0.05, "ratio",
                  f"XProf: any other part of 3% of the step is moderate (15% high); {OWN}the time of Keras' own loop "
                  "is not reported"),
            Limit("step_gap_host.named", 0.5, "ratio",
                  f"{OWN}a cause is called the main one only if it fills half of the gap"),
        ),
    ),
    Rule(
        id="long_steps", module="trace.long_steps", origin="trace", severity="by_share_capped",
        shared_limits=("cpu_contention.full", "cpu_contention.others"),
        parts=PART_IDS, gaps=("gap",),
        limits=(
            Limit("long_steps.share", 0.03, "ratio", "XProf: any other part of 3% of the step is moderate"),
            Limit("long_steps.named", 0.4, "ratio", f"{OWN}work is named only if it fills most of the extra time"),
        ),
    ),
    Rule(
        id="time_outside_steps", module="trace.wall_time", origin="trace", severity="by_share_capped",
        shared_limits=("host.steps", "cpu_contention.full", "cpu_contention.others", "step_gap_host.named"),
        parts=("between", "open", "no_steps"),
        limits=(
            Limit("time_outside_steps.share", 0.05, "ratio", f"gputop's severities: 5% is medium; {OWN}smaller "
                                                             "pauses of any loop are not reported"),
            Limit("time_outside_steps.once", 0.2, "s", f"{OWN}a single shorter pause may be chance"),
        ),
    ),
    Rule(
        id="evaluation_share", module="trace.wall_time", origin="trace", parts=("evaluation", "prediction"),
        limits=(
            Limit("evaluation_share.share", 0.05, "ratio", "same as time_outside_steps.share"),
            Limit("evaluation_share.medium", 0.2, "ratio",
                  f"{OWN}an evaluation that is wanted is a remark until it takes a fifth of the time"),
            Limit("evaluation_share.high", 0.5, "ratio", f"{OWN}an evaluation that takes longer than the training is "
                                                         "hardly wanted"),
        ),
    ),
    Rule(
        id="unfinished_step", module="trace.wall_time", origin="trace", parts=("open",),
        shared_limits=("time_outside_steps.share", "cpu_contention.full", "cpu_contention.others"),
        limits=(
            Limit("unfinished_step.steps", 3, "count", f"{OWN}the usual step is known"),
            Limit("unfinished_step.medium", 0.5, "ratio",
                  f"{OWN}one wait that is recorded may be an accident; for most of the recording, the job may have "
                  "stopped"),
        ),
    ),
    Rule(
        id="thread_contention", module="trace.cpus", origin="trace", severity="by_share_capped",
        needs=("launch_threads",), silent_for=("pytorch",),
        parts=("launch", "host", "collectives"), gaps=("dispatch",),
        limits=(
            Limit("thread_contention.share", 0.03, "ratio", "same as launch_bound.share"),
            Limit("thread_contention.busy", 0.5, "ratio",
                  f"{OWN}tf.data's threads fill the cores (most cores have two logical CPUs)"),
            Limit("thread_contention.stalled", 0.5, "ratio",
                  f"{OWN}single launches are far later than others, as those of a thread without a CPU; slow launching "
                  "delays all alike"),
            Limit("thread_contention.together", 0.5, "ratio",
                  f"{OWN}tf.data works during most of the late launches (it may produce in bursts)"),
        ),
    ),
    Rule(
        id="threads_unused", module="trace.cpus", origin="trace", severity="by_share_capped",
        silent_for=("tensorflow", "jax"),  # they start a thread for each CPU
        parts=("host",),
        limits=(
            Limit("threads_unused.share", 0.1, "ratio",
                  f"{OWN}ops that divide badly, and cores that others use now and then, are not reported"),
            Limit("threads_unused.main", 0.8, "ratio", f"{OWN}threads that compute ops have as much work as the main "
                                                       "thread; one that loads or records has little"),
            Limit("threads_unused.idle", 0.25, "CPUs", f"{OWN}a CPU that is busy for a quarter of the time is as good "
                                                       "as idle"),
        ),
    ),
    Rule(
        id="thread_oversubscription", module="trace.cpus", origin="trace", severity="by_share_capped",
        silent_for=("tensorflow", "jax"), shared_limits=("cpu_contention.full", "cpu_contention.others"),
        parts=("host",),
        limits=(
            Limit("thread_oversubscription.threads", 1.5, "ratio",
                  f"{OWN}a thread or two that wait for the main one are not reported"),
            Limit("thread_oversubscription.held_up", 0.05, "ratio", "same as time_outside_steps.share"),
        ),
    ),
    Rule(
        id="cpu_contention", module="trace.cpus", origin="trace", severity="by_share_capped",
        parts=("host", "launch", "input"),
        limits=(
            Limit("cpu_contention.share", 0.05, "ratio",
                  "XProf: input 5% of the step is moderate; with less, GPUs hardly wait for CPUs"),
            Limit("cpu_contention.full", 0.9, "ratio",
                  f"{OWN}no CPU is free for long, as when runs are compared"),
            Limit("cpu_contention.others", 0.15, "ratio",
                  f"{OWN}a monitor, a shell and the system's own work are not reported"),
            Limit("cpu_contention.named", 0.1, "ratio", f"{OWN}only a process that matters is named"),
        ),
    ),
    Rule(
        id="eager_execution", module="trace.compilation", origin="trace", severity="by_share_capped",
        needs=("eager_ops",), shared_limits=("launch_bound.recording_s",),
        parts=("host", "launch"), gaps=("eager", "dispatch"),
        limits=(
            Limit("eager_execution.share", 0.10, "ratio", "XProf: eager execution above 10%"),
            Limit("eager_execution.cost", 0.03, "ratio", "same as launch_bound.share"),
        ),
    ),
    Rule(
        id="retracing", module="trace.compilation", origin="trace", severity="by_share_capped",
        shared_limits=("host.steps",),
        parts=("host", "launch"), gaps=("tracing",),
        limits=(
            Limit("retracing.count", 2, "count",
                  f"{OWN}a function that is traced once for another shape, as the last batch of an epoch, is not "
                  "reported"),
            Limit("retracing.share", 0.03, "ratio", "XProf: any other part of 3% of the step is moderate"),
            Limit("retracing.age_s", 120.0, "s",
                  f"{OWN}for a younger job the finding says that this may be its start, as by idle_gpu.age_s"),
        ),
    ),
    Rule(
        id="xla_off", module="trace.compilation", origin="trace", needs=("gpu_activity", "xla_events"),
        silent_for=("jax", "pytorch"), training_only=True,
        parts=("compute",),
        limits=(
            Limit("xla_off.share", 0.02, "ratio",
                  f"{OWN}a saving as small as the spread of most steps is not estimated"),
            Limit("xla_off.chain", 3, "count",
                  f"{OWN}a bias and an activation in a row, which libraries and graph optimizers fuse, are not "
                  "counted"),
        ),
    ),
    Rule(
        id="attention_unfused", module="trace.fusion", origin="trace", severity="by_share_capped",
        needs=("gpu_activity",), parts=("compute",), events=_COMPUTE,
        limits=(
            Limit("attention_unfused.share", 0.03, "ratio", "XProf: any other part of 3% of the step is moderate"),
            Limit("attention_unfused.in_memory_s", 50e-6, "s",
                  f"{OWN}a softmax that takes longer moves more bytes than a cache holds (75 MB with an A100, 200 MB "
                  "with an H100), and so do the products"),
            Limit("attention_unfused.count", 2, "count",
                  f"{OWN}one softmax in a step, which may be that of the outputs, is not reported; FlashAttention (Dao "
                  "et al. 2022) on what unfused attention reads and writes"),
        ),
    ),
    Rule(
        id="layout_conversions", module="trace.fusion", origin="trace", severity="by_share_capped",
        needs=("gpu_activity",), silent_for=("jax",),  # XLA chooses layouts itself
        parts=("compute",), events=_COMPUTE,
        limits=(
            Limit("layout_conversions.share", 0.03, "ratio",
                  "XProf: any other part of 3% of the step is moderate; NVIDIA, Convolutional Layers guide: tensor "
                  "cores want NHWC, conversions cost time"),
        ),
    ),
    Rule(
        id="elementwise_unfused", module="trace.fusion", origin="trace", needs=("gpu_activity",),
        silent_for=("tensorflow", "jax"), training_only=True, shared_limits=("xla_off.chain",),
        parts=("compute",), events=_COMPUTE,
        limits=(
            Limit("elementwise_unfused.share", 0.05, "ratio",
                  f"{OWN}a saving that only a test can confirm is named only if it may be medium"),
        ),
    ),
    Rule(
        id="optimizer_unfused", module="trace.fusion", origin="trace", severity="by_share_capped",
        needs=("gpu_activity",), silent_for=("jax",), training_only=True, needs_training=True,
        parts=("compute", "launch"),
        limits=(
            Limit("optimizer_unfused.share", 0.03, "ratio", "same as launch_bound.share"),
            Limit("optimizer_unfused.count", 50, "count",
                  f"{OWN}fused optimizers, which take hundreds of variables at a time, stay below"),
            Limit("optimizer_unfused.kernel_s", 5e-6, "s",
                  f"{OWN}kernels that do little work count: one that does nothing takes 2 µs, one of 5 µs moves at "
                  "most a few megabytes"),
        ),
    ),
    Rule(
        id="embedding_dense", module="trace.embeddings", origin="trace", severity="by_share_capped",
        training_only=True, needs_training=True,
        parts=("compute", "host"), events=_COMPUTE,
        limits=(
            Limit("embedding_dense.share", 0.05, "ratio",
                  f"gputop's severities: 5% is medium; {OWN}a smaller saving, not worth a change of the optimizer, "
                  "is not reported"),
            Limit("embedding_dense.used", 0.25, "ratio",
                  f"{OWN}sorting and merging of indices does not use up the saving"),
        ),
    ),
    Rule(
        id="allocation_in_steps", module="trace.memory", origin="trace", severity="by_share_capped",
        needs=("gpu_activity",), shared_limits=("copies_pageable.bytes",),
        parts=("host", "launch"),
        limits=(
            Limit("allocation_in_steps.share", 0.03, "ratio",
                  "same as launch_bound.share; CUDA Programming Guide: cudaMalloc and cudaFree synchronize implicitly"),
            Limit("allocation_in_steps.recurring", 0.5, "ratio",
                  f"{OWN}caching allocators, which fill in the first steps, are not reported"),
            Limit("allocation_in_steps.steps", 3, "count", f"{OWN}there are steps after the first one"),
        ),
    ),
    Rule(
        id="graph_recapture", module="trace.launch", origin="trace", severity="by_share_capped",
        needs=("gpu_activity",),
        parts=("host", "launch"), gaps=("dispatch",),
        limits=(
            Limit("graph_recapture.share", 0.03, "ratio", "same as launch_bound.share"),
            Limit("graph_recapture.recurring", 0.5, "ratio",
                  f"{OWN}graphs that are recorded once, or for a new shape now and then, are not reported"),
            Limit("graph_recapture.steps", 3, "count", f"{OWN}there are steps after the first one"),
        ),
    ),
    Rule(
        id="managed_memory", module="trace.memory", origin="trace", severity="by_share_capped",
        needs=("busy_gpus",),
        parts=("compute", "h2d", "d2h"), events=_COPIES,
        limits=(
            Limit("managed_memory.share", 0.03, "ratio", "same as copies_pageable.share"),
            Limit("managed_memory.back", 0.25, "ratio",
                  f"{OWN}results that are read once at the end of a step are not called oversubscription"),
        ),
    ),
    Rule(
        id="default_stream", module="trace.copies", origin="trace", severity="by_share_capped",
        needs=("busy_gpus",), silent_for=("tensorflow", "jax"),  # they have streams of their own for copies
        parts=("h2d", "d2h"), events=_COPIES,
        limits=(
            Limit("default_stream.share", 0.03, "ratio",
                  "same as copies_pageable.share; CUDA C++ Best Practices Guide: overlap needs streams other than the "
                  "default one and pinned memory"),
        ),
    ),
    Rule(
        id="host_placement", module="trace.host_work", origin="trace", severity="by_share_capped",
        parts=("host", "launch"), gaps=("placement",),
        limits=(
            Limit("host_placement.share", 0.03, "ratio", "XProf: any other part of 3% of the step is moderate"),
        ),
    ),
)
