"""A port of this process that somebody answers, for servers that tests write themselves."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterator

# Below those that the kernel gives to connections and to servers that want any; each process of tests begins elsewhere.
_PORTS = itertools.count(os.getpid() * 997)


def free_port() -> int:
    """A port of this machine that nobody listens on, and that nobody else is given meanwhile."""
    for number in _PORTS:
        port = 10_000 + number % 18_000
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
    raise AssertionError


@contextlib.contextmanager
def listening(answer: Callable[[socket.socket], object], *, together: bool = True, host: str = "127.0.0.1",
              port: int = 0) -> Iterator[str]:
    """The address of a port whose connections ``answer`` is given until the block ends: each in a thread of its own
    where several are to be answered ``together``, else one after the other. Raises OSError where it cannot be had.

    Nobody accepts any more when the port is closed: a thread that did would take the connections of the next one,
    which has the same descriptor.
    """
    listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)

    def respond(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            answer(connection)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                if together:
                    threading.Thread(target=respond, args=(connection,), daemon=True).start()
                else:
                    respond(connection)

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield "{}:{}".format(*listener.getsockname())
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        listener.close()
