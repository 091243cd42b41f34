"""``gputop convert``: a trace or a recording in a format of other tools."""

from __future__ import annotations

import argparse
import gzip
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from gputop.commands.option_types import output_file
from gputop.core.errors import EXIT_OK, EXIT_USAGE, GputopError
from gputop.core.files import named_folder, replacing
from gputop.text import console
from gputop.text.units import size

if TYPE_CHECKING:
    from gputop.export.write_tables import SqlTables

_FORMATS = ".sqlite or .parquet (tables); for a trace, also .json or .json.gz (Chrome, Perfetto)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a trace that gputop analyze can read, or a recording")
    parser.add_argument("-o", "--output", type=output_file, required=True, metavar="FILE",
                        help=f"output file; its extension selects the format: {_FORMATS}. For a trace, .parquet is a "
                             "folder with one file per table")


def run(args: argparse.Namespace) -> int:
    write = _writer(args.output.name)
    try:
        written_bytes = write(args.paths, args.output)
    except FileExistsError as error:
        raise GputopError(f"cannot write {args.output}: {error.strerror}",
                          "Name another folder, or remove this one first: gputop does not replace folders.") from error
    except OSError as error:
        raise GputopError(f"cannot write {args.output}: {error.strerror or error}",
                          "Name a writable folder with enough free space.") from error
    console.say(f"{args.output}: {size(written_bytes)}")
    return EXIT_OK


def _writer(name: str) -> Callable[[list[str], Path], int]:
    """Writer of a file of that name, which returns its size."""
    for ending, write in ((".sqlite", _sqlite), (".db", _sqlite), (".parquet", _parquet), (".json", _chrome),
                          (".json.gz", _chrome)):
        if name.lower().endswith(ending):
            return write
    gone = "gputop no longer writes recordings as CSV. " if name.lower().endswith(".csv") else ""
    raise GputopError(f"{name} has no known extension", f"{gone}Use one of these extensions: {_FORMATS}.", EXIT_USAGE)


@contextmanager
def _recording(paths: list[str], *, whole: bool = False) -> Iterator[SqlTables]:
    """``whole``: the host, too, where the format holds several tables."""
    from gputop.export.recording_tables import recording_tables
    from gputop.replay.reader import open_recording

    if len(paths) > 1:
        raise GputopError("a file can contain only one recording", "Convert each recording separately.", EXIT_USAGE)
    with open_recording(paths[0]) as recording:
        yield recording_tables(recording, whole=whole)


@contextmanager
def _tables(paths: list[str]) -> Iterator[SqlTables]:
    from gputop.replay.reader import is_recording

    if is_recording(paths[0]):
        with _recording(paths, whole=True) as made:
            yield made
    else:
        from gputop.diagnosis.diagnose import analyze_to_facts
        from gputop.export.trace_tables import trace_tables
        from gputop.trace.readers.load import load

        yield trace_tables(analyze_to_facts(load(paths)))


def _written(output: Path, write: Callable[[BinaryIO], object]) -> int:
    with replacing(output) as file:
        write(file)
        return file.tell()


def _sqlite(paths: list[str], output: Path) -> int:
    from gputop.export.write_tables import write_sqlite

    with _tables(paths) as made:
        return _written(output, lambda file: write_sqlite(made, file))


def _parquet(paths: list[str], output: Path) -> int:
    from gputop.export.write_tables import need_pyarrow, write_parquet, write_parquet_folder
    from gputop.replay.reader import is_recording

    need_pyarrow()
    if is_recording(paths[0]):
        with _recording(paths) as made:
            return _written(output, lambda file: write_parquet(made, file))
    with named_folder(output.parent) as parent, parent.making(output.name) as folder, _tables(paths) as made:
        write_parquet_folder(made, folder)
        return sum(folder.state(name).st_size for name in folder.names())


def _chrome(paths: list[str], output: Path) -> int:
    from gputop.export import chrome_json
    from gputop.trace.readers.load import load

    pieces = chrome_json.pieces(load(paths))
    if output.name.lower().endswith(".gz"):  # gzip files one after the other, which is a gzip file
        pieces = (gzip.compress(piece, 6) for piece in pieces)
    return _written(output, lambda file: file.writelines(pieces))
