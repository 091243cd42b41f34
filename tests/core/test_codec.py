"""Documents to typed values."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec import UNSET, Struct, UnsetType

from gputop.core import codec
from gputop.core.errors import GputopError
from gputop.doctor.driver_facts import facts_from
from gputop.launch.inside import gputop_serve
from gputop.profiler.discovery import rank_of
from gputop.profiler.workers import tf_config_hosts
from tests.source_trees import dotted, sources

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


# Which read JSON otherwise: what runs inside of the job and has nothing of gputop's; traces, piece by piece
# and within bounds of their own; py-spy's record, whose type is checked as it is decoded.
_OTHER_READERS = {"launch/inside/gputop_serve.py", "launch/inside/gputop_kineto.py",
                  "trace/readers/chrome/json_stream.py", "ranks/stack_sampler.py"}


def test_json_has_one_door() -> None:
    readers = set()
    for source in sources():
        for node in source.nodes:
            name = dotted(node) if isinstance(node, ast.Attribute) else ""
            imported = isinstance(node, ast.ImportFrom) and node.module in ("json", "msgspec.json")
            if imported or name in ("json.loads", "json.load", "json.JSONDecoder", "msgspec.json.decode",
                                    "msgspec.json.Decoder"):
                readers.add(source.name)
    assert readers == {"core/codec.py"} | _OTHER_READERS


_DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(("text", "why"), [
    (_DEEP, "nested"), ("[" * 300 + "]" * 300, "nested"), ('{"a":' * 300 + "1" + "}" * 300, "nested"),
    ("[" + "[]," * 3_000_000 + "1]", "values"), ("[NaN]", "NaN"), ('["\\ud8', "escape"), ("[1", "delimiter"),
], ids=["deep", "lists", "objects", "values", "nan", "escape", "cut"])
def test_a_document_has_an_end_in_depth_and_in_values(text: str, why: str) -> None:
    for document in (text, text.encode()):
        with pytest.raises(ValueError, match=why):
            codec.parse(document)


def test_what_is_deep_and_large_within_bounds_is_read() -> None:
    deep = "[" * codec.MAX_DEPTH + "]" * codec.MAX_DEPTH
    assert codec.parse(deep) == json.loads(deep)
    assert codec.parse(b"[" + b'{"a": [1]},' * 1000 + b"null]", most_values=4000)[-1] is None
    assert codec.parse('"[[["') == "[[["


@pytest.mark.parametrize("config", [
    _DEEP, '{"task": ' + _DEEP + "}", '{"task": {"type": "worker", "index": 1e999}}', "[]", "5", '{"task": []}',
    '{"task": {"type": [1], "index": 0}}', '{"cluster": 5}', '{"cluster": {"worker": [5]}}',
], ids=range(9))
def test_no_tf_config_ends_what_reads_it(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", config)
    assert rank_of({"TF_CONFIG": config, "RANK": "3"}) == "rank 3"
    gputop_serve._task()
    with pytest.raises(GputopError, match=r"tf\.distribute"):
        tf_config_hosts(config)


def test_no_line_of_a_driver_ends_the_doctor() -> None:
    assert facts_from([_DEEP, "[1]", "5", "null", '{"driver": "580.65"']).gpus == ()


class _Shown(Struct, frozen=True):
    name: str
    length_s: float
    reason: str | UnsetType | None = UNSET


def test_a_document_has_the_values_of_the_same_names_and_leaves_out_what_is_unset() -> None:
    made = codec.document_of(_Shown, Path("/tmp/a"), length_s=2, reason=UNSET)
    assert codec.to_document(made) == {"name": "a", "length_s": 2}
    with pytest.raises(AttributeError, match="length_s"):
        codec.document_of(_Shown, Path("/tmp/a"))
