"""A process that answers as PyTorch's debug server does, or as it should not: a thread of its name, and HTTP on all
interfaces or at a UNIX socket. It is run as a script, with the answers by path as JSON."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

_PR_SET_NAME = 15  # linux/prctl.h
NCCL, OTHERS = "/handler/dump_nccl_trace_json?includecollectives=true&onlyactive=false", "/handler/fr_trace_json"
Answer = Mapping[str, Any]  # status, body, bytes (so many more), headers, drips (a byte now and then, for ever)


def names(*handlers: str) -> Answer:
    return {"body": json.dumps(handlers)}


def recorder(document: Mapping[str, Any], path: str = NCCL) -> dict[str, list[Answer]]:
    """The answers of a server whose recorder holds this all the time. PyTorch's JSON has no frames."""
    if "entries" in document:
        document = {**document, "entries": [{key: value for key, value in entry.items() if key != "frames"}
                                            for entry in document["entries"]]}
    handler = path.removeprefix("/handler/").partition("?")[0]
    return {"/handler/": [names("ping", handler)], path: [{"body": json.dumps(document)}]}


@contextmanager
def serving(*processes: tuple[Mapping[str, str], Mapping[str, Sequence[Answer]] | None]) -> Iterator[list[int]]:
    """The PIDs of processes with this in their environment and these answers by path, one after the other, the last one
    again and again; None: no server runs. With TORCH_WORKER_SERVER_SOCKET it listens there."""
    started = []
    try:
        for environ, answers in processes:
            started.append(subprocess.Popen([sys.executable, __file__], env=dict(environ), stdin=subprocess.PIPE,
                                            stdout=subprocess.PIPE))
            pipe = started[-1].stdin
            assert pipe is not None
            pipe.write(json.dumps(answers).encode() + b"\n")
            pipe.flush()
        for process in started:
            assert process.stdout is not None and process.stdout.readline()
        yield [process.pid for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()


class _Handler(BaseHTTPRequestHandler):
    answers: Mapping[str, list[Answer]]

    def do_GET(self) -> None:
        left = self.answers.get(self.path, [{"status": 404}])
        answer = left.pop(0) if len(left) > 1 else left[0]
        body = answer.get("body", "").encode() + b" " * answer.get("bytes", 0)
        self.send_response(answer.get("status", 200))
        for name, value in answer.get("headers", {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) + 1000 * bool(answer.get("drips"))))
        self.end_headers()
        self.wfile.write(body)
        while answer.get("drips"):
            self.wfile.write(b" ")
            self.wfile.flush()
            time.sleep(0.01)

    do_POST = do_GET

    def log_message(self, *ignored: object) -> None:
        pass

    def address_string(self) -> str:
        return ""


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True
    request_queue_size = 5

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, _ = self.socket.accept()
        return connection, ("", 0)


def _main() -> None:
    answers = json.loads(sys.stdin.readline())
    if answers is not None:
        _Handler.answers = answers
        path = os.environ.get("TORCH_WORKER_SERVER_SOCKET")
        _Server.address_family = socket.AF_UNIX if path else socket.AF_INET6
        server = _Server(path or ("::", 0), _Handler)  # type: ignore[arg-type]

        def serve() -> None:
            ctypes.CDLL(None).prctl(_PR_SET_NAME, b"pt_workerserver")
            print("serves", flush=True)
            server.serve_forever()

        threading.Thread(target=serve, daemon=True).start()
    else:
        print("serves not", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    _main()
