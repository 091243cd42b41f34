"""The words of docs and code: American spelling, and none of the private names that were replaced.

An identifier is split into its words (``past_gpus``, ``PastGpus``: past, gpus). Comments, docstrings and messages are
checked for spelling only. An exception names the file, the word and why it stays.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "gputop").rglob("*.py"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

BRITISH = re.compile(
    r"(?<![a-z])(?:colour|grey(?:s|ed|ing)?(?![a-z])|neighbour|behaviour|favour|honour|flavour|labour(?!s?-)|catalogue|"
    r"judgement|licence|defence|artefact|acknowledgement|centre|metre(?![a-z])|fibre|cancelled|cancelling|labelled|"
    r"labelling|modelled|modelling|signalled|signalling|travelled|analys(?:e[dr]?(?![a-z])|ing)|"
    r"(?:serial|recogn|initial|normal|optim|summar|synchron|parallel|organ|real|minim|maxim|visual|vector|util|"
    r"material|special|general|quant|token|categor|priorit|author|custom|stabil)is(?:e|es|ed|er|ing|ations?)(?![a-z]))",
    re.IGNORECASE)

# Retired word of an identifier: what is said instead.
RETIRED = {
    "said": "message, reason", "told": "known, reported, replayed snapshot", "look": "sample, check, scan",
    "looks": "samples", "looked": "sampled, checked", "glimpse": "first_gpus", "patience": "timeout",
    "mailbox": "results",
    "leftovers": "stale files", "spared": "growth limits", "sparing": "growth limits", "bearable": "safe duration",
    "asides": "notices", "bubble": "idle gap", "bubbles": "idle gaps", "coldest": "idle gap", "standstill": "idle gap",
    "rhythm": "step period", "blackbox": "auto-capture", "promise": "estimated saving", "promised": "estimated saving",
    "stroke": "styled span", "strokes": "styled spans", "ladder": "fallback", "felt": "checked", "prefill": "backfill",
}
ALLOWED = {
    ("gputop/comparison/advice.py", "promised"): "a key of the JSON of `compare`",
    ("gputop/comparison/report.py", "promised"): "a key of the JSON of `compare`",
}
# Values and names that are kept as they are, or that are not gputop's.
KEPT = ("serialised_kernels", "cancelled_write_bytes", "CancelledError")


def words(path: Path) -> frozenset[str]:
    """The words of all identifiers in a file."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline)
    return frozenset(word.lower() for token in tokens if token.type == tokenize.NAME
                     for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", token.string))


def british(text: str) -> Iterator[str]:
    for kept in KEPT:
        text = text.replace(kept, "")
    for number, line in enumerate(text.splitlines(), 1):
        yield from (f"{number}: {found[0]}" for found in BRITISH.finditer(line))


def test_the_spelling_is_american() -> None:
    assert [f"{path.relative_to(ROOT)}:{found}" for path in (*SOURCES, *DOCUMENTS)
            for found in british(path.read_text("utf-8"))] == []


def test_retired_names_do_not_come_back() -> None:
    found = {(str(path.relative_to(ROOT)), word) for path in SOURCES for word in words(path) & RETIRED.keys()}
    assert {f"{file}: {word} → {RETIRED[word]}" for file, word in found - ALLOWED.keys()} == set()
    assert ALLOWED.keys() - found == set(), "an exception that is no longer needed"


@pytest.mark.parametrize(("text", "expected"), [
    ("the colour of neighbours", ["1: colour", "1: neighbour"]), ("analyses of serialised_kernels", []),
    ("analysed\nUTILISATION", ["1: analysed", "2: UTILISATION"]), ("parallelism, realism, a realistic organism", []),
])
def test_british_spellings_are_found(text: str, expected: list[str]) -> None:
    assert list(british(text)) == expected
