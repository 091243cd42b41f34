"""The jobs that processes belong to, and the words for processes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from gputop.advice.live.node_view import gpus_text
from gputop.core.samples import HostProcess, ProcessSample
from gputop.text.commands import program_name
from gputop.text.units import counted

# What starts the ranks of inference servers: vLLM, SGLang, Triton, TensorRT-LLM, TGI, LMDeploy.
_INFERENCE_SERVERS = re.compile(
    r"\b(?:vllm|sglang|tritonserver|trtllm|tensorrt_llm|text[-_]generation|lmdeploy)\b", re.I)
_NOTEBOOKS = re.compile(r"\b(?:ipykernel|ipykernel_launcher|jupyter|jupyter-lab|colab_kernel_launcher)\b")
_RANK = re.compile(r"(rank[=\s]+)\d+", re.I)  # --local-rank=3, and the like


def is_inference_server(process: ProcessSample) -> bool:
    """Return whether its command names one, whose ranks wait for requests, some of them in a collective."""
    return _INFERENCE_SERVERS.search(process.command or "") is not None


def waits_for(process: ProcessSample) -> str:
    """Cause for which a process that does nothing may well wait, by its command; empty where it should be at work."""
    if is_inference_server(process):
        return "requests"
    return "its user" if _NOTEBOOKS.search(process.command or "") else ""


def same_job(a: ProcessSample, b: ProcessSample, complete: bool = True) -> bool:
    """Return whether two processes belong to one job: parent and child, ranks, workers of one program.

    Ranks run one command, but for numbers, as one user, on different GPUs; where not all GPUs
    are watched (not ``complete``) they may differ on the others. The same command, but for an option that
    gives the rank, is taken for one job also on the same GPU.
    """
    if a.parent_pid == b.pid or b.parent_pid == a.pid:
        return True
    if a.user != b.user or a.command is None or b.command is None:
        return False
    if a.parent_pid is not None and a.parent_pid == b.parent_pid and "multiprocessing" in a.command:
        return True
    if _RANK.sub(r"\1#", a.command) == _RANK.sub(r"\1#", b.command):
        return True
    return _pattern(a.command) == _pattern(b.command) and (not complete or set(a.gpus) != set(b.gpus))


def _pattern(command: str) -> str:
    return re.sub(r"\d+", "#", command)


def name_of(process: ProcessSample | HostProcess) -> str:
    """A short name: the script or program, with the pid."""
    return f"{program_name(process.command or 'process')} (pid {process.pid})"


def wait_for(busy: Sequence[int]) -> str:
    return f"may be waiting for {gpus_text(busy)} of the same job, which {'is' if len(busy) == 1 else 'are'} busy."


def stacks_command(processes: Iterable[ProcessSample], most: int = 8) -> str:
    """The command for the stacks of these processes, of those that are known where gputop runs; "" for none."""
    pids = [str(p.local_pid or p.pid) for p in processes if p.command is not None]
    return f"gputop stacks {' '.join(pids[:most])}" if pids else ""


def same_of(others: int) -> str:
    return f" The same applies to {counted(others, 'other process', 'es')}." if others else ""
