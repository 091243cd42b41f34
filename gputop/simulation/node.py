"""The simulated node: the readings of its sensors while the simulated job runs.

They follow from the loop's integrals over the time since the last reading; nothing is random here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from gputop.core.metrics import BYTES, COUNT, GPU_METRICS, RATIO
from gputop.core.samples import (
    NO_LIMIT,
    CgroupSample,
    GpuInfo,
    GpuProcess,
    GpuSample,
    HostProcess,
    HostSample,
    NodeSample,
    ProcessSample,
    Reading,
    missing_of,
    reading_of,
)
from gputop.simulation.figures import F64, GPU_QUANTITIES
from gputop.simulation.loop import SimulatedLoop
from gputop.simulation.scenarios import CPU_COUNT, EXAMPLE_BYTES, GPU_COUNT, RECORD_BYTES, GiB

SECOND_NS = 10**9
HOSTNAME = "demo-node"
SOURCE = "simulated"
PID = 4_194_904  # above Linux's highest pid (2^22), so that it can be no process of this machine
COMMAND = "python train.py --model vit_b16 --strategy mirrored"
COMMAND_BY_RANK = "python train.py --model vit_b16 --strategy multi_worker --rank"
USER = "demo"
CONTAINER = "slurm 48213"

_MiB = 1 << 20
_MEMORY_TOTAL = 81_559 * _MiB
_MEMORY_RESERVED = 551 * _MiB
_MEMORY_USED = 78_214 * _MiB  # TensorFlow's reservation and the CUDA context
_POWER_LIMIT_W = 700.0
_IDLE_W = 112.0  # a GPU with a context, clocks up
_POWER_WINDOW_NS = SECOND_NS  # NVML's power usage is a mean over one second
_SM_CLOCK_MHZ, _SM_CLOCK_FLOOR_MHZ, _MEMORY_CLOCK_MHZ = 1_980, 1_755, 2_619
_CLOCK_STEP_MHZ = 15
_CLOCK_DROPS_ABOVE = 0.9  # share of the power limit
_PCIE_GEN5_X16 = 32e9 * 16 * 128 / 130 / 8
_AIR_C = (27.0, 28.5, 30.0, 29.0, 27.5, 29.5, 31.0, 30.5)  # the air that reaches each GPU
_KELVIN_PER_W = 0.056
_MEMORY_WARMER_C = 9.0  # stacks of device memory than the GPU beside them
_SLOWDOWN_C = 87.0
_WARMING_S = 18.0  # time constant of the heat sink
_LONG_PAUSE_S = 600  # between two samples; after it the temperature is not followed second by second

_HOST_MEMORY = 2_048 * GiB
_SYSTEM_MEMORY = 41 * GiB
_JOB_MEMORY = 23 * GiB  # interpreter, libraries, pinned buffers
_SYSTEM_CPU_CORES = 0.8
_JOB_MEMORY_LIMIT = 1_900 * GiB
# Beside the job: PID (above Linux's highest, as PID), user, command, cores, resident bytes.
_SYSTEM = (
    (PID - 570, "root", "/usr/sbin/slurmstepd: [48213.0]", 0.02, 19 * _MiB),
    (PID - 590, "root", "/usr/bin/nv-hostengine -n --service-account nvidia-dcgm", 0.31, 214 * _MiB),
    (PID - 580, "root", "/usr/bin/containerd", 0.05, 388 * _MiB),
)
_JOB_THREADS = 148  # beside tf.data's
_LOG_BYTES_PER_BATCH = 3_000
_ACK_SHARE = 0.004  # share of received network traffic that goes back as acknowledgments

_DYNAMIC_J = GPU_QUANTITIES.index("dynamic_j")
_REMEMBERED = 8


def gpu_infos() -> tuple[GpuInfo, ...]:
    return tuple(
        GpuInfo(
            index=i, uuid=f"GPU-5104a7ed-0000-4000-8000-00000000000{i}", name="NVIDIA H100 80GB HBM3",
            pci_bus_id=f"00000000:{0x1B + 0x10 * i:02X}:00.0", pcie_gen_max=5, pcie_width_max=16,
            numa_node=i * 2 // GPU_COUNT)
        for i in range(GPU_COUNT))


def _readings(values: Mapping[str, float]) -> dict[str, Reading]:
    return {name: reading_of(name, value, SOURCE) for name, value in values.items()}


_CONSTANT = _readings({
    "fp64_active": 0, "memory_used_bytes": _MEMORY_USED, "memory_reserved_bytes": _MEMORY_RESERVED,
    "memory_total_bytes": _MEMORY_TOTAL, "pcie_max_bytes_per_s": _PCIE_GEN5_X16, "pcie_gen": 5, "pcie_width": 16,
    "power_limit_w": _POWER_LIMIT_W, "power_limit_default_w": _POWER_LIMIT_W, "sm_clock_max_hz": _SM_CLOCK_MHZ * 1e6,
    "memory_clock_hz": _MEMORY_CLOCK_MHZ * 1e6, "memory_clock_max_hz": _MEMORY_CLOCK_MHZ * 1e6,
    "temperature_slowdown_c": _SLOWDOWN_C, "encoder_util": 0, "decoder_util": 0,
    "ecc_corrected": 0, "ecc_uncorrected": 0, "ecc_uncorrected_lifetime": 0,
    "rows_remapped": 0, "row_remap_pending": 0, "row_remap_failed": 0,
})
_PROCESS_MEMORY = Reading(float(_MEMORY_USED - 4 * _MiB), BYTES, SOURCE)


class _Heat:
    """Temperature of one GPU, second by second: a first-order response to its power."""

    def __init__(self, node: SimulatedNode, gpu: int) -> None:
        self._node = node
        self._gpu = gpu
        self._second = -_LONG_PAUSE_S  # no sample yet
        self._before_c = self._now_c = 0.0

    def at(self, time_ns: int) -> float:
        second = time_ns // SECOND_NS
        if not 0 <= second - self._second < _LONG_PAUSE_S:  # the first sample, an earlier time, or after a long pause
            self._second = max(0, second - 90)  # five time constants earlier: what was before is forgotten
            self._before_c = self._now_c = self._settled(self._second)
        decay = math.exp(-1 / _WARMING_S)
        while self._second < second:
            self._second += 1
            target = self._settled(self._second)
            self._before_c, self._now_c = self._now_c, target + (self._now_c - target) * decay
        share = (time_ns - second * SECOND_NS) / SECOND_NS
        return self._before_c + (self._now_c - self._before_c) * share

    def _settled(self, second: int) -> float:
        """Temperature that would be reached if the power of the last second went on."""
        return _AIR_C[self._gpu] + _KELVIN_PER_W * self._node.power_w(self._gpu, second * SECOND_NS)


class SimulatedNode:
    """Eight GPUs and their host. One thread at a time per GPU and for the host, as probes are read."""

    def __init__(self, loop: SimulatedLoop, pid: int = PID) -> None:
        self.loop = loop
        self.pids = [pid + gpu * loop.scenario.hangs for gpu in range(GPU_COUNT)]  # of each GPU
        self.infos = gpu_infos()
        self._heat = [_Heat(self, gpu) for gpu in range(GPU_COUNT)]
        self._recent: list[dict[int, F64]] = [{} for _ in range(GPU_COUNT)]

    def _integrals(self, gpu: int, time_ns: int) -> F64:
        """The loop's integrals, cached: windows and means share their times."""
        recent = self._recent[gpu]
        integrals = recent.get(time_ns)
        if integrals is None:
            if len(recent) >= _REMEMBERED:
                del recent[next(iter(recent))]
            integrals = recent[time_ns] = self.loop.gpu_integrals(gpu, time_ns)
        return integrals

    def power_w(self, gpu: int, time_ns: int) -> float:
        """Mean board power of the second before."""
        start = max(0, time_ns - _POWER_WINDOW_NS)
        if time_ns <= start:
            return _IDLE_W
        joules = self._integrals(gpu, time_ns)[_DYNAMIC_J] - self._integrals(gpu, start)[_DYNAMIC_J]
        return min(_IDLE_W + float(joules) / ((time_ns - start) / 1e9), _POWER_LIMIT_W)

    def gpu(self, gpu: int, start_ns: int, end_ns: int) -> GpuSample:
        """Sample of that GPU over the time from ``start_ns`` to ``end_ns``, which is later."""
        seconds = (end_ns - start_ns) / 1e9
        integrals = ((self._integrals(gpu, end_ns) - self._integrals(gpu, start_ns)) / seconds).tolist()
        rate = dict(zip(GPU_QUANTITIES, integrals, strict=True))
        power, heat_c = self.power_w(gpu, end_ns), self._heat[gpu].at(end_ns)
        readings = _CONSTANT | _readings({
            **{name: min(value, 1.0) for name, value in rate.items() if name in GPU_METRICS},
            "pcie_rx_bytes_per_s": rate["pcie_rx_bytes"], "pcie_tx_bytes_per_s": rate["pcie_tx_bytes"],
            # A ring and a gather within one switch: what goes out of one GPU comes in at another.
            "nvlink_rx_bytes_per_s": rate["nvlink_bytes"], "nvlink_tx_bytes_per_s": rate["nvlink_bytes"],
            "power_w": power, "temperature_c": round(heat_c), "memory_temperature_c": round(heat_c + _MEMORY_WARMER_C),
            "sm_clock_hz": _clock_mhz(power) * 1e6})
        # What NVML calls utilization, of the GPU and of a process: the share of time in which any kernel ran.
        coarse = readings["gpu_util"] = Reading(readings["gr_active"].value, RATIO, SOURCE, coarse=True)
        process = GpuProcess(self.pids[gpu], "C", None, _PROCESS_MEMORY, coarse)
        reasons = ("power cap",) if power >= _POWER_LIMIT_W else ()
        return GpuSample(self.infos[gpu], readings, (process,), clock_event_reasons=reasons)

    def host(self, start_ns: int, end_ns: int) -> tuple[HostSample, float]:
        """The host over that time, and the cores the job used."""
        seconds = (end_ns - start_ns) / 1e9
        before, after = self.loop.host_integrals(start_ns), self.loop.host_integrals(end_ns)
        rate = {name: (after[name] - before[name]) / seconds for name in after}
        scenario = self.loop.scenario
        cores = rate["input_s"] * scenario.job.input_workers + rate["launch_cpu_s"] + rate["python_cpu_s"]
        dataset = rate["batches"] * scenario.batch_per_gpu * GPU_COUNT * RECORD_BYTES
        from_network = dataset if scenario.dataset_on_network else 0.0
        readings = _readings({
            "cpu_ratio": min((cores + _SYSTEM_CPU_CORES) / CPU_COUNT, 1.0),
            # The checkpoint's writer is the one thread that waits for the disk.
            "iowait_ratio": rate["write_bytes"] / scenario.checkpoint_write_bytes_per_s / CPU_COUNT,
            "memory_used_bytes": _SYSTEM_MEMORY + self.job_memory_bytes(),
            "memory_total_bytes": _HOST_MEMORY,
            "disk_read_bytes_per_s": dataset - from_network,
            "disk_write_bytes_per_s": rate["write_bytes"],
            "net_rx_bytes_per_s": from_network,
            "net_tx_bytes_per_s": from_network * _ACK_SHARE + rate["batches"] * _LOG_BYTES_PER_BATCH})
        busy = [rate["python_cpu_s"], *[rate["launch_cpu_s"] / GPU_COUNT] * GPU_COUNT,
                *[rate["input_s"]] * scenario.job.input_workers]  # a thread each
        job = [(pid, USER, command, cores / len(self.commands), self.job_memory_bytes() // len(self.commands))
               for pid, command in self.commands.items()]
        top = (*job, *_SYSTEM)
        return HostSample(HOSTNAME, readings, CPU_COUNT, _core_ratios(busy), top_processes=tuple(
            HostProcess(pid, user, command, Reading(float(round(used, 3)), COUNT, SOURCE),
                        Reading(float(rss_bytes), BYTES, SOURCE)) for pid, user, command, used, rss_bytes in top),
            top_reason=None), cores

    def job_memory_bytes(self) -> int:
        """Resident memory of the job: itself and its prefetch buffer."""
        scenario = self.loop.scenario
        batch = scenario.batch_per_gpu * GPU_COUNT * EXAMPLE_BYTES
        return _JOB_MEMORY + (scenario.job.prefetch + 1) * batch

    @property
    def commands(self) -> dict[int, str]:
        """The processes of the training job, by PID."""
        if not self.loop.scenario.hangs:
            return {self.pids[0]: COMMAND}
        return {pid: f"{COMMAND_BY_RANK} {gpu}" for gpu, pid in enumerate(self.pids)}

    def processes(self, host: HostSample, cores: float, held: dict[int, GpuProcess]) -> tuple[ProcessSample, ...]:
        """The training job as the host sees it; all that goes to and from the disks is the job's."""
        count = len(self.commands)

        def share(metric: str) -> Reading:
            whole = host[metric]
            return whole if whole.value is None else Reading(whole.value / count, whole.unit, SOURCE)

        out = []
        for pid, command in self.commands.items():
            gpus = {gpu: process for gpu, process in held.items() if process.pid == pid}
            visible = [gpu for gpu, holder in enumerate(self.pids) if holder == pid]
            if gpus:
                out.append(ProcessSample(
                    pid, USER, command, Reading(round(cores / count, 3), COUNT, SOURCE),
                    Reading(float(self.job_memory_bytes() // count), BYTES, SOURCE),
                    threads=_JOB_THREADS + self.loop.scenario.job.input_workers // count, gpus=gpus,
                    container=CONTAINER, cuda_visible_devices=",".join(map(str, visible)),
                    io_read_bytes_per_s=share("disk_read_bytes_per_s"),
                    io_write_bytes_per_s=share("disk_write_bytes_per_s"),
                    cgroup=self._cgroup(cores), framework="tensorflow",
                    reasons=dict.fromkeys(("parent_pid", "started_s"), SOURCE)))
        return tuple(out)

    def _cgroup(self, cores: float) -> CgroupSample:
        """The batch job that the training job runs in has the whole node to itself, but for some memory."""
        unlimited = {name: missing_of(name, NO_LIMIT, SOURCE) for name in ("cpu_limit_cores", "cpu_throttled_ratio")}
        return CgroupSample(CONTAINER, unlimited | _readings({
            "cpu_used_cores": round(cores, 3), "memory_limit_bytes": _JOB_MEMORY_LIMIT,
            "memory_used_bytes": self.job_memory_bytes(), "oom_kills": 0}))

    def sample(self, gpus: list[int], start_ns: int, end_ns: int, time_s: float, label: str) -> NodeSample:
        """All of it over that time."""
        samples = tuple(self.gpu(gpu, start_ns, end_ns) for gpu in gpus)
        host, cores = self.host(start_ns, end_ns)
        held = {s.info.index: s.processes[0] for s in samples}
        return NodeSample(
            time_s, samples, host, self.processes(host, cores, held), (end_ns - start_ns) / 1e9, label, simulated=True)


def _core_ratios(threads: list[float]) -> tuple[float, ...]:
    """Busy share of each core: the job's threads on one each, the system's work spread over all."""
    system = _SYSTEM_CPU_CORES / CPU_COUNT
    idle = [0.0] * (CPU_COUNT - len(threads))
    return tuple([round(min(thread + system, 1.0), 2) for thread in (threads + idle)[:CPU_COUNT]])


def _clock_mhz(power_w: float) -> int:
    """Boost clock: the driver lowers it in steps as the board nears its power limit."""
    over = max(0.0, power_w / _POWER_LIMIT_W - _CLOCK_DROPS_ABOVE) / (1 - _CLOCK_DROPS_ABOVE)
    clock = _SM_CLOCK_MHZ - over * (_SM_CLOCK_MHZ - _SM_CLOCK_FLOOR_MHZ)
    return int(clock // _CLOCK_STEP_MHZ) * _CLOCK_STEP_MHZ
