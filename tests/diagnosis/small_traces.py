"""Traces of a few events, to be mutated."""

from __future__ import annotations

import json

from tests.trace.readers.chrome.kineto_file import kineto
from tests.trace.readers.xspace.reference import Builder


def tiny() -> bytes:
    b = Builder("")
    b.event("/device:GPU:0", b.line("/device:GPU:0", "s", 5), "k", 1, 1, correlation_id=1, tf_op=("a",))
    b.event("/host:CPU", b.line("/host:CPU", "t"), "train", 1, 1, correlation_id=1, step_num=1)
    return b.bytes()


def few() -> bytes:
    document = kineto(rank=2)
    document["deviceProperties"] = []
    document["traceEvents"] = [document["traceEvents"][i] for i in (0, 5, 8)]
    return json.dumps(document).encode()
