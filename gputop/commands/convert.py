"""``gputop convert``: a trace or a recording in a format of other tools."""

from __future__ import annotations

import argparse
import gzip
from collections.abc import Callable, Iterator
from pathlib import Path

from gputop.core.errors import EXIT_OK, EXIT_USAGE, GputopError
from gputop.core.files import replacing
from gputop.text import console
from gputop.text.units import bytes_

_FORMATS = ".sqlite (tables), .json or .json.gz (Chrome, Perfetto) for a trace; .csv for a recording"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a trace, as gputop analyze takes it, or a recording")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE",
                        help=f"its name says the format: {_FORMATS}")


def run(args: argparse.Namespace) -> int:
    make, size = _maker(args.output.name), 0
    try:
        with replacing(args.output) as file:
            for piece in make(args.paths):
                size += file.write(piece)
    except OSError as error:
        raise GputopError(f"cannot write {args.output}: {error.strerror or error}",
                          "Give a folder you may write to that has room.") from error
    console.say(f"{args.output}: {bytes_(size)}")
    return EXIT_OK


def _maker(name: str) -> Callable[[list[str]], Iterator[bytes]]:
    for ending, make in ((".sqlite", _tables), (".db", _tables), (".json", _chrome), (".json.gz", _compressed),
                         (".csv", _csv)):
        if name.lower().endswith(ending):
            return make
    raise GputopError(f"{name} does not say a format", f"Give FILE one of these endings: {_FORMATS}.", EXIT_USAGE)


def _tables(paths: list[str]) -> Iterator[bytes]:
    from gputop.diagnosis.diagnose import examine
    from gputop.export import sqlite_tables
    from gputop.trace.readers.load import load

    return sqlite_tables.pieces(examine(load(paths)))


def _chrome(paths: list[str]) -> Iterator[bytes]:
    from gputop.export import chrome_json
    from gputop.trace.readers.load import load

    return chrome_json.pieces(load(paths))


def _csv(paths: list[str]) -> Iterator[bytes]:
    from gputop.export import recording_csv
    from gputop.replay.reader import open_recording

    if len(paths) > 1:
        raise GputopError("a table holds one recording", "Convert one after the other.", EXIT_USAGE)
    with open_recording(paths[0]) as recording:
        yield from recording_csv.pieces(recording)


def _compressed(paths: list[str]) -> Iterator[bytes]:
    """As gzip files one after the other, which is a gzip file."""
    for piece in _chrome(paths):
        yield gzip.compress(piece, 6)
