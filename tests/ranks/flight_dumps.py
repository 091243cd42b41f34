"""Dumps of a flight recorder as PyTorch 2.13 writes them, made of a few facts."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gputop.ranks.flight_recorder import Dump, read_dump

NOW_S = 1_700_000_000.0


def entry(seq: int, operation: str = "all_reduce", sizes: Sequence[int] = (8,), *, state: str = "completed",
          line: int = 10, group: tuple[str, str] = ("0", "default_pg"), record: int | None = None,
          at_s: float | None = None, backend: str = "nccl", p2p: bool = False) -> dict[str, Any]:
    created_ns = int((NOW_S + seq if at_s is None else at_s) * 1e9)
    done = {"scheduled": 0, "started": 1, "completed": 2}[state]
    return {
        "record_id": seq - 1 if record is None else record, "pg_id": 0, "process_group": group,
        "collective_seq_id": seq, "p2p_seq_id": 0, "op_id": seq, "profiling_name": f"{backend}:{operation}",
        "time_created_ns": created_ns, "input_sizes": [list(sizes)], "input_dtypes": ["Float"],
        "output_sizes": [list(sizes)], "output_dtypes": ["Float"], "state": state,
        "time_discovered_started_ns": created_ns if done > 0 else None,
        "time_discovered_completed_ns": created_ns if done > 1 else None,
        "retired": done > 1, "timeout_ms": 600_000, "is_p2p": p2p,
        "frames": [{"name": "all_reduce", "filename": "/x/site-packages/torch/distributed/distributed_c10d.py",
                    "line": 3245}, {"name": "step", "filename": "/home/u/train.py", "line": line}]}


def document(entries: Sequence[dict[str, Any]], size: int | None = 2,
             groups: dict[str, Sequence[int]] | None = None) -> dict[str, Any]:
    members = {"0": range(size), **(groups or {})} if size is not None else {}
    return {"version": "2.10", "entries": list(entries), "pg_status": {}, "pg_config": {
        name: {"name": name, "desc": "default_pg" if name == "0" else "undefined", "ranks": str(list(ranks))}
        for name, ranks in members.items()}}


def dump(rank: int, entries: Sequence[dict[str, Any]], size: int | None = 2,
         groups: dict[str, Sequence[int]] | None = None, written_s: float = NOW_S + 1000) -> Dump:
    return read_dump(pickle.dumps(document(entries, size, groups), 2), rank, f"dump {rank}", written_s)


def history(last: int, *, then: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
    """Completed all_reduces 1 to ``last``, and what follows."""
    return [*(entry(seq) for seq in range(1, last + 1)), *then]


@contextmanager
def processes(*environs: Mapping[str, str]) -> Iterator[list[int]]:
    """Processes with these in their environment, which wait until they are ended."""
    started = []
    try:
        for own in environs:
            started.append(subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], env=dict(own),
                                            stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        for process in started:
            assert process.stdout is not None and process.stdout.readline()
        yield [process.pid for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()


def save(path: Path, entries: list[dict[str, Any]]) -> str:
    path.write_bytes(pickle.dumps(document(entries), 2))
    return str(path)
