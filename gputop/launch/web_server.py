"""The monitor in a browser: textual-serve, at an address that only its user knows.

A port of the loopback interface is open to every user and every web page of the machine. So all that is served lies
below a random path, which is printed: without it there is nothing. A browser that a page of another site leads here
names that site, as the server's name (DNS rebinding) or as the origin of its request: both are refused. A connection
that does not ask for anything below that path within seconds is closed, and there are few of them.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shlex
import signal
import socket
from collections.abc import Awaitable, Callable, Sequence
from importlib.util import find_spec
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from gputop.core.errors import GputopError
from gputop.core.extras import install_command
from gputop.core.own_program import child_command
from gputop.launch.inside.gputop_serve import free_port
from gputop.text.console import say

INSTALL = install_command("serve")
MAX_CONNECTIONS = 64
REQUEST_S = 10.0  # from the connection to the end of a request for what is served
_IDLE_S = 30.0  # of a connection between two requests
_BACKLOG = 32  # as many are taken at once
_EVERY = ("0.0.0.0", "::")
_NOT_ADDRESSED = "gputop serve has another name: open the address that it printed, or name this one with --listen\n"
_TOKEN_BYTES = 24
# The page names a font of Google's: nothing is loaded from elsewhere, and nobody frames it.
_POLICY = ("default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; "
           "img-src 'self' data:; connect-src 'self' ws://{host}; frame-ancestors 'none'")


def serve(options: Sequence[str], host: str, port: int, local: bool) -> int:
    """Serve the monitor with ``options`` at ``host``:``port`` (0: any free port) until ctrl-c.

    ``local``: only this host reaches ``host``. Raises GputopError.
    """
    if find_spec("textual_serve") is None:
        raise GputopError("textual-serve, which shows the monitor in a browser, is not installed in gputop's "
                          "environment", INSTALL)
    chosen = free_port(port)
    if not chosen:
        raise GputopError(f"port {port} is taken", "Choose another port with --listen, or 0 for any free port.")
    try:
        _server(command_of(options), host, chosen, local).serve()
    except OSError as error:
        raise GputopError(f"cannot listen on {host}: {error.strerror or error}", "Is it an address of this host?"
                          ) from None
    return 0


def command_of(options: Sequence[str]) -> str:
    """The command line, for sh, that textual-serve starts for each page."""
    return "exec " + shlex.join(child_command("gputop.launch.web_terminal:main", *options))


class Connections:
    """The connections to a server: those that have not asked for what is served are few, and soon gone."""

    def __init__(self) -> None:
        self._open: set[object] = set()
        self._silent: dict[object, asyncio.Transport] = {}  # that have not asked yet, the oldest first

    def opened(self, connection: object, transport: asyncio.Transport) -> None:
        self._open.add(connection)
        self._silent[connection] = transport
        asyncio.get_running_loop().call_later(REQUEST_S, self._end, connection)
        if len(self._open) > MAX_CONNECTIONS:
            self._end(next(iter(self._silent)))

    def asked(self, connection: object) -> None:
        """Note that the client has asked for what is served: whoever does so knows the path."""
        self._silent.pop(connection, None)

    def closed(self, connection: object) -> None:
        self._open.discard(connection)
        self._silent.pop(connection, None)

    def _end(self, connection: object) -> None:
        if (transport := self._silent.pop(connection, None)) is not None:
            transport.abort()


def is_addressed(hosts: Sequence[str], origins: Sequence[str], names: frozenset[str], *, every: bool) -> bool:
    """Return whether a request with these Host and Origin fields comes from a page that this server itself has served,
    or from none: the server's name is one of ``names``, or (``every``) any IP address, and the origin is the server."""
    if len(hosts) != 1 or len(origins) > 1:
        return False
    try:
        name = (urlsplit(f"//{hosts[0]}").hostname or "").removesuffix(".")
        if any(urlsplit(origin).scheme not in ("http", "https")
               or urlsplit(origin).netloc.lower() != hosts[0].lower() for origin in origins):
            return False
    except ValueError:
        return False
    return name in names or (every and _is_ip_address(name))


def _is_ip_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def names_of(host: str) -> frozenset[str]:
    """Names that the server at ``host`` may be called by: its address, this machine's name, and the loopback's, which
    it has behind ssh -L."""
    hostname = socket.gethostname().lower()
    return frozenset((host.lower(), hostname, hostname.partition(".")[0], "localhost", "127.0.0.1", "::1"))


def _server(command: str, host: str, port: int, local: bool) -> Any:
    """textual-serve's server below a random path. Imported here: it brings aiohttp."""
    from aiohttp import web
    from textual_serve.server import Server

    connections = Connections()

    class Connection(web.RequestHandler):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            connections.opened(self, transport)

        def connection_lost(self, exc: BaseException | None) -> None:
            super().connection_lost(exc)
            connections.closed(self)

    class SecretServer(Server):
        def __init__(self) -> None:
            super().__init__(command, host, port, title=f"gputop on {socket.gethostname()}")
            self.token = secrets.token_urlsafe(_TOKEN_BYTES)
            self._connected: set[asyncio.Task[Any]] = set()
            self._names, self._every = names_of(host), host in _EVERY

        def serve(self, debug: bool = False) -> None:
            # What libraries log would hold the path, and a client could fill a disk with their tracebacks.
            logging.getLogger().addHandler(logging.NullHandler())
            asyncio.run(self._serve())

        async def _serve(self) -> None:
            loop, ended = asyncio.get_running_loop(), asyncio.Event()
            loop.set_exception_handler(lambda *_: None)
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, ended.set)
            runner = web.AppRunner(await self._make_app(), handle_signals=False)
            await runner.setup()
            manager: Any = runner.server
            settings: dict[str, Any] = {"access_log": None, "keepalive_timeout": _IDLE_S}
            try:
                listening = await loop.create_server(lambda: Connection(manager, loop=loop, **settings), host, port,
                                                     backlog=_BACKLOG)
                for line in where(host, port, self.token, local):
                    say(line)
                await ended.wait()
                listening.close()
            finally:
                await runner.cleanup()

        async def _make_app(self) -> web.Application:
            served = await super()._make_app()
            served.on_response_prepare.append(_add_headers)
            root = web.Application(middlewares=[self._admit])
            root.add_subapp(f"/{self.token}/", served)
            return root

        @web.middleware
        async def _admit(self, request: web.Request, handler: Callable[[web.Request], Awaitable[Any]]) -> Any:
            if not is_addressed(request.headers.getall("Host", []), request.headers.getall("Origin", []), self._names,
                                every=self._every):
                refused = web.Response(status=403, text=_NOT_ADDRESSED)
            elif not self._knows_path(request.path):
                refused = web.Response(status=404, text="404: Not Found")
            else:
                connections.asked(request.protocol)
                return await handler(request)
            refused.force_close()
            return refused

        def _knows_path(self, path: str) -> bool:
            """Return whether a request knows the path; how long that takes does not tell how much of it is right."""
            parts = path.split("/", 2)
            return len(parts) == 3 and secrets.compare_digest(parts[1].encode("utf-8", "replace"), self.token.encode())

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
            """Nothing: it prints a banner."""

        async def on_shutdown(self, app: web.Application) -> None:
            for task in self._connected:
                task.cancel()

    return SecretServer()


async def _add_headers(request: Any, response: Any) -> None:
    response.headers["Content-Security-Policy"] = _POLICY.format(host=request.host)
    response.headers["Referrer-Policy"] = "no-referrer"


def where(host: str, port: int, token: str, local: bool) -> list[str]:
    """Lines on what to open, and how to reach it from another machine."""
    every = host in _EVERY
    shown = socket.gethostname() if every else f"[{host}]" if ":" in host else host
    lines = [f"the monitor is at http://{shown}:{port}/{token}/ for everyone who has this address; ctrl-c ends it"]
    if local:
        lines.append(f"from another machine, first: ssh -L {port}:{shown}:{port} {socket.gethostname()}")
    return lines

