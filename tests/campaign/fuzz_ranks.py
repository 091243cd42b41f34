"""What the campaign attacks of the ranks of a job: the dumps of PyTorch's flight recorder and what gputop on another
node says of a capture."""

from __future__ import annotations

import io
import json
import pickle
import shutil
from pathlib import Path
from unittest import mock

from gputop.core.codec import to_document
from gputop.core.errors import GputopError
from gputop.profiler.capture.facts import _worker
from gputop.profiler.capture.request import CaptureRequest
from gputop.ranks.desync import lines
from gputop.ranks.flight_recorder import Dumps, read_dump
from gputop.ranks.stacks_document import StacksDumps
from gputop.session.other_nodes import OtherNodes, Start, _Node
from gputop.text import console
from tests.campaign.target import Target
from tests.ranks.flight_dumps import NOW_S, document, dump, entry, history

_MOST_CPU_S, _MOST_BYTES = 10.0, 150 << 20
_TRACE = b'{"traceEvents": []}'
_READY = b'{"schema":"gputop.ranks/1","seconds":0.2,"lead_s":0.0,"time_s":1700000000.0}\n'
_SHARED = {**entry(3), "input_sizes": [[2] * 8] * 50, "frames": [{"filename": "a.py", "line": 7}] * 40}


def _dump(_: Path, data: bytes) -> None:
    """Read, compared with that of another rank, and told in both forms."""
    read = read_dump(data, 0, "dump 0", NOW_S)
    job = Dumps((read, dump(1, history(3))))
    for line in lines((job,), NOW_S + 60):
        assert line.isprintable()
    json.dumps(to_document(StacksDumps.of(job)), allow_nan=False)


def _documents() -> list[object]:
    return [document(history(2, then=[entry(3, state="scheduled")]), groups={"1": [0]}),
            document([_SHARED] * 30, groups={str(n): [0, 1] for n in range(1, 9)})]


def _node(folder: Path, data: bytes) -> None:
    """A node's part of the conversation, which ends as it does when the connection breaks off."""
    logs, run = folder / "logs", folder / "logs" / "plugins" / "profile" / "run"
    shutil.rmtree(logs, ignore_errors=True)
    run.mkdir(parents=True)
    others = OtherNodes(["n2"], "n1:29500", "gputop", mock.Mock())
    node = _Node("n2")
    node.start = Start(NOW_S, 0.2, NOW_S, 0.0)
    node.answered.set()
    others._run = run
    others._collecting.set()
    try:
        agent = mock.Mock(to_node=io.BytesIO(), from_node=io.BufferedReader(io.BytesIO(data)))  # type: ignore[arg-type]
        others._converse(node, agent, CaptureRequest(0.2, logs))
    except (OSError, ValueError) as error:  # as the thread of the conversation takes them
        raise GputopError(str(error)) from None
    finally:
        left = {path.name for path in run.iterdir()}
        assert all(name.endswith(".pt.trace.json") for name in left), left
        for outcome in node.outcomes:
            assert outcome.address.isprintable() and outcome.name.isprintable()
            json.dumps(to_document(_worker(outcome)), allow_nan=False)
            console.say(console.one_line(outcome.error.message if outcome.error is not None else outcome.name))


def _said(ranks: list[dict[str, object]], traces: bytes) -> bytes:
    last = json.dumps({"schema": "gputop.ranks/1", "received_s": 1700000001.0, "ranks": ranks}).encode()
    return b"Welcome\n" + _READY + last + b"\n" + traces


TARGETS = tuple(Target(*about, most_cpu_s=_MOST_CPU_S, most_bytes=_MOST_BYTES) for about in (
    ("flight-pickle", "bytes", lambda _: [pickle.dumps(one, protocol) for one in _documents() for protocol in (2, 4)],
     _dump),
    ("flight-json", "json", lambda _: [json.dumps(one).encode() for one in _documents()], _dump),
    ("node", "text", lambda _: [
        _said([{"address": "pid:1", "name": "rank0", "size": len(_TRACE), "took_s": 0.5, "began_s": 1700000000.5},
               {"address": "pid:2", "name": "../b", "problem": "it ended", "fix": "start it"}], _TRACE),
        _said([{"address": "pid:1", "name": "a", "size": 5}] * 2, b"12345" * 2)], _node, 2),
))
