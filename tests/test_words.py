"""The words of docs and code: American spelling, plain words, short sentences (docs/contributing/style.md), and none of
the private names that were replaced.

An identifier is split into its words (``past_gpus``, ``PastGpus``: past, gpus). Comments, docstrings and messages are
checked for spelling only. An exception names the file, the word and why it stays.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.source_trees import Source, sources
from tests.tool_modules import made_pages

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "gputop/SKILL.md")),
             *sorted((ROOT / "docs").rglob("*.md"))]

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
    ("comparison/advice.py", "promised"): "a key of the JSON of `compare`",
    ("comparison/report_lines.py", "promised"): "a key of the JSON of `compare`",
}
# Values and names that are kept as they are, or that are not gputop's.
KEPT = ("serialised_kernels", "cancelled_write_bytes", "CancelledError")


def identifiers(nodes: Sequence[ast.AST]) -> set[str]:
    """Names of variables, parameters, attributes, functions, classes and modules: all texts of nodes but literals."""
    found: set[str] = set()
    for node in nodes:
        if not isinstance(node, ast.Constant):
            for value in vars(node).values():
                if isinstance(value, str):
                    found.add(value)
                elif isinstance(value, list):  # of ``global``
                    found.update(item for item in value if isinstance(item, str))
    return found


@cache
def words_of(name: str) -> frozenset[str]:
    return frozenset(word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name))


def words(source: Source) -> frozenset[str]:
    """The words of all identifiers in a file."""
    return frozenset().union(*map(words_of, identifiers(source.nodes)))


def british(text: str) -> Iterator[str]:
    if not any(map(BRITISH.match, set(re.findall("[A-Za-z]+", text)))):  # each word once, before each place
        return
    for kept in KEPT:
        text = text.replace(kept, "")
    for number, line in enumerate(text.splitlines(), 1):
        yield from (f"{number}: {found[0]}" for found in BRITISH.finditer(line))


def test_the_spelling_is_american() -> None:
    texts = [*((source.name, source.text) for source in sources()),
             *((str(path.relative_to(ROOT)), path.read_text("utf-8")) for path in DOCUMENTS),
             *((str(path), text) for path, text in made_pages().items())]
    assert [f"{name}:{found}" for name, text in texts for found in british(text)] == []


def test_retired_names_do_not_come_back() -> None:
    found = {(source.name, word) for source in sources() for word in words(source) & RETIRED.keys()}
    assert {f"{file}: {word} → {RETIRED[word]}" for file, word in found - ALLOWED.keys()} == set()
    assert ALLOWED.keys() - found == set(), "an exception that is no longer needed"


@pytest.mark.parametrize(("text", "expected"), [
    ("the colour of neighbours", ["1: colour", "1: neighbour"]), ("analyses of serialised_kernels", []),
    ("analysed\nUTILISATION", ["1: analysed", "2: UTILISATION"]), ("parallelism, realism, a realistic organism", []),
])
def test_british_spellings_are_found(text: str, expected: list[str]) -> None:
    assert list(british(text)) == expected


# -- docs/contributing/style.md ---------------------------------------------------------------------

# What is said instead is in docs/contributing/style.md.
STILTED = {name: re.compile(pattern, re.MULTILINE) for name, pattern in {
    "cure": r"\b[Cc]ur(?:e|es|ed|ing)\b", "mend": r"\b[Mm]end(?:s|ed|ing)?\b",
    "told": r"(?<!annot be )\b[Tt]old\b",  # "cannot be told" is a verdict, in JSON also
    "tells": r"\b[Tt]ells\b", "beside": r"\b[Bb]eside\b", "gravest": r"\b[Gg]ravest\b",
    "for want of": r"\bfor want of\b",
    "is no": r"(?<!here )(?<!whatever )\bis no (?!longer\b)[A-Za-z]", ", too": r", too[.,;:]", "15 %": r"\d %",
    "Of …": r"(?:^|[.;:] )Of (?!course)", "where …": r"(?:^|[.;] )Where\b",
}.items()}
MADE = "<!-- Made from the code"
LONG_SENTENCE, USUAL_SENTENCE, LONG_PARAGRAPH, LONG_PAGE = 35, 25, 80, 900
# Words of the strings that gputop shows: how often each is there. They may only become fewer. "Where the step goes" and
# the like are headings, and one long sentence is SQL.
STRINGS_BUDGET = {"where …": 4, "sentences over 35 words": 1}


def prose(text: str) -> str:
    """A page without code, comments, and what is quoted from the program."""
    text = re.sub(r"^```.*?^```|<!--.*?-->", "", text, flags=re.M | re.S)
    return re.sub(r"`[^`\n]*`", "x", text)


def paragraphs(text: str) -> Iterator[str]:
    """Paragraphs and items of lists; headings, pictures and tables are none."""
    lines: list[str] = []
    for line in (*(line.strip() for line in prose(text).splitlines()), ""):
        item = re.match(r"(?:[-*>]|\d+\.)\s+", line)
        if lines and (not line or item or line.startswith(("|", "#", "!["))):
            yield " ".join(lines)
            lines = []
        if line and not line.startswith(("|", "#", "![")):
            lines.append(line[item.end():] if item else line)


def sentences(paragraph: str) -> list[str]:
    plain = re.sub(r"\]\([^)]*\)", "]", paragraph)
    return re.split(r"(?<=[.!?:])[\"*)_]*\s+(?=[A-Z`*\"\[(0-9x]|gputop|py-spy)", plain)


def length(text: str) -> int:
    return len(re.findall(r"[^\s|]*\w[^\s|]*", text))


def stilted(text: str) -> Counter[str]:
    return Counter({name: len(pattern.findall(text)) for name, pattern in STILTED.items() if pattern.search(text)})


def handwritten() -> list[Path]:
    return [path for path in (*DOCUMENTS, *sorted((ROOT / "gputop" / "advice" / "pages").glob("*.md")))
            if not path.read_text("utf-8").startswith(MADE)]


def strings() -> Iterator[str]:
    """The texts of the program that are sentences: strings of several words, docstrings left out."""
    for source in sources():
        documentation = {id(node.body[0].value) for node in source.nodes if isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and node.body and isinstance(node.body[0], ast.Expr)}
        inner = {id(part) for node in source.nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in source.nodes:
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "x" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = "" if id(node) in inner | documentation else node.value
            else:
                continue
            if len(text.split()) > 3:
                yield text


def test_the_words_of_pages_are_plain() -> None:
    for page in handwritten():
        text = re.sub(r"“[^”]*”|\"[^\"\n]*\"", "x", prose(page.read_text("utf-8")))
        assert page.name == "style.md" or not stilted(text), page  # which lists them


def test_the_sentences_of_pages_are_short() -> None:
    for page in DOCUMENTS:
        text = page.read_text("utf-8")
        _has_short_sentences(text)
        if not {"reference", "contributing", "doors.md"} & {*page.parts}:
            assert length(re.sub(r"\]\([^)]*\)", "]", prose(text))) <= LONG_PAGE, page


def test_nor_are_those_of_the_pages_that_are_made_long() -> None:
    for text in made_pages().values():
        _has_short_sentences(text)


def _has_short_sentences(text: str) -> None:
    parts = list(paragraphs(text))
    assert [part for part in parts if length(part) > LONG_PARAGRAPH] == []
    all_sentences = [sentence for part in parts for sentence in sentences(part)]
    assert [sentence for sentence in all_sentences if length(sentence) > LONG_SENTENCE] == []
    assert ninth_decile(all_sentences) <= USUAL_SENTENCE


def ninth_decile(texts: Sequence[str]) -> int:
    lengths = sorted(map(length, texts)) or [0]
    return lengths[int(0.9 * (len(lengths) - 1))]


def test_the_words_of_the_program_only_become_plainer() -> None:
    """A word is counted once for each string; the message says where to go on."""
    found: Counter[str] = Counter()
    for text in strings():
        found.update(dict.fromkeys(stilted(text), 1))
        found.update({"sentences over 35 words": sum(
            length(sentence) > LONG_SENTENCE for line in text.splitlines() for sentence in sentences(line))})
    more = {word: f"{found[word]}, the budget is {STRINGS_BUDGET.get(word, 0)}"
            for word in found if found[word] > STRINGS_BUDGET.get(word, 0)}
    assert not more, f"docs/contributing/style.md says what is said instead: {more}"
    fewer = {word: found[word] for word, budget in STRINGS_BUDGET.items() if found[word] < 0.8 * budget}
    assert not fewer, f"the budget in tests/test_words.py falls to {fewer}"


@pytest.mark.parametrize(("text", "expected"), [
    ("It is told at the start, too.", {"told": 1, ", too": 1}), ("There is no GPU.", {}),
    ("It is no lock.", {"is no": 1}),
    ("15 % of it", {"15 %": 1}), ("Of traces three are left.", {"Of …": 1}), ("It is no longer there.", {}),
    ("Where none is, wait.", {"where …": 1}), ("cured; secure", {"cure": 1})])
def test_stilted_words_are_found(text: str, expected: dict[str, int]) -> None:
    assert stilted(text) == expected


def test_sentences_and_paragraphs_are_counted() -> None:
    page = "# Heading\n\nOne two. Three `a b c`:\nfour.\n\n| a | b |\n\n- five\n- six\n\n```sh\nx\n```\n"
    assert list(paragraphs(page)) == ["One two. Three x: four.", "five", "six"]
    assert sentences("One two. Three x. Is it? Yes (no).") == ["One two.", "Three x.", "Is it?", "Yes (no)."]
