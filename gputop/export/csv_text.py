"""A table as CSV (RFC 4180): a line of titles, then the rows, unknown values empty."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

from gputop.export.write_tables import without_formulas
from gputop.text.units import printable


def csv_text(titles: Sequence[str], rows: Iterable[Sequence[str | float | None]]) -> str:
    """Numbers stay as they are, in base units; names come from outside and lose control characters."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(titles)
    writer.writerows(without_formulas(tuple(printable(value) if isinstance(value, str) else value for value in row))
                     for row in rows)
    return out.getvalue()
