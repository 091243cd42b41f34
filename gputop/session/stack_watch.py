"""The Python stacks of jobs on this node, sampled while they are captured."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from msgspec import Struct

from gputop.core.errors import GputopError

if TYPE_CHECKING:
    from gputop.core.host_stacks import StackSamples
    from gputop.profiler.recording import Progress
    from gputop.ranks.stack_sampler import StackSampler

SimulatedStacks = Callable[[float, float], "StackSamples | None"]  # between two Unix times
_START_S = 1.0
_BESIDES_S = 60.0  # of a capture: its probe, and what is received in between
MAX_PROCESSES = 8  # each takes some 4% of a CPU


def simulated_stacks(source: object) -> SimulatedStacks | None:
    """The stacks of the demo's job; None for a source that is not simulated."""
    if not getattr(source, "simulated", False):
        return None
    from gputop.sources.simulated import SimulatedSource

    return source.python_stacks if isinstance(source, SimulatedSource) else None


class StackChoice(Struct, frozen=True):
    """Choice of whose stacks are sampled: with ``wanted`` None those of gputop's own user and of the processes
    ``agreed`` (PIDs), True those of other users, too, False nobody's. ``simulated``: the stacks of the demo's job,
    whose server is this process."""

    wanted: bool | None = None
    agreed: Collection[int] = ()
    simulated: SimulatedStacks | None = None


OWN_STACKS = StackChoice()


class StackWatch:
    """Receives the progress of a capture and hands it on; its jobs' stacks are sampled while they are recorded."""

    def __init__(self, pids: Mapping[str, int | None], choice: StackChoice, seconds: float,
                 report: Callable[[Progress], None]) -> None:
        """``pids``: the processes to sample, by the addresses of their servers; None: not known. At most ``seconds``
        are recorded: py-spy ends soon after these if gputop is killed."""
        self._pids, self._choice, self._seconds, self._report = pids, choice, seconds, report
        self._samplers: dict[str, StackSampler] = {}
        self._reasons: dict[str, str] = {}
        self._began = choice.wanted is False
        self._demo: str | None = None  # the address of the demo's server
        self._begin_s = self._end_s = 0.0

    def __enter__(self) -> StackWatch:
        return self

    def __exit__(self, *_: object) -> None:
        for sampler in self._samplers.values():
            sampler.discard()
        self._samplers = {}

    def __call__(self, progress: Progress) -> None:
        if not self._began:
            self._began = True
            self._begin()
        if progress.phase in ("receiving", "saving") and not progress.more:
            self._end_s = self._end_s or time.time()
            for sampler in self._samplers.values():
                sampler.stop()
        self._report(progress)

    def samples(self) -> dict[str, StackSamples | str]:
        """Samples by address, or why there are none. Waits for py-spy to write them."""
        out: dict[str, StackSamples | str] = dict(self._reasons)
        for sampler in self._samplers.values():
            sampler.stop()
        if self._demo is not None and self._choice.simulated is not None:
            demo = self._choice.simulated(self._begin_s, self._end_s or time.time())
            out |= {} if demo is None else {self._demo: demo}
        for address in list(self._samplers):
            try:
                out[address] = self._samplers.pop(address).samples()
            except GputopError as error:
                out[address] = error.in_one_line
        return out

    def _begin(self) -> None:
        from gputop.ranks.stack_sampler import StackSampler

        self._begin_s = time.time()
        for address, pid in self._pids.items():
            if pid == os.getpid():
                self._demo = address
                continue
            if pid is None:
                self._reasons[address] = "the job's process is not on this node or not visible from here"
            elif len(self._samplers) == MAX_PROCESSES:
                self._reasons[address] = f"gputop samples stacks of at most {MAX_PROCESSES} processes"
            else:
                try:
                    self._refuse_unasked(pid)
                    self._samplers[address] = StackSampler(pid, seconds=self._seconds + _BESIDES_S)
                except GputopError as error:
                    self._reasons[address] = error.in_one_line
        until_s = time.monotonic() + _START_S
        for sampler in self._samplers.values():  # the first gaps of the trace are to have samples, too
            sampler.wait_for_samples(max(0.0, until_s - time.monotonic()))

    def _refuse_unasked(self, pid: int) -> None:
        from gputop.core.proc import user_name
        from gputop.ranks.stacks import others_of

        uid = others_of([pid]).get(pid)
        if uid is not None and not self._choice.wanted and pid not in self._choice.agreed:
            raise GputopError(f"process {pid} belongs to {user_name(uid)}, and gputop needs your permission to read "
                              "that user's stacks", "To allow this: --stacks")
