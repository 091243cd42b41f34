"""How good the advice on traces is: gputop's findings on the labeled suite of tests/advice/labeled.

    python benchmarks/advice.py [--seeds N] [--only TEXT] [--all-ids] [--json FILE] [-v]

Every case is a generated trace with known truth: one fault in several strengths, pairs of them, healthy
jobs, and traces that lack a rule's inputs. Recall counts ids that have a rule; --all-ids the others too.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gputop.analysis.results import Analysis
from gputop.diagnosis.diagnose import analyze_trace
from gputop.trace.readers.xspace.reader import read_xspaces
from tests.advice.labeled.case import Case
from tests.advice.labeled.cases import all_cases
from tests.advice.labeled.faults import FAULTS
from tests.advice.labeled.rules import ids_with_rules
from tests.advice.labeled.score import Verdict, judge, summary


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each fault and strength")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--all-ids", action="store_true", help="count ids without a rule as missed")
    parser.add_argument("--json", type=Path, help="write the whole result there")
    parser.add_argument("-v", action="store_true", help="print every case that is not perfect")
    options = parser.parse_args(arguments)
    rules = None if options.all_ids else ids_with_rules()
    began = time.perf_counter()
    verdicts = list(_verdicts(all_cases(options.seeds, options.only), rules))
    document = summary(verdicts)
    if options.v:
        for verdict in verdicts:
            _print_case(verdict)
    _print(document, time.perf_counter() - began)
    if options.json:
        options.json.write_text(json.dumps({**document, "verdicts": [asdict(v) for v in verdicts]}, indent=1))


def analysis_of(case: Case) -> Analysis:
    """What gputop says of the case's trace, read from its bytes."""
    return analyze_trace(read_xspaces([(f"{case.name}.xplane.pb", "trainer-0", case.bytes())]), case.params)


def _verdicts(cases: Iterator[Case], rules: frozenset[str] | None) -> Iterator[Verdict]:
    for case in cases:
        yield judge(case, [(f.id, f.severity) for f in analysis_of(case).findings], rules)


def _print_case(v: Verdict) -> None:
    if v.missed or v.false or v.contradicted or v.severity_off or v.first_right is False:
        parts = [f"{what} {', '.join(ids)}" for what, ids in (
            ("missed", v.missed), ("false", v.false), ("contradicted", v.contradicted),
            ("severity of", [f"{k} {s}" for k, s in v.severity_off.items()])) if ids]
        if v.first_right is False:
            parts.append(f"first {v.first}")
        shares = " ".join(f"{k} {s:.1%}" for k, s in v.shares.items())
        print(f"{v.name:34s} {'; '.join(parts)}   [{shares}] found {v.found}")


def _print(document: dict[str, Any], seconds: float) -> None:
    print(f"\n{document['cases']} cases, {seconds:.0f} s")
    for name in ("recall", "precision", "main_cause_first", "severity_agreement"):
        value = document[name]
        print(f"{name.replace('_', ' '):24s} {'-' if value is None else f'{value:.3f}'}")
    print(f"{'false alarms on healthy':24s} {document['false_alarms_on_healthy']} of {document['healthy']} traces")
    print(f"{'contradictions':24s} {document['contradictions']}\n")
    print(f"{'id':24s} {'wanted':>7s} {'found':>6s} {'false':>6s} {'severity off':>13s} {'first':>9s}")
    for id_ in sorted({*FAULTS, *document["ids"]} - {"-"}):
        row = document["ids"].get(id_)
        if row is None:
            print(f"{id_:24s} {'no rule, nothing asked':>30s}" if id_ not in ids_with_rules() else f"{id_:24s}")
            continue
        print(f"{id_:24s} {row['wanted']:7d} {row['hit']:6d} {row['false']:6d} {row['severity_off']:13d} "
              f"{row['first']:4d}/{row['first_wanted']:<4d}")


if __name__ == "__main__":
    main()
