"""A cluster with a straggler, as Prometheus answers."""

from __future__ import annotations

from tests.cluster.fleets import CannedClient, Rows

DCGM = {"DCGM_FI_PROF_SM_ACTIVE": 1600, "DCGM_FI_DEV_GPU_UTIL": 1600, "DCGM_FI_DEV_POWER_USAGE": 1600}
JOB, OTHER = {"hpc_job": "7"}, {"hpc_job": "8"}
NODE_1, NODE_2 = {"Hostname": "n1", "instance": "10.0.0.1:9400"}, {"hostname": "n2.example", "instance": "n2:9400"}
LOW = {**NODE_1, "UUID": "GPU-1", "gpu": "3"}


def by_label() -> CannedClient:
    return CannedClient(
        DCGM, ["hpc_job"], activity=[(JOB, 0.9), (OTHER, 0.5), ({}, 0.0)], gpus=[(JOB, 32), (OTHER, 8), ({}, 16)],
        nodes=[(JOB, 4), (OTHER, 1)], lowest=[(JOB, 0.5), (OTHER, 0.4)], median=[(JOB, 0.9), (OTHER, 0.5)],
        power_w=[(JOB, 20_000.0)], mad=[(JOB, 0.01)],
        idle_gpus=[(OTHER, 3)], all_gpus=[({}, 56)], node_median=[(JOB, 0.9)],
        low_gpu=[({**JOB, **LOW}, 0.5), ({**LOW, "UUID": "GPU-9", "gpu": "0"}, 0.0)],
        down=[({}, 1)], targets=[({}, 5)], down_target=[({"instance": "n9:9400", "job": "dcgm"}, 0)])


def straggler(**arms: Rows) -> CannedClient:
    return CannedClient({**DCGM, "DCGM_FI_DEV_SM_CLOCK": 1600}, sm_clock_hz=[(LOW, 1.1e9)], **arms)
