"""Makes the live source that the options select. Nothing is loaded or contacted here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gputop.core.errors import EXIT_USAGE, GputopError
from gputop.sources.base import Source

if TYPE_CHECKING:
    from gputop.sources.dcgm.client import DcgmClient


def live_source(kind: str, gpus: Sequence[str], interval_s: float, *, dcgm: str | None = None,
                dcgm_bindings: Path | None = None, dcgm_watch: bool = False) -> Source:
    """The source ``kind`` ("auto", "nvml", "dcgm") as ``--dcgm…`` say. Raises GputopError (wrong usage)."""
    if kind == "nvml" and (dcgm or dcgm_bindings or dcgm_watch):
        raise GputopError("--source nvml does without DCGM: --dcgm, --dcgm-bindings and --dcgm-watch contradict it.",
                          "Leave --source out to have DCGM give what the driver lacks.", EXIT_USAGE)
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
