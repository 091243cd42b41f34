"""The short form of ``make fuzz``: a few inputs at every door, every kept crasher, and that failures are seen."""

from __future__ import annotations

import gzip
import json
import random
import sqlite3
from pathlib import Path

import pytest

from gputop.core.errors import GputopError
from gputop.replay.reader import Recording
from tests.campaign import mutation
from tests.campaign.fuzz import KEPT, TARGET_NAMES, Campaign, keep
from tests.campaign.planted import PLANTED
from tests.campaign.targets import TARGETS, _recordings
from tests.trace.readers.nsys_report import report

INPUTS = 2 * len(TARGET_NAMES)


def test_a_few_inputs_at_every_door_and_what_once_failed(tmp_path: Path) -> None:
    kept = sorted(KEPT.glob("*-*"))
    campaign = Campaign(tmp_path)
    campaign.run_process(seed=14, count=INPUTS, kept=kept)
    assert not campaign.failures
    assert set(campaign.inputs) == set(TARGET_NAMES) == set(TARGETS)
    assert campaign.inputs.total() == INPUTS + len(kept)


def test_whatever_goes_wrong_is_noticed(tmp_path: Path) -> None:
    survived = [name for name in PLANTED if name not in ("killed", "endless")]
    campaign = Campaign(tmp_path / "a", survived, "tests.campaign.planted")
    campaign.run_process(seed=1, count=len(survived))
    for last in ("killed", "endless"):
        campaign.targets, campaign.cpu_limit_s = [last], 1.0
        campaign.run_process(seed=1, count=1)
    found = {failure.target: failure for failure in campaign.failures.values()}
    assert found.keys() == PLANTED.keys() - {"fine"}
    for name, failure in found.items():
        assert failure.problem.startswith(PLANTED[name][1]) and failure.data, failure
    assert keep(found["memory"], tmp_path / "kept").read_bytes() == found["memory"].data != b""


def test_mutations_keep_what_leads_behind_the_first_check(tmp_path: Path) -> None:
    """Lengths, checksums, pages and compression are right in what the structures change; and something is changed."""
    random_ = random.Random(3)
    seed = report(tmp_path / "r.sqlite").read_bytes()
    for number in range(8):
        path = tmp_path / f"{number}.sqlite"
        path.write_bytes(mutation.database(random_, seed))
        with sqlite3.connect(path) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        connection.close()
    recording, read = _recordings(tmp_path)[0], 0
    for number in range(20):
        path = tmp_path / f"{number}.gputop"
        path.write_bytes(mutation.recording(random_, recording))
        try:
            with Recording(path) as opened:
                read += not any("damaged" in note for note in opened.notes)
        except GputopError:
            continue
    assert read
    text = json.dumps({"a": [1, 2], "b": {"c": "d"}}).encode()
    changed = [mutation.STRUCTURES["json.gz"](random_, gzip.compress(text)) for _ in range(20)]
    assert len({gzip.decompress(data) for data in changed}) > 10
    message = mutation._encoded([(1, 2, mutation._encoded([(2, 2, b"name"), (3, 0, 5)]))])
    assert mutation._fields(message) == [(1, 2, b"\x12\x04name\x18\x05")]
    assert sum(mutation._fields(mutation.protobuf(random_, message)) is not None for _ in range(20)) == 20


@pytest.mark.parametrize("kind", [*mutation.STRUCTURES, "bytes"])
def test_a_mutation_follows_from_its_seed(kind: str) -> None:
    seeds = [b"SQLite", b'{"a": [1]}', b"\x0a\x02\x08\x01"]

    def some() -> list[bytes]:
        random_ = random.Random(5)
        return [mutation.mutated(random_, seeds, kind) for _ in range(30)]

    assert some() == some() and len(set(some())) > 5
