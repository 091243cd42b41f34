"""What a series of an exporter is of: its node, its job, its GPU."""

from __future__ import annotations

import pytest

from gputop.sources.exporters import ACTIVITY, SCHEMAS, gpu_of, job_of, node_of


def test_every_exporter_has_activity_memory_and_power() -> None:
    names = [name.name for schema in SCHEMAS for own in schema.figures.values() for name in own]
    assert len(names) == len(set(names))
    for schema in SCHEMAS:
        assert {"memory_used_bytes", "power_w"} <= set(schema.figures) and set(ACTIVITY) & set(schema.figures)


@pytest.mark.parametrize(("labels", "node"), [
    ({"Hostname": "n1", "instance": "x:9400"}, "n1"), ({"hostname": "n2", "instance": "x:9400"}, "n2"),
    ({"instance": "n3:9400"}, "n3"), ({"instance": "[fe80::1]:9400"}, "fe80::1"), ({"instance": "n4"}, "n4"), ({}, ""),
])
def test_the_node_of_a_series(labels: dict[str, str], node: str) -> None:
    assert node_of(labels) == node


@pytest.mark.parametrize(("labels", "job"), [
    ({"hpc_job": "7", "pod": "p"}, ("hpc_job", "7")), ({"pod": "p", "namespace": "n"}, ("pod", "n/p")),
    ({"exported_pod": "w", "exported_namespace": "n", "pod": "dcgm-exporter-x"}, ("exported_pod", "n/w")),
    ({"pod": "nvidia-dcgm-exporter-abc", "namespace": "gpu"}, ("", "")), ({"hpc_job": ""}, ("", "")),
])
def test_the_job_of_a_series(labels: dict[str, str], job: tuple[str, str]) -> None:
    assert job_of(labels) == job


def test_the_number_of_a_gpu() -> None:
    assert gpu_of({"gpu": "3"}) == "3" and gpu_of({"gpu": "0", "GPU_I_ID": "2"}) == "0:2"
    assert gpu_of({"gpu": "NVIDIA H100", "index": "5"}) == "5" and gpu_of({}) == "?"
    assert gpu_of({"gpu": "NVIDIA H100", "gpu_index": "5", "mig_instance": "2"}) == "5:2"
