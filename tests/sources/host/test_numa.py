"""NUMA nodes: lists of CPUs, and the nodes that a process is bound to."""

from __future__ import annotations

from pathlib import Path

import pytest

from gputop.sources.host.cpu import bound_to, cpus_by_node, parse_cpus
from gputop.sources.host.gpu_processes import GpuProcessTable
from tests.sources.host.proc_tree import ProcTree, Ticking, on_gpus


@pytest.mark.parametrize(("text", "cpus"), [
    ("0-3,8\n", {0, 1, 2, 3, 8}), ("5", {5}), ("", set()), ("3-1", set()), ("0-999999999", set()), ("a", set()),
    ("0,x", set()), ("-1", set())])
def test_a_list_of_cpus(text: str, cpus: set[int]) -> None:
    assert parse_cpus(text) == cpus


def two_nodes(root: Path) -> None:
    for node, cpus in ((0, "0-1,4-5"), (1, "2-3,6-7"), (2, "")):  # 2: memory alone, as of a GPU
        folder = root / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
    (root / "sys/devices/system/node/possible").write_text("0-2\n")


def test_who_may_use_some_cpus_of_each_node_is_not_bound(tmp_path: Path) -> None:
    two_nodes(tmp_path)
    nodes = cpus_by_node(tmp_path)
    assert set(nodes) == {0, 1}
    assert bound_to(parse_cpus("2-3"), nodes) == (1,)
    assert bound_to(parse_cpus("1-2"), nodes) == bound_to(parse_cpus(""), nodes) == ()
    assert cpus_by_node(tmp_path / "none") == {} and bound_to(parse_cpus("0"), {}) == ()


def test_a_process_tells_its_nodes(tmp_path: Path) -> None:
    two_nodes(tmp_path)
    tree = ProcTree(tmp_path / "proc")
    folder = tree.add(100)
    with (folder / "status").open("a") as file:
        file.write("Cpus_allowed:\tcc\nCpus_allowed_list:\t2-3,6\n")
    tree.add(200)  # whose status does not tell
    bound, free = GpuProcessTable(Ticking(), tree.root).read(on_gpus(100, 200))
    assert bound.numa_nodes == (1,) and free.numa_nodes == ()
