"""Makes the live source that the options select. Nothing is loaded or contacted before it is opened."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gputop.core.errors import EXIT_USAGE, GputopError
from gputop.sources.base import GpuProbe, HostProbe, LiveSource, Source

if TYPE_CHECKING:
    from gputop.sources.dcgm.client import DcgmClient


class GpusOrHost(LiveSource):
    """The GPUs of ``source``; where they cannot be opened and ``host_is_enough``, the host alone.

    Satisfies :class:`gputop.sources.base.Source`. Wrong usage is an error in any case.
    """

    def __init__(self, source: Source, host_is_enough: Callable[[], bool]) -> None:
        self._source = source
        self._host_is_enough = host_is_enough
        self.error: GputopError | None = None  # why there are no GPUs

    @property
    def label(self) -> str:
        """Label; without GPUs why, and how there would be some."""
        return self._source.label if self.error is None else f"{self.error.message} {self.error.fix}"

    def open(self) -> None:
        if self.error is not None:
            return
        try:
            self._source.open()
        except GputopError as error:
            if error.exit_code == EXIT_USAGE:
                raise
            if not self._host_is_enough():
                raise GputopError(error.message, f"{error.fix} To watch and profile a job without GPUs on this "
                                                 "machine: `gputop --attach HOST:PORT` or `gputop run -- python "
                                                 "train.py`.", error.exit_code) from None
            self._source.close()
            self.error = error

    def watch_processes(self, pids: Collection[int]) -> None:
        """Have this node's probe report these processes, which hold no GPU."""
        from gputop.sources.host.source import PsutilHost  # loaded with the first sample

        if isinstance(host := self.host, PsutilHost):
            host.watched_pids = tuple(pids)

    @property
    def gpus(self) -> Sequence[GpuProbe]:
        return self._source.gpus if self.error is None else ()

    @property
    def gpus_present(self) -> int | None:
        return self._source.gpus_present if self.error is None else None

    @property
    def host(self) -> HostProbe:
        return self._source.host if self.error is None else self.own_host()

    def close(self) -> None:
        if self.error is None:
            self._source.close()


def live_source(kind: str, gpus: Sequence[str], interval_s: float, *, dcgm: str | None = None,
                dcgm_bindings: Path | None = None, dcgm_watch: bool = False) -> Source:
    """The source ``kind`` ("auto", "nvml", "dcgm") as ``--dcgm…`` say. Raises GputopError (wrong usage)."""
    if kind == "nvml" and (dcgm or dcgm_bindings or dcgm_watch):
        raise GputopError("--source nvml does not use DCGM, so it conflicts with --dcgm, --dcgm-bindings and "
                          "--dcgm-watch.", "Remove --source: DCGM then provides what the driver lacks.", EXIT_USAGE)
    if dcgm is not None:
        from gputop.sources.dcgm.connection import parse_address

        parse_address(dcgm)  # raises for wrong usage before anything starts

    def connect() -> DcgmClient:
        from gputop.sources.dcgm.client import DcgmClient
        from gputop.sources.dcgm.connection import DEFAULT_ADDRESS, parse_address

        return DcgmClient(parse_address(dcgm or DEFAULT_ADDRESS), bindings=dcgm_bindings, interval_s=interval_s)

    if kind == "dcgm":
        from gputop.sources.dcgm.source import DcgmSource

        return DcgmSource(connect(), gpus, watch=dcgm_watch)
    from gputop.sources.nvml.source import NvmlSource

    if kind == "nvml":
        return NvmlSource(gpus)
    from gputop.sources.dcgm.fallback import NvmlWithDcgmFallback

    return NvmlWithDcgmFallback(NvmlSource(gpus), connect, watch=dcgm_watch)
