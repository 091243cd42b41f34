"""The live rule about NUMA: a process is bound to CPUs that are far from its GPUs."""

from __future__ import annotations

from gputop.advice.live.frameworks import no_figure
from gputop.advice.live.node_view import NodeView, gpus_text, name_of
from gputop.advice.registry import limit
from gputop.advice.verdict import Explanation, Missing, Verdict
from gputop.core.samples import ProcessSample
from gputop.text.units import ranges


class NumaRemote(Verdict, frozen=True, kw_only=True):
    """``gpus`` are the far ones of all processes; the rest tells of one process."""

    process: ProcessSample
    far: tuple[int, ...]  # its GPUs on other nodes
    gpu_nodes: tuple[int, ...]  # the NUMA nodes of all its GPUs
    bound_nodes: tuple[int, ...]
    others: int  # further processes of which the same is true


def judge_numa_remote(view: NodeView) -> NumaRemote | Missing | None:
    """A process may only use CPUs of NUMA nodes that have not all of its GPUs. One that may use all nodes is left
    alone: where the scheduler puts it is not known."""
    remote = []
    for process in view.processes:
        if view.age_s(process) < limit("idle_gpu.age_s"):
            continue  # it may yet bind itself
        nodes = {gpu.info.index: gpu.info.numa_node for gpu in view.compute_gpus(process)}
        far = tuple(index for index, node in nodes.items() if node is not None and node not in process.numa_nodes)
        if process.numa_nodes and far:
            remote.append((process, far, tuple(sorted({node for node in nodes.values() if node is not None}))))
    if not remote:
        return None
    process, far, gpu_nodes = remote[0]
    return NumaRemote(gpus=tuple(sorted({gpu for _, far_gpus, _ in remote for gpu in far_gpus})), severity="low",
                      process=process, far=far, gpu_nodes=gpu_nodes, bound_nodes=process.numa_nodes,
                      others=len(remote) - 1)


def describe_numa_remote(v: NumaRemote) -> Explanation:
    more = f" The same is true of {v.others} more processes." if v.others > 1 else (
        " The same is true of one more process." if v.others else "")
    nodes = ",".join(map(str, v.gpu_nodes))
    several = len(v.gpu_nodes) > 1
    plural = "s" if several else ""
    return Explanation(
        title=f"{gpus_text(v.gpus)}: {'its' if len(v.gpus) == 1 else 'their'} "
              f"{'processes run' if v.others else 'process runs'} on another NUMA node",
        why=f"{name_of(v.process)} may only use CPUs of NUMA node {ranges(v.bound_nodes, ', ')}, but "
            f"{gpus_text(v.far)} {'is' if len(v.far) == 1 else 'are'} on another node. Launches, copies and input "
            f"cross the link between the sockets.{more}",
        evidence={"bound_nodes_count": float(len(v.bound_nodes)), "far_gpus_count": float(len(v.far))},
        action=f"Let the process use the CPUs and the memory of NUMA node{plural} {nodes}"
               + (", or start one process for each GPU, each bound to its own node." if several else
                  ". Under Slurm: --gpu-bind=closest, with the cores of each GPU in gres.conf."),
        snippet=f"numactl --cpunodebind={nodes} --membind={nodes} python train.py",
        gain="depends on how much the job copies and launches; " + no_figure(v.framework),
        source="Cpus_allowed_list of /proc/PID/status; numa_node of the GPU's PCI device",
    )
