"""A table of the screen as a CSV file in the folder of the captures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gputop.core.errors import GputopError
from gputop.text.units import counted, printable
from gputop.tui.terminal.clipboard import CopyingApp


def write_csv(app: CopyingApp, folder: Path, name: str, titles: Sequence[str],
              rows: Sequence[Sequence[str | float | None]], *, simulated: bool) -> None:
    """Write all columns in base units, and say where they are."""
    from gputop.core.files import write_new_files
    from gputop.export.write_tables import csv_text

    mark = "-SIMULATED" if simulated else ""
    try:
        [path] = write_new_files(folder, f"gputop-{name}{mark}", {".csv": csv_text(titles, rows).encode()})
    except GputopError as error:
        app.notify(printable(f"{error.message}\n{error.fix}"), severity="warning")
    else:
        app.notify(f"{counted(len(rows), 'row')} in {printable(str(path))}", title="Table written")
