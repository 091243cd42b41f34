from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from gputop.trace.readers.formats import ACCEPTED, ACCEPTED_BRIEF, FORMATS


@pytest.mark.parametrize("format_", FORMATS, ids=lambda format_: format_.id)
def test_each_format_has_a_reader_and_is_listed(format_):
    assert callable(import_module(format_.reader).read_files)
    assert format_.accepted in ACCEPTED and format_.accepted_brief in ACCEPTED_BRIEF


def test_the_ids_differ():
    assert len({format_.id for format_ in FORMATS}) == len(FORMATS)


@pytest.mark.parametrize(("name", "begin", "id_"), [
    ("h.xplane.pb", b"\n\x10rest", "xspace"),
    ("h.xplane.pb", b"\n{rest", "xspace"),  # a first plane of 123 bytes, no JSON
    ("h.pb.gz", b"\x12\x05error", "xspace"),
    ("no suffix", b"\n\x10rest", "xspace"),
    ("t.json", b'\n{"traceEvents": []}', "chrome"),
    ("t", b'\xef\xbb\xbf[{"ph": "X"}]', "chrome"),
    ("r.sqlite", b"SQLite format 3\0", "nsys"),
    ("r.pb", b"SQLite format 3\0", "nsys"),
    ("x.bin", b"\x7fELF", None),
])
def test_a_file_is_recognized_by_name_and_content(name, begin, id_):
    found = next((format_.id for format_ in FORMATS if format_.recognizes(Path(name), begin)), None)
    assert found == id_


def test_the_list_of_formats_needs_no_numpy():
    code = "import sys, gputop.trace.readers.formats; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
