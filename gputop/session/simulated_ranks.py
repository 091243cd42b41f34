"""Answers of NCCL's RAS and of py-spy for the demo's job that hangs. Its processes do not exist."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from gputop.core.errors import GputopError
from gputop.ranks.model import Communicator, Level, Rank, RasAnswer
from gputop.ranks.stacks import Frame, ProcessStacks, ThreadStack
from gputop.simulation.loop import ABSENT_RANK, ASKED_NS, HangingLoop
from gputop.simulation.node import COMMAND_BY_RANK
from gputop.simulation.scenarios import GPU_COUNT
from gputop.sources.simulated import SimulatedSource

_HOSTS = frozenset({"10.0.0.7"})
_NCCL = "2.28.9, SIMULATED"
_EAGER = "/usr/lib/python3/dist-packages/tensorflow/python/eager"
_STEP = (Frame("fit", "/home/demo/train.py", 131), Frame("<module>", "/home/demo/train.py", 188))
_WAITS = (Frame("quick_execute", f"{_EAGER}/execute.py", 53), Frame("call_flat", f"{_EAGER}/polymorphic.py", 1322),
          Frame("__call__", f"{_EAGER}/def_function.py", 833), Frame("train_step", "/home/demo/train.py", 97), *_STEP)
_LOADS = (Frame("read_shard", "/home/demo/dataset.py", 41), Frame("next_batch", "/home/demo/dataset.py", 66),
          Frame("train_step", "/home/demo/train.py", 92), *_STEP)
_NATIVE = (Frame("pthread_cond_wait", "libc.so.6", 0, True),
           Frame("tensorflow::Notification::WaitForNotification", "libtensorflow_framework.so.2", 0, True))
_NATIVE_READ = (Frame("read", "libc.so.6", 0, True),)


class SimulatedRanks:
    """Ranks of the job that runs now on a simulated node."""

    def __init__(self, source: SimulatedSource) -> None:
        self._source = source

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes by rank; none where the job does not hang."""
        hanging = self._source.hanging
        return tuple(hanging[1]) if hanging is not None else ()

    def hosts(self) -> frozenset[str]:
        return _HOSTS

    def ask(self, pids: Iterable[int], hosts: frozenset[str]) -> RasAnswer:
        """Answer as RAS does. Raises GputopError where the job has none."""
        hanging = self._source.hanging
        if hanging is None:
            raise GputopError("the simulated job has no NCCL RAS", "To see simulated RAS data: gputop --demo hang")
        return self._answer(hanging, time.time())

    def earlier(self) -> RasAnswer | None:
        """The first answer to a gputop that had run since before the hang; its samples are made up likewise. None where
        the job does not hang, or not yet for that long."""
        hanging, since_s = self._source.hanging, self._source.hangs_since_s
        if hanging is None or since_s is None or (asked_s := since_s + ASKED_NS / 1e9) > time.time():
            return None
        return self._answer(hanging, asked_s)

    @staticmethod
    def _answer(hanging: tuple[HangingLoop, Sequence[int]], time_s: float) -> RasAnswer:
        loop, pids = hanging
        (host,) = _HOSTS
        ranks = tuple(Rank(number, host, pid, number) for number, pid in enumerate(pids))
        late = tuple(rank for rank in ranks if rank.number == ABSENT_RANK)
        done = loop.steps_done * loop.scenario.job.comm_count
        levels = (Level(done, 1, late), Level(done + 1, len(ranks) - 1, tuple(r for r in ranks if r not in late)))
        return RasAnswer(time_s, _NCCL, (Communicator("simulated", GPU_COUNT, {"AllReduce": levels}),), True)

    def stacks(self, pids: Iterable[int], native: bool) -> tuple[ProcessStacks, ...]:
        """Stacks as py-spy reads them."""
        rank_of = {pid: rank for rank, pid in enumerate(self.pids)}
        return tuple(self._stack(pid, rank_of[pid], native) for pid in pids if pid in rank_of)

    @staticmethod
    def _stack(pid: int, rank: int, native: bool) -> ProcessStacks:
        absent = rank == ABSENT_RANK
        frames = ((_NATIVE_READ if absent else _NATIVE) if native else ()) + (_LOADS if absent else _WAITS)
        return ProcessStacks(pid, f"rank {rank}", f"{COMMAND_BY_RANK} {rank}",
                             (ThreadStack("MainThread", True, not absent, frames),))
