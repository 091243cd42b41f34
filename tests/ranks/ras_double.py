"""A server that speaks as NCCL's RAS does: the text of 2.24 to 2.27, text and JSON of later ones; or as it should not.

The layouts are those of NCCL's ``src/ras/client_support.cc``, version by version.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tests.listening import listening


@dataclass(frozen=True)
class Job:
    """Ranks of one communicator, a GPU and a process each, eight to a node: by rank how many AllReduces each launched.

    ``gathers``: AllGathers, likewise. ``gone`` ranks do not answer."""

    reduces: tuple[int, ...]
    gathers: tuple[int, ...] = ()
    gone: frozenset[int] = frozenset()
    starting: int = 0  # a rank that is still set up; 0: none
    version: str = "2.28.9"
    first_pid: int = 1000
    key: int = 0xabc
    more: tuple[Job, ...] = field(default=())  # further communicators

    @property
    def counts(self) -> Mapping[str, tuple[int, ...]]:
        size = len(self.reduces)
        return {"Broadcast": (3,) * size, "AllGather": self.gathers or (0,) * size, "AllReduce": self.reduces}

    @property
    def here(self) -> list[int]:
        return [r for r in range(len(self.reduces)) if r not in self.gone]

    def place(self, rank: int) -> tuple[str, int, int]:
        return f"10.0.0.{rank // 8 + 1}", self.first_pid + rank, (self.first_pid + rank) % 8

    def described(self, rank: int) -> str:
        host, pid, gpu = self.place(rank)
        return f"GPU {gpu} managed by process {pid} on node {host}"

    def number(self) -> tuple[int, ...]:
        return tuple(map(int, self.version.split(".")))


def as_json(job: Job) -> bytes:
    def place(own: Job, rank: int) -> dict[str, object]:
        host, pid, gpu = own.place(rank)
        return {"rank": rank, "host": host, "pid": pid, "cuda_dev": gpu, "nvml_dev": gpu}

    status = {"init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False, "abort_flag": False}
    document = {
        "nccl_version": job.version, "cuda_runtime_version": 12090, "cuda_driver_version": 13000,
        "timestamp": "2026-11-23 02:00:00", "communicators_count": 1 + len(job.more),
        "communicators": [{
            "hash": hex(own.key), "secondary_hash": "0x1:0x2", "size": len(own.reduces), "ranks_count": len(own.here),
            "missing_ranks_count": len(own.gone),
            "ranks": [{**place(own, r), "status": status,
                       "collective_counts": {name: counts[r] for name, counts in own.counts.items()}}
                      for r in own.here],
            "missing_ranks": [{**place(own, r), "status": {"unresponsive": True, "considered_dead": False}}
                              for r in sorted(own.gone)]} for own in (job, *job.more)],
        "ras": {"collection_time_sec": 0.004, "timeouts_count": len(job.gone)}}
    text = json.dumps(document, indent=2) + "\n"
    if job.number() < (2, 29, 2):  # no comma after a missing rank's "nvml_dev"
        head, missing, tail = text.partition('"missing_ranks": [')
        lines = (missing + tail).split("\n")
        lines = [line.removesuffix(",") if '"nvml_dev"' in line and '"status"' in lines[i + 1]
                 and "unresponsive" in lines[i + 2] else line for i, line in enumerate(lines[:-2])] + lines[-2:]
        text = head + "\n".join(lines)
    return text.encode()


def as_text(job: Job) -> bytes:
    """As ``VERBOSE STATUS`` answers."""
    old = job.number() < (2, 26)
    size = len(job.reduces)
    uneven = [(name, counts) for name, counts in job.counts.items() if len({counts[r] for r in job.here}) > 1]
    flaws = ["INCOMPLETE"] * bool(job.gone) + ["MISMATCH"] * bool(uneven)
    lines = [f"NCCL version {job.version} compiled with CUDA 12.9", "CUDA runtime version 12090, driver version 13000",
             "", "Job summary", "===========", "", "  Nodes  Processes         GPUs  Processes     GPUs",
             "(total)   per node  per process    (total)  (total)",
             f"{(size + 7) // 8:>7}  {min(size, 8):>9}  {1:>11}  {size:>9}  {size:>7}",
             "", "Communicators... (0.00s)", "=============", "",
             "Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors",
             "    #  in group  per comm  per node  per comm  in group",
             f"{0:>5}  {1:>8}  {(size + 7) // 8:>8}  {min(size, 8):>8}  {size:>8}  {len(job.here):>8}  "
             f"{'RUNNING':>8}  {','.join(flaws) or 'OK':>6}",
             "", "Errors", "======", ""]
    if job.gone:
        lines += ["INCOMPLETE", f"  Missing communicator data from {len(job.gone)} job process"
                  + "es" * (len(job.gone) > 1)]
        for host, pid, gpu in sorted(map(job.place, job.gone)):
            lines.append(f"  Process {pid} on node {host} managing GPU {gpu}")
        lines.append("")
        lines += [f"#0-0 ({job.key:016x}) INCOMPLETE", f"  Missing communicator data from {len(job.gone)} rank"
                  + "s" * (len(job.gone) > 1)]
        lines += ([f"  The missing rank{'s' * (len(job.gone) > 1)}: {','.join(map(str, sorted(job.gone)))}"] if old else
                  [f"  Rank {r} -- {job.described(r)}" for r in sorted(job.gone)])
        lines.append("")
    lines += ["Warnings", "========", ""]
    if job.gone:
        lines += ["TIMEOUT", "  Encountered 2 communication timeouts while gathering communicator data", ""]
    if uneven:
        lines.append(f"#0-0 ({job.key:016x}) MISMATCH")
    if uneven and job.starting:
        lines += ["  Communicator ranks have different status", f"  {size - 1} ranks have status RUNNING",
                  f"  Rank {job.starting} has status INIT -- {job.described(job.starting)}"]
    for name, counts in uneven:
        lines.append(f"  Communicator ranks have different {'collective' if old else name} operation counts")
        groups = Counter(counts[r] for r in job.here)
        for count, ranks in sorted(groups.items(), key=lambda item: (-item[1], -item[0])):
            did = f"launched up to operation {count}" if count or old else "not launched any operations"
            own = [r for r in job.here if counts[r] == count]
            if ranks > 1:
                lines.append(f"  {ranks} ranks have {did}")
            if ranks == 1:
                lines.append(f"  Rank {own[0]} has {did} -- {job.described(own[0])}")
            elif ranks < size / 2:
                lines += [f"  Rank {r} -- {job.described(r)}" for r in own]
        lines.append("")
    return ("\n".join(lines) + "\n").encode()


@dataclass
class Server:
    """``jobs`` are answered one after the other, the last one again and again. ``way``: "good", or what is wrong:
    "silent" says nothing, "half" ends in the middle of a status, "stalls" after it began, "http" is another program,
    "endless" never stops."""

    jobs: list[Job]
    way: str = "good"
    asked: int = 0

    def answer(self, own: socket.socket) -> None:
        as_json_asked = False
        with own.makefile("rb") as lines:
            for raw in lines:
                if self.way == "silent":
                    continue
                if self.way == "http":
                    own.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    return
                command = raw.decode().strip().upper()
                job = self.jobs[min(self.asked, len(self.jobs) - 1)]
                if command.startswith("CLIENT PROTOCOL "):
                    own.sendall(b"SERVER PROTOCOL 2\n")
                elif command.startswith("TIMEOUT "):
                    own.sendall(b"OK\n")
                elif command == "SET FORMAT JSON" and job.number() >= (2, 28, 7):
                    as_json_asked = True
                    own.sendall(b"OK\n")
                elif command == "SET FORMAT TEXT" and job.number() >= (2, 28, 7):
                    own.sendall(b"OK\n")
                elif command in ("STATUS", "VERBOSE STATUS"):
                    self.asked += 1
                    self.status(own, as_json(job) if as_json_asked else as_text(job))
                    return
                else:
                    own.sendall(f"ERROR: Unknown command {raw.decode().strip()}\n".encode())

    def status(self, own: socket.socket, status: bytes) -> None:
        if self.way == "endless":
            with contextlib.suppress(OSError):
                while True:
                    own.sendall(b"x" * 65536)
        own.sendall(status[:len(status) // 2])
        if self.way == "stalls":
            own.recv(1)  # until the other side gives up
        elif self.way == "good":
            own.sendall(status[len(status) // 2:])


@contextlib.contextmanager
def serving(*jobs: Job, way: str = "good") -> Iterator[tuple[str, Server]]:
    """A server's address until the block ends, and the server."""
    server = Server(list(jobs), way)
    with listening(server.answer) as address:
        yield address, server
