"""``gputop record``: samples of a source into a file, until told to stop."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from pathlib import Path

from gputop.core.errors import GputopError
from gputop.core.samples import NodeSample
from gputop.replay.parts import PartsWriter, Rotation
from gputop.replay.writer import RecordingWriter
from gputop.sources.base import Source
from gputop.telemetry.sampler import Sampler
from gputop.text import redaction
from gputop.text.units import size

MAX_WAITING = 600  # samples; a disk that hangs for longer loses some rather than filling memory
_STOP_POLL_S = 0.2  # how soon a stop is noticed between two samples


def record(source: Source, interval_s: float, path: Path, seconds: float | None, stop: threading.Event,
           say: Callable[[str], None], rotation: Rotation | None = None) -> None:
    """Record until ``stop`` is set or for ``seconds``; ``say`` gets messages for the user. Commands lose their secrets.
    With a ``rotation`` ``path`` is a folder of parts.

    The caller's thread writes, another one samples: a slow disk delays no sample. Raises GputopError where the source
    or the file fails; what was written until then can be replayed.
    """
    waiting: queue.Queue[NodeSample | GputopError] = queue.Queue()
    dropped = 0

    def enqueue(message: NodeSample | GputopError) -> None:
        nonlocal dropped
        if isinstance(message, NodeSample) and waiting.qsize() >= MAX_WAITING:
            dropped += 1
        else:
            waiting.put(message)

    with contextlib.closing(RecordingWriter(path) if rotation is None else PartsWriter(path, rotation, say)) as writer:
        sampler = Sampler(source, interval_s, enqueue, enqueue)
        sampler.start()
        try:
            say(f"recording to {path}; press ctrl-c to stop")
            elapsed_s = 0.0
            while not (stop.is_set() and waiting.empty()):
                try:
                    message = waiting.get(timeout=_STOP_POLL_S)
                except queue.Empty:
                    continue
                if isinstance(message, GputopError):
                    raise message
                writer.append(redaction.sample(message))
                elapsed_s += message.interval_s or 0.0
                if seconds is not None and elapsed_s >= seconds:
                    break
        finally:
            sampler.stop()
            if dropped:
                say(f"{dropped} samples are missing because writing {path} was too slow")
            if writer.samples:
                see = f"to view them: gputop replay {path}" if rotation is None else ("to summarize them: gputop "
                                                                                     f"report {path}")
                say(f"{writer.samples} samples, {size(writer.size_bytes)} in {path}; {see}")
            elif rotation is None:
                path.unlink(missing_ok=True)  # this run made it, and it would stand in the way of the next
