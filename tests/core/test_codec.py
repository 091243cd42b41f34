"""Documents to typed values."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# Each in a process of its own: only the first look at a type counts, and what goes wrong there ends the process.
_THREADS = """
import sys, threading
sys.setswitchinterval(1e-6)
from gputop.core import codec
from gputop.core.samples import NodeSample
from tests.fakes import node_sample
document = codec.to_document(node_sample(1))
barrier, values = threading.Barrier(8), []
def work():
    barrier.wait()
    values.append(codec.convert(document, NodeSample))
threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(values) == 8
"""


def test_threads_that_meet_a_type_for_the_first_time_read_it() -> None:
    for _ in range(4):  # without a lock every second one of these died here of SIGSEGV
        subprocess.run([sys.executable, "-c", _THREADS], check=True, cwd=Path(__file__).parents[2])
