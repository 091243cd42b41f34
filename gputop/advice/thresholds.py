"""Every threshold of the rules, live and on traces: its value, its unit and where it comes from.

A live rule that shows a finding at ``…enter`` keeps it until the signal is past ``…leave``, so
that a value near the limit does not make the panel flicker.
"""

from __future__ import annotations

from dataclasses import dataclass

_OWN = "gputop: chosen so that "


@dataclass(frozen=True, slots=True)
class Threshold:
    id: str  # rule, dot, what it limits
    value: float
    unit: str
    source: str


_TRACE = (
    Threshold("few.steps", 3, "count", _OWN + "one odd step in a short capture does not make a finding high"),
    Threshold("few.kernels", 200, "count",
              _OWN + "without steps, a finding is high only over what a GPU does in some milliseconds at least"),

    Threshold("input_bound.share", 0.05, "ratio",
              "XProf: input 5 % of the step is moderate (20 % high); PyTorch's TensorBoard plugin: loader > 5 %"),
    Threshold("input_bound.steps", 2, "count", "TraceML: warns from 2 steps on (and is sure from 20)"),
    Threshold("launch_bound.share", 0.03, "ratio", "XProf: kernel launch 3 % of the step is moderate (15 % high)"),
    Threshold("launch_bound.deep_queue_s", 0.01, "s",
              _OWN + "a queue tens of milliseconds deep, as of a V100 that is 98 % busy, is called healthy"),
    Threshold("launch_bound.short_kernel_s", 40e-6, "s",
              "launch latency in TensorFlow is 20-40 µs: shorter kernels leave the GPU waiting"),
    Threshold("replica_imbalance.ratio", 1.10, "ratio", "TraceML: straggler, warning at 10 % (critical at 20 %)"),
    Threshold("replica_imbalance.share", 0.03, "ratio", "XProf: any other part of 3 % of the step is moderate"),
    Threshold("replica_imbalance.own_kernels", 0.5, "ratio",
              _OWN + "the extra time is work of its own where extra kernels account for half of it"),
    Threshold("replica_imbalance.took_part", 0.10, "ratio",
              _OWN + "GPUs with under a tenth of the heaviest one's work count as unused, not as light replicas"),
    Threshold("copies_excessive.share", 0.05, "ratio",
              "XProf: input (which holds H2D) and output 5 % of the step are moderate (20 % high)"),
    Threshold("copies_excessive.pageable", 0.5, "ratio",
              _OWN + "pinning is advised only where most of the copy time is known to be pageable"),
    Threshold("batch_size_headroom.compute", 0.5, "ratio",
              "PyTorch's TensorBoard plugin: larger batch where GPU utilization is below 50 %"),
    Threshold("batch_size_headroom.memory", 0.9, "ratio",
              "PyTorch's TensorBoard plugin: memory above 90 % is a risk; TraceML warns at 92 %"),
    Threshold("batch_size_headroom.factor", 2.0, "ratio",
              _OWN + "the batch can at least double even if all memory in use grew with it"),
    Threshold("batch_size_headroom.factor_max", 8.0, "ratio",
              _OWN + "one change does not alter the optimisation problem beyond recognition"),
    Threshold("batch_size_headroom.share", 0.03, "ratio", "as launch_bound.share"),
)

# Rules on the GPUs' side of a trace, beyond the first ones above.
_TRACE_DEVICE = (
    Threshold("small_kernels.kernel_s", 20e-6, "s",
              "launching takes TensorFlow 20-40 µs: shorter kernels cannot keep the GPU fed one by one"),
    Threshold("small_kernels.count", 0.5, "ratio", _OWN + "short kernels are the rule, not the exception"),
    Threshold("small_kernels.share", 0.03, "ratio", "as launch_bound.share"),
    Threshold("small_kernels.pace_s", 20e-6, "s",
              "launching takes TensorFlow 20-40 µs: where it takes less the host is not the slow part"),
    Threshold("precision.share", 0.03, "ratio", "XProf: any other part of 3 % of the step is moderate"),
    Threshold("precision.speedup", 3.0, "ratio",
              "NVIDIA, Mixed-Precision Training guide: up to 3x overall; the hardware's peaks are 8x apart"),
    Threshold("precision.sixteen_bit", 0.03, "ratio",
              _OWN + "a few stray 16-bit kernels do not count as mixed precision"),
    Threshold("dims_unaligned.speedup", 2.0, "ratio",
              "NVIDIA, Matrix Multiplication Background: dimensions of multiples of 16 bytes run fastest, up to "
              "several times; " + _OWN + "the promise is on the safe side"),
    Threshold("dims_unaligned.bytes", 4, "bytes",
              "NVIDIA: tensor cores want operands aligned to 16 bytes; " + _OWN + "8 bytes, which cost little, pass"),
    Threshold("loss_scaling.share", 0.02, "ratio", _OWN + "static scaling, a per mille or so, is not reported"),
    Threshold("copies_pageable.share", 0.03, "ratio", "as small_kernels.share; nsys rule: pageable async copies"),
    Threshold("copies_pageable.part", 0.5, "ratio", "as copies_excessive.pageable"),
    Threshold("copies_pageable.bytes", 65536, "bytes",
              "CUDA C++ Programming Guide: copies to the device of 64 KB or less are asynchronous with any memory"),
    Threshold("sync_copies.share", 0.02, "ratio", "nsys-ai: synchronisation 2 % of the time and more"),
    Threshold("collectives.share", 0.03, "ratio", "XProf: collectives 3 % of the step are moderate (15 % high)"),
    Threshold("collective_waiting.one", 2 / 3, "ratio",
              _OWN + "one GPU is named alone only where it causes most of the wait"),
    Threshold("allreduce_count.many", 32, "count", _OWN + "a job that fuses its gradients stays below"),
    Threshold("allreduce_count.bucket_bytes", 25e6, "bytes",
              "PyTorch's DistributedDataParallel: buckets of 25 MB (TensorFlow's NcclAllReduce: one pack for all)"),
    Threshold("allreduce_count.message_bytes", 4e6, "bytes",
              _OWN + "messages that use the links well (NCCL's bandwidth saturates at some MB) count as merged"),
    Threshold("allreduce_count.latency_s", 250e-6, "s",
              _OWN + "an AllReduce that short, sizes unknown, is latency for the most part on any link (NCCL: "
                     "15-200 µs)"),
    Threshold("allreduce_slow.factor", 2.0, "ratio", _OWN + "NCCL's own losses, tens of per cent, pass"),
    Threshold("allreduce_slow.latency_s", 50e-6, "s",
              _OWN + "each AllReduce may take that long beside its bytes (NCCL in a node: 15-50 µs)"),
    Threshold("serial_gpus.overlap", 0.4, "ratio",
              _OWN + "GPUs work by turns only if they overlap far less than independent ones would"),
    Threshold("serial_gpus.share", 0.05, "ratio", "contract of severities: 5 % is medium"),
    Threshold("staggered_launch.share", 0.03, "ratio", "as launch_bound.share"),
    Threshold("staggered_launch.turn", 0.5, "ratio",
              _OWN + "a thread that launches half of a GPU's step before it turns to the next one serves them one "
                     "by one"),
    Threshold("staggered_launch.jump", 0.6, "ratio",
              _OWN + "one late GPU among several, most of the whole delay in one jump, is not called a staggered "
                     "launch"),
    Threshold("trace_memory.warn", 0.92, "ratio", "TraceML: memory, warning at 92 %"),
    Threshold("trace_memory.critical", 0.97, "ratio", "TraceML: memory, critical at 97 %"),
    Threshold("trace_memory.full", 0.99, "ratio", _OWN + "no further tensor of ordinary size fits"),
    Threshold("trace_memory.fragmented", 0.25, "ratio",
              _OWN + "a quarter of what is free is in pieces (TensorFlow's allocator reports 0 for one block)"),
    Threshold("causes.rest", 0.4, "ratio",
              _OWN + "what follows from a cause is folded under it unless the cause explains less than three fifths "
                     "of it"),
    Threshold("causes.late_by_host", 0.5, "ratio",
              _OWN + "most of the lateness is time in which the late GPU had no launch, and the others had"),
)

# Rules on the host's side of a trace.
_TRACE_HOST = (
    Threshold("step_gap_host.share", 0.05, "ratio",
              "XProf: any other part of 3 % of the step is moderate (15 % high); " + _OWN + "Keras' own loop passes"),
    Threshold("host.steps", 2, "count", "as input_bound.steps"),
    Threshold("step_gap_host.told", 0.5, "ratio",
              _OWN + "a cause is named as the main one only if it fills half of the gap"),
    Threshold("retracing.count", 2, "count",
              _OWN + "a function that is traced once for another shape, as the last batch of an epoch, is not "
                     "reported"),
    Threshold("retracing.share", 0.03, "ratio", "XProf: any other part of 3 % of the step is moderate"),
    Threshold("eager_execution.share", 0.10, "ratio", "XProf: eager execution above 10 %"),
    Threshold("eager_execution.cost", 0.03, "ratio", "as launch_bound.share"),
    Threshold("thread_contention.share", 0.03, "ratio", "as launch_bound.share"),
    Threshold("thread_contention.busy", 0.5, "ratio",
              _OWN + "tf.data's threads fill the cores: logical CPUs are mostly two to a core"),
    Threshold("thread_contention.stalled", 0.5, "ratio",
              _OWN + "single launches are late by far, as of a thread without a CPU; slow launching is even"),
    Threshold("thread_contention.together", 0.5, "ratio",
              _OWN + "tf.data works during most of the late launches (it may produce in bursts)"),
    Threshold("host_placement.share", 0.03, "ratio", "XProf: any other part of 3 % of the step is moderate"),
    Threshold("xla_off.share", 0.02, "ratio", _OWN + "a saving as small as the spread of most steps is not promised"),
    Threshold("xla_off.chain", 3, "count",
              _OWN + "a bias and an activation in a row, which libraries and graph optimizers fuse, are not counted"),
)

_LIVE = (
    Threshold("window_s", 30.0, "s",
              _OWN + "dozens of ordinary steps (0.1-1 s) lie in it and one odd step does not decide"),
    Threshold("coverage", 0.8, "ratio", _OWN + "a rule judges only a window it has really seen"),
    Threshold("slice_s", 5.0, "s", _OWN + "a slice holds several steps; a rule can ask for most slices to agree"),
    Threshold("min_readings", 5.0, "count", _OWN + "a mean rests on more than a few ticks at slow intervals"),

    Threshold("idle_gpu.window_s", 60.0, "s",
              _OWN + "checkpoints and short validation passes, seconds long, are not called idle"),
    Threshold("idle_gpu.all_window_s", 120.0, "s",
              _OWN + "longer pauses of a whole job (validation on the host, loading a checkpoint) are not called "
                     "idle"),
    Threshold("idle_gpu.age_s", 120.0, "s",
              _OWN + "start-up, compiling and autotuning, which happen on one GPU first, are over"),
    Threshold("idle_gpu.enter", 0.01, "ratio", _OWN + "only a GPU that did practically nothing counts"),
    Threshold("idle_gpu.leave", 0.03, "ratio", _OWN + "a single stray kernel does not hide the finding"),
    Threshold("idle_gpu.peer_busy", 0.10, "ratio",
              _OWN + "the other GPUs clearly work, if slowly (XProf and HTA give no limit for this)"),

    Threshold("unused_gpu.window_s", 60.0, "s", _OWN + "the gap between two jobs of a queue is not reported"),
    Threshold("unused_gpu.enter", 0.01, "ratio", "as idle_gpu.enter"),
    Threshold("unused_gpu.leave", 0.03, "ratio", "as idle_gpu.leave"),
    Threshold("unused_gpu.peer_busy", 0.10, "ratio", "as idle_gpu.peer_busy"),

    Threshold("gpu0_oversubscribed.ratio_enter", 1.5, "ratio",
              _OWN + "it is far above the 20 % at which HTA and TraceML call a rank a straggler, since SM "
                     "activity is not work alone"),
    Threshold("gpu0_oversubscribed.ratio_leave", 1.2, "ratio", "TraceML: straggler, critical at 20 %"),
    Threshold("gpu0_oversubscribed.gap_enter", 0.15, "ratio",
              _OWN + "two nearly idle GPUs are not compared by ratio alone"),
    Threshold("gpu0_oversubscribed.gap_leave", 0.07, "ratio", _OWN + "it is about half of the gap to enter"),
    Threshold("gpu0_oversubscribed.peer_active", 0.02, "ratio",
              _OWN + "phases in which only one GPU works (validation, autotuning) are left out"),
    Threshold("gpu0_oversubscribed.slices_enter", 0.8, "ratio", _OWN + "it is the rule of the run, not a phase"),
    Threshold("gpu0_oversubscribed.slices_leave", 0.5, "ratio", _OWN + "a single even slice does not hide it"),

    Threshold("shared_gpu.together_s", 10.0, "s",
              _OWN + "a job that ends while the next one starts is not reported"),
    Threshold("shared_gpu.memory_ratio", 0.02, "ratio",
              _OWN + "a bare CUDA context (some 500 MB) on a data-centre card is not called a second job"),
    Threshold("shared_gpu.sm_high", 0.15, "ratio", "contract of severities: 15 % is high"),
    Threshold("shared_gpu.sm_medium", 0.05, "ratio", "contract of severities: 5 % is medium"),

    Threshold("power_capped.share_enter", 0.5, "ratio", _OWN + "capping is the usual state, not a peak"),
    Threshold("power_capped.share_leave", 0.25, "ratio", _OWN + "it is half of the share to enter"),
    Threshold("power_capped.power_enter", 0.98, "ratio",
              _OWN + "mean power that close to the limit means the limit decides"),
    Threshold("power_capped.power_leave", 0.95, "ratio", _OWN + "it lies just under the value to enter"),
    Threshold("power_capped.clock_enter", 0.90, "ratio",
              _OWN + "ordinary boost steps of a few per cent are not reported"),
    Threshold("power_capped.clock_leave", 0.95, "ratio", _OWN + "it lies half-way back to the full clock"),
    Threshold("power_capped.medium", 0.25, "ratio",
              _OWN + "clocks a quarter down are more than heavy matrix kernels cost on a full limit"),

    Threshold("memory_preallocated.enter", 0.90, "ratio",
              "TensorFlow maps nearly all device memory at start; 90 % as in the PyTorch plugin's memory limit"),
    Threshold("memory_preallocated.leave", 0.85, "ratio", _OWN + "it lies just under the value to enter"),
    Threshold("memory_preallocated.flat", 0.005, "ratio",
              _OWN + "what is reserved once does not move; memory that grows and shrinks is another matter"),

    Threshold("no_fine_metrics.window_s", 10.0, "s",
              "NVML: GPM has no value in its first two ticks; " + _OWN + "slow intervals have passed them too"),
    Threshold("hardware_error.silent_s", 10.0, "s",
              _OWN + "a driver that is slow while a job starts is not called dead"),
    Threshold("hardware_error.xid_window_s", 600.0, "s",
              _OWN + "somebody who looks a few minutes after the fault still sees it, and not all day"),
    Threshold("hardware_error.ecc", 1, "count", "NVIDIA, GPU memory error management: each uncorrectable error is data "
                                               "that was lost"),
)

# What the GPUs do, their link, their host. 2 minutes: pauses for checkpoints and validation are over by then.
_LIVE_WORK = (
    Threshold("low_sm_active.window_s", 120.0, "s", "as idle_gpu.all_window_s"),
    Threshold("low_sm_active.active_enter", 0.50, "ratio",
              "PyTorch's TensorBoard plugin: GPU utilization below 50 %; nsys expert rule gpu_time_util: 50 %"),
    Threshold("low_sm_active.active_leave", 0.60, "ratio", _OWN + "it lies a step above the value to enter"),
    Threshold("low_sm_active.slices_enter", 0.8, "ratio", _OWN + "it is the rule of the run, not a phase"),
    Threshold("low_sm_active.slices_leave", 0.5, "ratio", _OWN + "a slice or two of more work do not hide it"),
    Threshold("low_sm_active.pause", 0.02, "ratio",
              _OWN + "slices in which the GPU does nothing (a checkpoint) say nothing of how it works"),
    Threshold("low_sm_active.work_enter", 0.75, "ratio",
              _OWN + "most of the window is work: short validation beside a checkpoint is not judged"),
    Threshold("low_sm_active.work_leave", 0.5, "ratio", _OWN + "a pause does not hide it"),
    Threshold("low_sm_active.gaps", 0.9, "ratio",
              _OWN + "below that coarse utilization the time without any kernel is worth naming"),

    Threshold("spinning.window_s", 120.0, "s",
              _OWN + "GPUs that wait while one saves a checkpoint or validates are not called stuck"),
    Threshold("spinning.long_s", 300.0, "s", _OWN + "few checkpoints take that long, and NCCL's watchdog in PyTorch "
                                                    "waits for 600 s"),
    Threshold("spinning.util_enter", 0.98, "ratio", "NVML: utilization is the share of time in which any kernel ran"),
    Threshold("spinning.util_leave", 0.95, "ratio", _OWN + "a missed reading does not hide it"),
    Threshold("spinning.sm_enter", 0.35, "ratio",
              "NCCL: at most 32 channels, one SM each, a quarter of an H100; " + _OWN + "smaller GPUs count too"),
    Threshold("spinning.sm_leave", 0.45, "ratio", _OWN + "it lies a step above the value to enter"),
    Threshold("spinning.tensor_enter", 0.005, "ratio", _OWN + "it is no matrix work at all"),
    Threshold("spinning.tensor_leave", 0.015, "ratio", _OWN + "a stray kernel does not hide it"),
    Threshold("spinning.dram_enter", 0.02, "ratio", _OWN + "kernels that compute move more than that"),
    Threshold("spinning.dram_leave", 0.04, "ratio", _OWN + "a stray copy does not hide it"),
    Threshold("spinning.power_enter", 0.45, "ratio",
              _OWN + "the raised idle power of small boards passes and that of GPUs at work does not"),
    Threshold("spinning.power_leave", 0.55, "ratio", _OWN + "it lies a step above the value to enter"),
    Threshold("spinning.varies_enter", 0.05, "ratio",
              _OWN + "kernels that wait keep the same SMs all the time, while steps of a training differ"),
    Threshold("spinning.varies_leave", 0.15, "ratio", _OWN + "one odd reading does not hide it"),
    Threshold("spinning.traffic_enter", 5e6, "B/s",
              _OWN + "launches (some 1 kB each) and input of a running job are above it"),
    Threshold("spinning.traffic_leave", 1e7, "B/s", _OWN + "a look at the GPU by a monitor does not change it"),
    Threshold("spinning.coarse_power_enter", 0.35, "ratio",
              _OWN + "without SM activity only a GPU that draws hardly more than an idle one counts"),
    Threshold("spinning.coarse_power_leave", 0.40, "ratio", _OWN + "it lies a step above the value to enter"),

    Threshold("tensor_idle.window_s", 180.0, "s", _OWN + "validation and preprocessing phases are over"),
    Threshold("tensor_idle.sm_enter", 0.60, "ratio", "as low_sm_active.active_leave"),
    Threshold("tensor_idle.sm_leave", 0.50, "ratio", "as low_sm_active.active_enter"),
    Threshold("tensor_idle.tensor_enter", 0.005, "ratio", _OWN + "it is no matrix work on tensor cores at all"),
    Threshold("tensor_idle.tensor_leave", 0.02, "ratio", _OWN + "a stray kernel does not hide it"),
    Threshold("tensor_idle.fp64_enter", 0.05, "ratio", _OWN + "scientific work in double precision is left alone"),
    Threshold("tensor_idle.fp64_leave", 0.10, "ratio", _OWN + "it lies a step above the value to enter"),

    Threshold("dram_bound.window_s", 60.0, "s", _OWN + "it holds for the run, not for one phase of a step"),
    Threshold("dram_bound.dram_enter", 0.60, "ratio",
              "NVIDIA, DCGM profiling metrics: about 80 % of the memory's peak is the most that can be reached"),
    Threshold("dram_bound.dram_leave", 0.50, "ratio", _OWN + "it lies a step below the value to enter"),
    Threshold("dram_bound.tensor_enter", 0.30, "ratio", _OWN + "the tensor cores are clearly not the limit"),
    Threshold("dram_bound.tensor_leave", 0.40, "ratio", _OWN + "it lies a step above the value to enter"),

    Threshold("memory_pressure.window_s", 120.0, "s", "as idle_gpu.all_window_s"),
    Threshold("memory_pressure.full", 0.90, "ratio",
              "PyTorch's TensorBoard plugin: memory above 90 % is a risk; TraceML warns at 92 %"),
    Threshold("memory_pressure.free_enter", 0.02, "ratio",
              _OWN + "a cuDNN workspace or one more activation (a GB or two) no longer fits"),
    Threshold("memory_pressure.free_leave", 0.05, "ratio", _OWN + "memory given back for a moment does not hide it"),
    Threshold("memory_pressure.moved", 0.005, "ratio", "as memory_preallocated.flat"),

    Threshold("pcie_link_degraded.window_s", 60.0, "s", _OWN + "some seconds of work are in it"),
    Threshold("pcie_link_degraded.busy", 0.1, "ratio",
              "NVML: links run slower while the GPU is idle; " + _OWN + "only readings under load count"),
    Threshold("pcie_link_degraded.rate", 0.9, "ratio", _OWN + "half of the lanes or one generation less is below it"),
    Threshold("pcie_link_degraded.share_enter", 0.9, "ratio", _OWN + "a link on its way up is not reported"),
    Threshold("pcie_link_degraded.share_leave", 0.5, "ratio", _OWN + "the link works at full rate again"),
    Threshold("pcie_link_degraded.traffic_enter", 0.3, "ratio",
              _OWN + "a link that carries less costs little time at half its rate"),
    Threshold("pcie_link_degraded.traffic_leave", 0.2, "ratio", _OWN + "it lies a step below the value to enter"),

    Threshold("pcie_saturated.rate_enter", 0.65, "ratio",
              "packet headers leave 80-90 % of a PCIe link's raw rate; " + _OWN + "copies run most of the time"),
    Threshold("pcie_saturated.rate_leave", 0.55, "ratio", _OWN + "it lies a step below the value to enter"),
    Threshold("pcie_saturated.coarse_window_s", 120.0, "s",
              "NVML's call sees 20 ms; " + _OWN + "a few dozen looks, 5 s apart, make a mean"),
    Threshold("pcie_saturated.coarse_count", 12, "count",
              _OWN + "the mean of 20-ms looks is good to about 0.1 even if they differ widely"),
    Threshold("pcie_saturated.medium_enter", 0.8, "ratio", _OWN + "the GPU visibly waits"),
    Threshold("pcie_saturated.medium_leave", 0.9, "ratio", _OWN + "it lies a step above the value to enter"),

    Threshold("thermal_throttled.window_s", 60.0, "s", _OWN + "heating up and cooling down in turns is one state"),
    Threshold("thermal_throttled.share_enter", 0.25, "ratio", _OWN + "a short peak is not reported"),
    Threshold("thermal_throttled.share_leave", 0.10, "ratio", _OWN + "a GPU that cools down now and then stays"),
    Threshold("thermal_throttled.clock_enter", 0.95, "ratio", _OWN + "one boost step down is not reported"),
    Threshold("thermal_throttled.clock_leave", 0.98, "ratio", _OWN + "the clock is back"),
    Threshold("thermal_throttled.near_c_enter", 5.0, "°C",
              "NVML: a hardware slowdown can have other causes than heat; " + _OWN + "heat is near its limit then"),
    Threshold("thermal_throttled.near_c_leave", 8.0, "°C", _OWN + "cooling down a little while slowed is still heat"),
    Threshold("thermal_throttled.high_enter", 0.75, "ratio", "contract of severities: 15 % is high; " + _OWN
              + "part of the kernels does not depend on the clock"),
    Threshold("thermal_throttled.high_leave", 0.80, "ratio", _OWN + "it lies a step above the value to enter"),

    Threshold("host_cpu_saturated.window_s", 120.0, "s", "as idle_gpu.all_window_s"),
    Threshold("host_cpu_saturated.cpu_enter", 0.95, "ratio", _OWN + "no core has time left"),
    Threshold("host_cpu_saturated.cpu_leave", 0.88, "ratio", _OWN + "a short dip does not hide it"),
    Threshold("host_cpu_saturated.limit_beyond", 1.1, "ratio",
              _OWN + "a job that uses more than the limit seen from here is not under that limit"),
    Threshold("host_cpu_saturated.throttled_enter", 0.25, "ratio",
              "kubernetes-mixin: CPUThrottlingHigh at 25 % of the scheduler's periods"),
    Threshold("host_cpu_saturated.throttled_leave", 0.15, "ratio", _OWN + "a quieter minute does not hide it"),
    Threshold("host_cpu_saturated.waiting_enter", 0.80, "ratio", _OWN + "the GPUs clearly have time left"),
    Threshold("host_cpu_saturated.waiting_leave", 0.90, "ratio", _OWN + "it lies a step above the value to enter"),
    Threshold("host_cpu_saturated.thread_enter", 0.9, "ratio", _OWN + "some core is full at nearly every look"),
    Threshold("host_cpu_saturated.thread_leave", 0.7, "ratio", _OWN + "a few looks without a full core do not hide it"),
    Threshold("host_cpu_saturated.least_cores_enter", 0.9, "cores", _OWN + "one thread of the job fills a core"),
    Threshold("host_cpu_saturated.least_cores_leave", 0.7, "cores", "as host_cpu_saturated.thread_leave"),
    Threshold("host_cpu_saturated.most_cores_enter", 1.5, "cores",
              _OWN + "the job has hardly any other thread at work, so that the full core is its own"),
    Threshold("host_cpu_saturated.most_cores_leave", 2.0, "cores", _OWN + "it lies a step above the value to enter"),

    Threshold("live_limit.work", 0.8, "ratio", _OWN + "GPUs with less SM activity are not called fully at work"),
    Threshold("live_limit.tensor", 0.4, "ratio", _OWN + "matrix kernels of ordinary efficiency reach it"),

    Threshold("merge.fresh_s", 900.0, "s", _OWN + "a trace tells of what is running now, not of an earlier job"),
)

THRESHOLDS: dict[str, Threshold] = {t.id: t for t in (*_TRACE, *_TRACE_HOST, *_TRACE_DEVICE, *_LIVE, *_LIVE_WORK)}


def limit(threshold_id: str) -> float:
    """The value of a threshold; raises KeyError for an id that is not in the tables."""
    return THRESHOLDS[threshold_id].value


def source(*threshold_ids: str) -> str:
    """Where these thresholds come from, in one line."""
    return "; ".join(dict.fromkeys(THRESHOLDS[t].source for t in threshold_ids))
