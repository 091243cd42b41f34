"""The monitor in a browser: textual-serve, at an address that only its user knows.

A port of the loopback interface is open to every user and every web page of the machine. So all that is served lies
below a random path, which is printed: without it there is nothing.
"""

from __future__ import annotations

import asyncio
import secrets
import shlex
import socket
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from gputop.core.errors import GputopError
from gputop.core.own_program import child_command
from gputop.launch.inside.gputop_serve import free_port
from gputop.text.console import say

INSTALL = "pip install 'gputop-tf[serve]'"
_TOKEN_BYTES = 24
# The page names a font of Google's: nothing is loaded from elsewhere, and nobody frames it.
_POLICY = ("default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; "
           "img-src 'self' data:; connect-src 'self' ws://{host}; frame-ancestors 'none'")


def serve(options: Sequence[str], host: str, port: int, local: bool) -> int:
    """Serve the monitor with ``options`` at ``host``:``port`` (0: any free port) until ctrl-c.

    ``local``: only this host reaches ``host``. Raises GputopError.
    """
    if find_spec("textual_serve") is None:
        raise GputopError("textual-serve is not installed beside gputop, which shows the monitor in a browser", INSTALL)
    chosen = free_port(port)
    if not chosen:
        raise GputopError(f"port {port} is taken", "Name another with --listen, or 0 for any that is free.")
    try:
        _server(command_of(options), host, chosen, local).serve()
    except OSError as error:
        raise GputopError(f"cannot listen on {host}: {error.strerror or error}", "Is it an address of this host?"
                          ) from None
    return 0


def command_of(options: Sequence[str]) -> str:
    """The command line, for sh, that textual-serve starts for each page."""
    return "exec " + shlex.join(child_command("gputop.launch.web_terminal:main", *options))


def _server(command: str, host: str, port: int, local: bool) -> Any:
    """textual-serve's server below a random path. Imported here: it brings aiohttp."""
    from aiohttp import web
    from textual_serve.server import Server

    class SecretServer(Server):
        def __init__(self) -> None:
            super().__init__(command, host, port, title=f"gputop on {socket.gethostname()}")
            self.token = secrets.token_urlsafe(_TOKEN_BYTES)
            self._connected: set[asyncio.Task[Any]] = set()

        def initialize_logging(self) -> None:
            """Nothing: its logs would hold the path."""

        async def _make_app(self) -> web.Application:
            served = await super()._make_app()
            served.on_response_prepare.append(_add_headers)
            root = web.Application()
            root.add_subapp(f"/{self.token}/", served)
            return root

        async def handle_index(self, request: web.Request) -> Any:
            self.public_url = f"http://{request.host}"  # as the browser has it, behind ssh -L, too
            return await super().handle_index(request)

        async def handle_websocket(self, request: web.Request) -> Any:
            task = asyncio.current_task()
            assert task is not None
            self._connected.add(task)
            try:
                return await super().handle_websocket(request)
            finally:
                self._connected.discard(task)

        async def on_startup(self, app: web.Application) -> None:
            for line in where(host, port, self.token, local):
                say(line)

        async def on_shutdown(self, app: web.Application) -> None:
            for task in self._connected:
                task.cancel()

    return SecretServer()


async def _add_headers(request: Any, response: Any) -> None:
    response.headers["Content-Security-Policy"] = _POLICY.format(host=request.host)
    response.headers["Referrer-Policy"] = "no-referrer"


def where(host: str, port: int, token: str, local: bool) -> list[str]:
    """What to open, and how to reach it from another machine."""
    every = host in ("0.0.0.0", "::")
    shown = socket.gethostname() if every else f"[{host}]" if ":" in host else host
    lines = [f"the monitor is at http://{shown}:{port}/{token}/ for everyone who has this address; ctrl-c ends it"]
    if local:
        lines.append(f"from another machine, first: ssh -L {port}:{shown}:{port} {socket.gethostname()}")
    return lines

