"""``gputop schema``: the JSON Schemas of the documents that gputop prints, made of the types that are written.

The tests of the commands hold each to real documents (``tests/commands/schema_problems.py``). Keys may be added in
later versions; those that are here stay.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import msgspec

from gputop.advice.fleet.advise import ClusterDocument
from gputop.commands.rules import RulesDocument
from gputop.comparison.baselines import BaselinesDocument
from gputop.comparison.compare import CompareDocument
from gputop.core.errors import EXIT_OK, EXIT_USAGE, GputopError
from gputop.core.version import __version__
from gputop.doctor.examine import DoctorDocument
from gputop.export.analysis_documents import AnalysesDocument, AnalyzeDocument, CaptureDocument
from gputop.goodput.model import Report
from gputop.ranks.stacks_document import StacksDocument
from gputop.replay.rule_trials import TrialsDocument
from gputop.replay.snapshot_document import Document as Snapshot
from gputop.session.notifier import Notification
from gputop.text import console

# By the command that prints them.
SCHEMAS: Mapping[str, type] = {
    "analyze": AnalyzeDocument, "analyze-all": AnalysesDocument, "baselines": BaselinesDocument,
    "capture": CaptureDocument, "cluster": ClusterDocument, "compare": CompareDocument, "doctor": DoctorDocument,
    "notification": Notification, "report": Report, "rules": RulesDocument, "rules-test": TrialsDocument,
    "snapshot": Snapshot, "stacks": StacksDocument,
}


def json_schema(name: str) -> dict[str, Any]:
    """The JSON Schema (2020-12) of a document; raises KeyError for a name that is not in :data:`SCHEMAS`."""
    schema = msgspec.json.schema(SCHEMAS[name])
    for definition in schema["$defs"].values():  # a default is for reading: what is written has every key
        required = {*definition.get("required", ())}
        definition["required"] = [key for key, value in definition.get("properties", {}).items()
                                  if key in required or "default" in value]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"gputop {name}",
            "$comment": f"gputop {__version__}", **schema}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", default=None, metavar="NAME",
                        help=f"{', '.join(SCHEMAS)} (default: list these names)")


def run(args: argparse.Namespace) -> int:
    if args.name is None:
        console.write_text("\n".join(SCHEMAS))
        return EXIT_OK
    if args.name not in SCHEMAS:
        raise GputopError(f"there is no schema named {args.name}", f"There are {', '.join(SCHEMAS)}.", EXIT_USAGE)
    console.write_json(json_schema(args.name))
    return EXIT_OK
