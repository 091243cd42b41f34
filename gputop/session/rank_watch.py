"""Asks NCCL's RAS which rank did not come, while the live figures look like a hang.

It has a thread of its own: a status waits for the slowest rank of the job. A job that looks well is not asked, and
what asks is imported when it is needed: the first frame does without.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from msgspec.structs import replace

from gputop.core.errors import GputopError
from gputop.core.findings import Finding
from gputop.core.samples import NodeSample
from gputop.ranks.model import RasAnswer, RasReport, unchanged
from gputop.ranks.processes import local_addresses

# Findings on GPUs that wait, or do little without a cause that is known.
SIGNS = frozenset({"collective_hang", "spinning", "idle_gpu", "low_sm_active", "hardware_error"})
PERIOD_S = 20.0  # each rank of the job answers a status
_MAX_PROCESSES = 64  # whose environment is read


def _ask(pids: Iterable[int], hosts: frozenset[str]) -> RasAnswer:
    from gputop.ranks.nccl_ras import ask_job
    from gputop.session.ras_worker import read_in_worker

    return ask_job(pids, hosts, read=read_in_worker)


class RankWatch:
    """Keeps what RAS has told since the figures began to look like a hang: :attr:`report`, None where they do not."""

    def __init__(self, ask: Callable[[Iterable[int], frozenset[str]], RasAnswer] = _ask,
                 hosts: Callable[[], frozenset[str]] = local_addresses,
                 earlier: Callable[[], RasAnswer | None] = lambda: None) -> None:
        """``ask`` and ``hosts``, this node's addresses, are others in the demo. ``earlier`` is what was answered before
        gputop started: only the demo has it."""
        self.report: RasReport | None = None
        self._ask, self._hosts, self._earlier = ask, hosts, earlier
        self._pids: tuple[int, ...] = ()
        self._hangs = False  # by the newest findings
        self._wake, self._closing = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def check(self, findings: Iterable[Finding], sample: NodeSample) -> None:
        """Ask from now on, or no longer, by what the live rules have just found. Returns at once."""
        self._hangs = not SIGNS.isdisjoint({f.id for f in findings})
        if not self._hangs:
            self._wake.clear()
            self.report = None
            return
        self._pids = tuple(p.local_pid or p.pid for p in sample.processes[:_MAX_PROCESSES])
        self._wake.set()
        if self._thread is None and not self._closing.is_set():
            self._thread = threading.Thread(target=self._run, name="gputop-ranks", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._wake.set()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._wake.wait()
            if not self._closing.is_set():
                report = self._next(self.report)
                self.report = report if self._hangs else None
            self._closing.wait(PERIOD_S)

    def _next(self, before: RasReport | None) -> RasReport:
        try:
            hosts = self._hosts()
            answer = self._ask(self._pids, hosts)
            if before is None and (first := self._earlier()) is not None:
                before = RasReport(first, first, hosts=hosts)
        except GputopError as error:
            return RasReport(problem=f"{error.message}. {error.fix}".strip())
        except Exception as error:  # noqa: BLE001  thread boundary: the next answer may be readable
            return RasReport(problem=f"reading NCCL's answer failed with an internal error in gputop: {error!r}")
        return following(before, answer, hosts)


def following(before: RasReport | None, answer: RasAnswer, hosts: frozenset[str]) -> RasReport:
    if before is None or before.first is None or not unchanged(before.first, answer):
        return RasReport(answer, answer, hosts=hosts)
    return replace(before, last=answer)
