"""A comparison in a process of its own: ``python -m gputop.comparison.worker A B WIDTH`` prints it as JSON.

Reading two traces takes seconds and memory that the monitor must not give.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence

import msgspec

from gputop.diagnosis.worker import answer, run_in_worker


class ComparisonReport(msgspec.Struct, frozen=True):
    """What a comparison says: its verdict, and all of it as text."""

    verdict: str
    report: str


def compare_in_worker(a: str, b: str, width: int, stop: threading.Event | None = None) -> ComparisonReport:
    """The comparison of two paths, as text of ``width`` columns; blocks.

    Raises GputopError as :func:`gputop.comparison.compare.compare` does and
    :func:`gputop.diagnosis.worker.analyze_in_worker`.
    """
    return run_in_worker("gputop.comparison.worker", [a, b, str(width)], ComparisonReport, stop, what="comparison")


def main(arguments: Sequence[str]) -> int:
    from gputop.comparison.compare import compare
    from gputop.comparison.report import text_report

    a, b, width = arguments

    def work() -> ComparisonReport:
        comparison = compare(a, b)
        return ComparisonReport(comparison.verdict, text_report(comparison, int(width)))

    return answer(work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
