"""A process that does what kineto does in daemon mode, or what a hostile one does instead: ``fake_client.py DIR MODE``.

It polls twenty times a second and says "ready" once its socket is bound. Its guard says of each recording that it is
ready for it. Modes:
good; unguarded; profiling, cycles, ending (what its guard says); ends (says so once it was ready, and never polls);
drops (the first two configs); other-pids (claims to be PID 1); silent (never polls); busy (polls, takes nothing);
no-file; link, hard-link, pipe, folder (in the trace's place); sparse (2 TB); large (the trace, then 64 MB of zeros);
bounded (its guard can end a recording at a number of events); full (likewise, and it does so);
dies (once it has the config); aborts (likewise); abstract (its name is).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
import threading
import time
import uuid
from pathlib import Path

PERIOD_S = 0.05
rest_s = 0.0  # of the end of the recording, without an event


def trace(seconds: float, device: bool = False) -> str:
    """As kineto lays it out: a step of ten milliseconds, with an operation in it."""
    events = []
    for step in range(max(2, round(100 * seconds))):
        begin = 1e12 + 1e4 * step
        events += [_event("user_annotation", "Optimizer.step#SGD.step", begin, 9000.0),
                   _event("kernel" if device else "cpu_op", "aten::addmm", begin + 10, 100.0)]
    head = '{\n    "schemaVersion": 1,\n    "baseTimeNanoseconds": 1790857026000000000,\n    "traceEvents": [\n'
    return head + ",\n".join(events) + f'\n  ],"traceName": {json.dumps("x")} }}'


def _event(category: str, name: str, begin_us: float, duration_us: float) -> str:
    return (f'  {{\n    "ph": "X",\n    "cat": "{category}",\n    "name": "{name}",\n    "pid": {os.getpid()},\n'
            f'    "tid": {os.getpid()},\n    "ts": {begin_us},\n    "dur": {duration_us}\n    ,\n'
            '    "args": {"x": 0}\n  }')


def main(folder: Path, mode: str) -> None:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    name = f"dynoconfigclient{uuid.uuid4()}"
    client.bind(f"\0{name}\0" if mode == "abstract" else str(folder / name))
    client.settimeout(PERIOD_S)
    if mode not in ("abstract", "unguarded"):
        guard = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        guard.bind(str(folder / f"gputop-guard-{os.getpid()}"))
        threading.Thread(target=answer_guard, args=(folder, guard, mode), daemon=True).start()
    print("ready", flush=True)
    if mode in ("silent", "ends"):
        signal.pause()
    dropped = 0
    pids = (1, 2) if mode == "other-pids" else (os.getpid(), os.getppid())
    while True:
        body = struct.pack("=iiq2i", 1 if mode == "busy" else 3, 2, 0, *pids)
        try:
            client.sendto(struct.pack("=Q32s", len(body), b"req") + body, str(folder / "dynolog"))
            answer = client.recv(4096)[40:].decode()
        except OSError:
            answer = ""
        if answer and mode == "drops" and dropped < 2:
            dropped += 1
        elif answer:
            write(folder, mode, dict(line.partition("=")[::2] for line in answer.split("\n")))
        time.sleep(PERIOD_S)


def answer_guard(folder: Path, guard: socket.socket, mode: str) -> None:
    global rest_s
    while True:
        request = json.loads(guard.recv(4096))
        if "token" in request:  # and not the recording's end
            rest_s = request["rest_s"]
            states = ["ready", "ending"] if mode == "ends" else ["ready", "full"] if mode == "full" else [
                mode if mode in ("profiling", "cycles", "ending") else "ready"]
            details = {"ready": "ends_s most_events" * (mode in ("bounded", "full")), "cycles": "12 0.300",
                       "full": "0.100"}
            for state in states:
                report = {"token": request["token"], "state": state, "detail": details.get(state, "")}
                body = json.dumps(report).encode()
                guard.sendto(struct.pack("=Q32s", len(body), b"gputop") + body, str(folder / "dynolog"))


def write(folder: Path, mode: str, config: dict[str, str]) -> None:
    seconds = int(config["ACTIVITIES_DURATION_MSECS"]) / 1000
    time.sleep(max(0.0, int(config.get("PROFILE_START_TIME", "0")) / 1000 - time.time()) + seconds)
    asked = Path(config["ACTIVITIES_LOG_FILE"])
    file = asked.with_name(f"{asked.stem}_{os.getpid()}{asked.suffix}")
    if mode == "dies":
        os._exit(1)
    elif mode == "aborts":
        os.abort()
    elif mode == "no-file":
        return
    elif mode == "link":
        file.symlink_to("/etc/passwd")
    elif mode == "hard-link":
        os.link(folder / "secret", file)
    elif mode == "pipe":
        os.mkfifo(file)
    elif mode == "folder":
        file.mkdir()
    elif mode == "sparse":
        partial = file.with_name(file.name + ".tmp")
        partial.touch()
        os.truncate(partial, 2 << 40)
        partial.rename(file)  # whole, as gputop takes it at once
    else:
        partial = file.with_name(file.name + ".tmp")
        partial.write_text(trace(seconds - rest_s))
        if mode == "large":
            os.truncate(partial, 64 << 20)
        partial.rename(file)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
