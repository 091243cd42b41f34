"""Metrics served while a command runs: ``gputop export --listen``, and ``--export`` of the monitor and of ``run``."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from ipaddress import ip_address
from typing import TYPE_CHECKING

from gputop.core.errors import GputopError
from gputop.core.extras import install_command
from gputop.text.console import say

if TYPE_CHECKING:
    from gputop.export.openmetrics import Exporter
    from gputop.session.session import Session


def check_export(args: argparse.Namespace) -> None:
    """Check ``--export`` before the first frame. Raises GputopError."""
    if args.export is not None:
        check(args.export)


def exporting(args: argparse.Namespace, session: Session) -> contextlib.AbstractContextManager[object]:
    """Serves the session's figures during the block, where ``--export`` asks for it. Raises GputopError."""
    if args.export is None:
        return contextlib.nullcontext()
    from gputop.export.openmetrics import Exporter

    return serving(Exporter(session), args.export)


@contextlib.contextmanager
def serving(exporter: Exporter, address: tuple[str, int]) -> Iterator[str]:
    """Serve metrics there for the block, which is given the address. Raises GputopError where that cannot be had."""
    from gputop.export.metrics_server import MetricsServer, listen

    server = MetricsServer(exporter, listen(*address))
    with contextlib.closing(server):
        server.start()
        yield server.address


def check(address: tuple[str, int] | None) -> None:
    """Raises GputopError where prometheus_client is not installed; says who can read what is served at ``address``.

    Cheap: nothing is imported.
    """
    from importlib.util import find_spec

    if find_spec("prometheus_client") is None:
        raise GputopError("prometheus_client, which writes the metrics, is not installed", install_command("export"))
    if address is not None and not is_loopback(address[0]):
        say(f"whoever reaches {address[0]} can read the metrics, without a password")


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
