"""The exporters of GPU figures: what each calls a figure, in which unit, and its labels. Data alone.

Sources: dcgm-exporter (NVIDIA/dcgm-exporter, etc/default-counters.csv, internal/pkg/rendermetrics) up to 4.8, and 4.9,
which names its metrics as DCGM 4.7 does, in base units; gputop's own (`gputop export`), nvitop-exporter 1.5
and 1.7 (prometheus_client adds the unit to each name), all-smi up to 0.25 (src/api/metrics/gpu.rs and mig.rs; 0.21
renamed its labels), nvidia_gpu_exporter (utkuozdemir/nvidia_gpu_exporter, its page of metrics).
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field


class MetricName(Struct, frozen=True):
    """A metric, and what its value is multiplied by to have the base unit."""

    name: str
    factor: float = 1.0


_MIB, _MHZ, _PERCENT = 2.0**20, 1e6, 0.01


def _either(*names: str, factor: float = 1.0) -> tuple[MetricName, ...]:
    return tuple(MetricName(name, factor) for name in names)


class Schema(Struct, frozen=True):
    """One exporter. ``figures``: the spellings of each figure, of which a target has one. ``model``: the label with the
    GPU's model; of ``info``, joined by ``join``, where that is a metric of its own."""

    id: str
    title: str
    figures: Mapping[str, tuple[MetricName, ...]]
    model: str
    gpu_labels: tuple[str, ...]  # that tell the GPUs of a node apart
    mig_labels: tuple[str, ...] = ()  # and the MIG instances of a GPU
    info: str = ""
    jobs: str = ""  # metric with the jobs of a GPU as a label, joined by ``join``
    join: tuple[str, ...] = field(default=())


# Of the figures, these tell how much a GPU works, the best first. "util" is the share of time with any kernel,
# gr_active with any engine busy: both are coarse, and neither is shown by the name of the first.
ACTIVITY = ("sm_active", "gr_active", "util")
ACTIVITY_TITLES = {"sm_active": "SM active", "gr_active": "GR engine active, coarse", "util": "utilization, coarse"}

SCHEMAS: tuple[Schema, ...] = (
    # The unit goes with the name: of a cluster some nodes have the older names, some the newer. Memory is what is used
    # and free: only the newer names have the capacity, and that of some of a job's GPUs is not the job's.
    Schema("dcgm", "dcgm-exporter", model="modelName", gpu_labels=("UUID", "gpu"), mig_labels=("GPU_I_ID",), figures={
        "sm_active": _either("DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_PROF_SM_UTIL_RATIO"),
        "gr_active": _either("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO"),
        "util": (MetricName("DCGM_FI_DEV_GPU_UTIL", _PERCENT), MetricName("DCGM_FI_DEV_GPU_UTIL_RATIO")),
        "tensor_active": _either("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "DCGM_FI_PROF_TENSOR_UTIL_RATIO"),
        "memory_used_bytes": (MetricName("DCGM_FI_DEV_FB_USED", _MIB), MetricName("DCGM_FI_DEV_FB_USED_BYTES")),
        "memory_free_bytes": (MetricName("DCGM_FI_DEV_FB_FREE", _MIB), MetricName("DCGM_FI_DEV_FB_FREE_BYTES")),
        "memory_reserved_bytes": (MetricName("DCGM_FI_DEV_FB_RESERVED", _MIB),
                                  MetricName("DCGM_FI_DEV_FB_RESERVED_BYTES")),
        "power_w": _either("DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_BOARD_POWER_WATTS"),
        "power_limit_w": _either("DCGM_FI_DEV_POWER_MGMT_LIMIT", "DCGM_FI_DEV_ENFORCED_POWER_LIMIT",
                                 "DCGM_FI_DEV_BOARD_POWER_LIMIT_REQUESTED_WATTS",
                                 "DCGM_FI_DEV_BOARD_POWER_LIMIT_ENFORCED_WATTS"),
        "sm_clock_hz": (MetricName("DCGM_FI_DEV_SM_CLOCK", _MHZ), MetricName("DCGM_FI_DEV_SM_CLOCK_HERTZ")),
        "temperature_c": _either("DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_GPU_TEMP_CELSIUS"),
        "memory_temperature_c": _either("DCGM_FI_DEV_MEMORY_TEMP", "DCGM_FI_DEV_MEMORY_TEMP_CELSIUS"),
        "pcie_width": _either("DCGM_FI_DEV_PCIE_LINK_WIDTH"),
        "xid": _either("DCGM_FI_DEV_XID_ERRORS", "DCGM_FI_DEV_XID_ERROR"),
        "rows_remap_failed": _either("DCGM_FI_DEV_ROW_REMAP_FAILURE", "DCGM_FI_DEV_ROW_REMAP_FAILED"),
        "ecc_uncorrected": _either("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL"),
        "clock_reasons": _either("DCGM_FI_DEV_CLOCK_THROTTLE_REASONS", "DCGM_FI_DEV_CLOCKS_EVENT_REASONS"),
        "thermal_violation": _either("DCGM_FI_DEV_THERMAL_VIOLATION",
                                     "DCGM_FI_DEV_GPU_THERMAL_THROTTLE_SECONDS_TOTAL"),
        "power_violation": _either("DCGM_FI_DEV_POWER_VIOLATION", "DCGM_FI_DEV_GPU_POWER_THROTTLE_SECONDS_TOTAL")}),
    Schema("gputop", "gputop export", model="name", gpu_labels=("uuid", "gpu"), mig_labels=("mig",),
           info="gputop_gpu_info", jobs="gputop_gpu_job_info", join=("uuid", "mig"), figures={
        "sm_active": _either("gputop_gpu_sm_active_ratio"),
        "gr_active": _either("gputop_gpu_gr_active_ratio"),
        "util": _either("gputop_gpu_util_ratio"),
        "tensor_active": _either("gputop_gpu_tensor_active_ratio"),
        "memory_used_bytes": _either("gputop_gpu_memory_used_bytes"),
        "memory_total_bytes": _either("gputop_gpu_memory_total_bytes"),
        "power_w": _either("gputop_gpu_power_watts"),
        "power_limit_w": _either("gputop_gpu_power_limit_watts"),
        "sm_clock_hz": _either("gputop_gpu_sm_clock_hertz"),
        "temperature_c": _either("gputop_gpu_temperature_celsius"),
        "memory_temperature_c": _either("gputop_gpu_memory_temperature_celsius"),
        "pcie_width": _either("gputop_gpu_pcie_width"),
        "rows_remap_failed": _either("gputop_gpu_row_remap_failed"),
        "ecc_uncorrected": _either("gputop_gpu_ecc_uncorrected_total"),
        "clock_reasons": _either("gputop_gpu_clock_event_reasons")}),
    Schema("nvitop", "nvitop-exporter", model="devicename", gpu_labels=("uuid", "index"), figures={
        "util": _either("gpu_utilization_Percentage", factor=_PERCENT),
        "memory_used_bytes": _either("gpu_memory_used_MiB", factor=_MIB),
        "memory_total_bytes": _either("gpu_memory_total_MiB", factor=_MIB),
        "power_w": _either("gpu_power_usage_W"),
        "power_limit_w": _either("gpu_power_limit_W"),
        "sm_clock_hz": _either("gpu_clock_sm_MHz", factor=_MHZ),
        "temperature_c": _either("gpu_temperature_C")}),
    Schema("all-smi", "all-smi", model="gpu", gpu_labels=("gpu_uuid", "uuid", "gpu_index", "index"),
           mig_labels=("mig_instance",), figures={
        "util": _either("all_smi_gpu_utilization", "all_smi_mig_instance_utilization_gpu", factor=_PERCENT),
        "memory_used_bytes": _either("all_smi_gpu_memory_used_bytes"),
        "memory_total_bytes": _either("all_smi_gpu_memory_total_bytes"),
        "power_w": _either("all_smi_gpu_power_consumption_watts"),
        "power_limit_w": _either("all_smi_gpu_power_limit_current_watts"),
        "sm_clock_hz": _either("all_smi_gpu_frequency_mhz", factor=_MHZ),
        "temperature_c": _either("all_smi_gpu_temperature_celsius"),
        "pcie_width": _either("all_smi_gpu_pcie_width_current")}),
    # Its UUIDs have no "GPU-" before them.
    Schema("nvidia-smi", "nvidia_gpu_exporter", model="name", gpu_labels=("uuid",), info="nvidia_smi_gpu_info",
           join=("uuid",), figures={
        "util": _either("nvidia_smi_utilization_gpu_ratio"),
        "memory_used_bytes": _either("nvidia_smi_memory_used_bytes"),
        "memory_total_bytes": _either("nvidia_smi_memory_total_bytes"),
        "power_w": _either("nvidia_smi_power_draw_watts"),
        "power_limit_w": _either("nvidia_smi_enforced_power_limit_watts", "nvidia_smi_power_limit_watts"),
        "sm_clock_hz": _either("nvidia_smi_clocks_current_sm_clock_hz"),
        "temperature_c": _either("nvidia_smi_temperature_gpu"),
        "pcie_width": _either("nvidia_smi_pcie_link_width_current"),
        "clock_reasons": _either("nvidia_smi_clocks_event_reasons_active", "nvidia_smi_clocks_throttle_reasons_active"),
    }),
)
# The least and the most that a figure can be, in its base unit: beyond it a metric has another unit than its name says,
# as a ratio of 97 or a clock of 1,900 Hz. Wide: they catch what cannot be, not what is rare.
LIMITS: Mapping[str, tuple[float | None, float]] = {
    **dict.fromkeys((*ACTIVITY, "tensor_active"), (None, 1.05)),  # drivers round
    **dict.fromkeys(("memory_used_bytes", "memory_free_bytes", "memory_reserved_bytes"), (None, 2.0**46)),
    "memory_total_bytes": (2.0**27, 2.0**46),
    "sm_clock_hz": (1e7, 1e10),
}
# Time that a limit held the clocks down, in a unit that releases disagree on: only that it grows says anything.
COUNTERS = ("thermal_violation", "power_violation")
# What metrics of GPUs may begin with that no schema reads.
FOREIGN = ("DCGM_FI_", "nvidia_", "gpu_", "nvml_", "amd_gpu_", "amdgpu_", "rocm_")

# Labels that name the node, the best first. dcgm-exporter writes Hostname, newer ones hostname; the last is
# Prometheus's own, with a port: it counts where there is no other.
HOST_LABELS = ("Hostname", "hostname", "node")
NODE_LABELS = (*HOST_LABELS, "instance")
# Labels that name the job, the best first. Behind a Prometheus without honor_labels the pod that holds the GPU is
# exported_pod, and pod is the exporter's own. Labels of pods (dcgm-exporter --kubernetes-enable-pod-labels) join those
# of one job.
POD_LABELS = ("exported_pod", "pod")
JOINING_LABELS = ("jobset_sigs_k8s_io_jobset_name", "training_kubeflow_org_job_name", "volcano_sh_job_name",
                  "ray_io_cluster", "leaderworkerset_sigs_k8s_io_name", "batch_kubernetes_io_job_name")
JOB_LABELS = ("hpc_job", "slurm_job_id", *JOINING_LABELS, *POD_LABELS)
NAMESPACE_LABELS = ("exported_namespace", "namespace")
UUID_LABELS = ("UUID", "uuid", "gpu_uuid")
GPU_LABELS = ("gpu_index", "index", "gpu")  # all-smi's "gpu" is the name of the model
MIG_LABELS = ("GPU_I_ID", "mig", "mig_instance")


# Of a Prometheus that has several clusters, in which nodes and jobs may have the same names. Only then do the queries
# keep it.
CLUSTER_LABEL = "cluster"


def node_of(labels: Mapping[str, str]) -> str:
    """The node that a series is of, "cluster/node" where a label names the cluster; "" where no label says it."""
    for label in NODE_LABELS[:-1]:
        if labels.get(label):
            return _in_cluster(labels, labels[label])
    instance = labels.get("instance", "")
    host, _, port = instance.rpartition(":")
    return _in_cluster(labels, (host if host and port.isdecimal() else instance).strip("[]"))


def _in_cluster(labels: Mapping[str, str], name: str) -> str:
    cluster = labels.get(CLUSTER_LABEL, "")
    return f"{cluster}/{name}" if cluster and name else name


def gpu_of(labels: Mapping[str, str]) -> str:
    """The number of a GPU on its node, MIG instances as "0:1"; "?" where no label says it."""
    number = next((labels[label] for label in GPU_LABELS if labels.get(label)), "?")
    mig = next((labels[label] for label in MIG_LABELS if labels.get(label)), "")
    return f"{number}:{mig}" if mig else number


def job_of(labels: Mapping[str, str]) -> tuple[str, str]:
    """The label that names the job, and the job: a number of Slurm, or "namespace/pod"; ("", "") without one. With
    "cluster/" before it where a label names the cluster.

    A pod of an exporter is not the one that holds the GPU.
    """
    for label in JOB_LABELS:
        text = labels.get(label, "")
        if text and not (label in POD_LABELS and "exporter" in text):
            # The namespace of "pod", where there is no "exported_pod", is beside it.
            namespaces = NAMESPACE_LABELS if label in JOINING_LABELS else (
                NAMESPACE_LABELS[POD_LABELS.index(label):] if label in POD_LABELS else ())
            namespace = next((labels[name] for name in namespaces if labels.get(name)), "")
            return label, _in_cluster(labels, f"{namespace}/{text}" if namespace else text)
    return "", ""
