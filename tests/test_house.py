"""The shape of the house: how many attributes a class has, what a record is, and who imports whom among the tests."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from gputop.advice.registry import RULES
from gputop.rules.toml_places import parse_toml
from tests.source_trees import sources

TESTS = Path(__file__).parent
MOST_ATTRIBUTES = 20

# Classes with more, and how many. A number may fall, and a class below the limit leaves the list; none is added.
BUDGET = {
    "analysis/results.py:Analysis": 30,
    "cluster/model.py:Job": 22,
    "core/samples.py:ProcessSample": 23,
    "goodput/model.py:Report": 21,
    "replay/snapshot_document.py:Process": 24,
    "trace/model.py:Trace": 29,
}


def attributes(source: ast.ClassDef) -> set[str]:
    """Fields of a class and what its methods assign to ``self``; not what it inherits."""
    found = {field.target.id for field in source.body
             if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
             and "ClassVar" not in ast.unparse(field.annotation)}
    for method in source.body:
        if isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found |= {node.attr for node in ast.walk(method)
                      if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
                      and isinstance(node.value, ast.Name) and node.value.id == "self"}
    return found


def crowded_classes() -> Iterator[tuple[str, int]]:
    for source in sources():
        for node in source.nodes:
            if isinstance(node, ast.ClassDef) and (count := len(attributes(node))) > MOST_ATTRIBUTES:
                yield f"{source.name}:{node.name}", count


def test_no_class_has_more_attributes_than_today():
    assert dict(crowded_classes()) == BUDGET, "fewer: lower the number here; more: find the part that is a class"


# Records that are not Structs, by package: the rule is in docs/contributing/architecture.md. A number may only fall.
DATACLASSES = {"doctor": 2}
NAMED_TUPLES = {
    "advice": 1, "analysis": 18, "cluster": 1, "comparison": 1, "core": 1, "diagnosis": 1, "export": 1, "rules": 3,
    "session": 3, "simulation": 3, "telemetry": 3, "timeline": 4, "trace": 7, "tui": 5,
}


def records(kind: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for source in sources():
        for node in source.nodes:
            if isinstance(node, ast.ClassDef):
                marks = " ".join(map(ast.unparse, (*node.decorator_list, *node.bases)))
                found[source.folder] += kind in marks.split() or f"{kind}(" in marks
    return +found


@pytest.mark.parametrize(("kind", "today"), [("dataclass", DATACLASSES), ("NamedTuple", NAMED_TUPLES)])
def test_a_record_is_a_struct(kind: str, today: dict[str, int]):
    assert records(kind) == today, "fewer: lower the number here; more: make it a frozen msgspec.Struct"


# As reading and parsing all would take longer: the files in which an import may be of a test module.
NAMES_A_TEST = re.compile(r"\btests[\w.]*\.test_|^\s*from tests[\w.]* import (?:\([^)]*|.*)\btest_", re.MULTILINE)


def imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_what_tests_share_is_in_no_test_module():
    modules = {".".join(("tests", *path.relative_to(TESTS).with_suffix("").parts)) for path in TESTS.rglob("test_*.py")}
    files = [path for folder in (TESTS, TESTS.parent / "benchmarks", TESTS.parent / "tools")
             for path in folder.rglob("*.py") if NAMES_A_TEST.search(path.read_text("utf-8"))]
    forms = ("import tests.a.test_x", "from tests.a.test_x import y", "from tests.a import (\n    made,\n    test_x)")
    assert len(modules) > 300 and all(map(NAMES_A_TEST.search, forms))
    wrong = [f"{path.relative_to(TESTS.parent)}: {module}" for path in files
             for module in imported_modules(path) if module in modules]
    assert not wrong, "a helper that several use belongs in a module of its own"


# A loaded machine is late by seconds; what is not to come is waited for by less than two.
SHORT_WAIT = re.compile(r"\.(?:get\(timeout=|(?:wait|join|acquire|communicate)\((?:timeout=)?)"
                        r"(?:[2-9]|[1-5]\d)(?:\.\d+)?\)")


def test_no_test_gives_up_soon_on_what_is_to_come():
    short = [f"{path.relative_to(TESTS)}: {wait[0]}" for path in TESTS.rglob("*.py")
             for wait in SHORT_WAIT.finditer(path.read_text("utf-8"))]
    assert not short, "wait for tests.waiting.PATIENCE_S"


# Words that say nothing of a value. In advice ``why`` is the field of a finding, whose text a local may hold.
EMPTY_NAMES = ("own", "found", "known", "place", "at", "why", "told", "there")
# How many parameters and locals have such a name, by folder; none elsewhere. A number may only fall. ``Place`` is what
# a picture of a timeline consists of.
EMPTY_NAMES_LEFT = {"tui": 15}
# Docstrings begin with a noun or a verb: not with these.
NOT_FIRST = {
    "after", "as", "at", "because", "before", "beside", "besides", "between", "both", "by", "for", "from", "how", "if",
    "in", "its", "of", "on", "once", "only", "over", "per", "since", "so", "than", "then", "these", "those", "to",
    "under", "until", "what", "when", "where", "whether", "which", "while", "who", "whose", "why", "with", "within",
    "without",
}


OF_NO_WING = {"gputop.__main__", "gputop.marks"}  # the program's start, and what jobs import


def variables(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Names of parameters and of what is assigned, fields of classes left out."""
    fields = {statement.target for node in nodes if isinstance(node, ast.ClassDef)
              for statement in node.body if isinstance(statement, ast.AnnAssign)}
    for node in nodes:
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node not in fields:
            yield node.id


def first_words(nodes: Sequence[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from (ast.get_docstring(node) or "").lower().split(maxsplit=1)[:1]


def test_variables_are_named_for_what_they_hold():
    left = Counter(source.folder for source in sources() for name in variables(source.nodes)
                   if name in EMPTY_NAMES and (source.folder, name) != ("advice", "why"))
    more = {folder: count for folder, count in left.items() if count > EMPTY_NAMES_LEFT.get(folder, 0)}
    assert not more, f"name what the value is, instead of {', '.join(EMPTY_NAMES)}"


def test_docstrings_begin_with_a_noun_or_a_verb():
    words = [(source.folder, word) for source in sources() for word in first_words(source.nodes)]
    wrong = Counter(folder for folder, word in words if word in NOT_FIRST)
    assert len(words) > 4000
    assert not wrong, '"Return the …", "Run-to-run variation of a job": not "What …", "Whether …", "By …"'


def contract(name: str) -> dict[str, list[str]]:
    """Contract of import-linter whose name begins so."""
    tools = parse_toml((TESTS.parent / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    [named] = [each for each in tools["importlinter"]["contracts"] if each["name"].startswith(name)]
    return named


def test_each_module_of_a_rule_is_held_apart_from_the_others():
    apart = contract("No rule knows another")["modules"]
    assert set(apart) == {f"gputop.advice.{rule.module}" for rule in RULES}, "name it in pyproject.toml"


def test_each_module_stands_in_one_wing():
    wings = [tuple(part.strip() for part in layer.split(":")) for layer in contract("Three wings")["layers"]]
    modules = {f"gputop.{source.name.removesuffix('.py').replace('/', '.')}" for source in sources()}
    parts = {module: [i for i, wing in enumerate(wings) for part in wing if f"{module}.".startswith(f"{part}.")]
             for module in modules if not module.endswith("__init__") and module not in OF_NO_WING}
    wrong = {module: found_in for module, found_in in parts.items() if len(found_in) != 1}
    assert len(parts) > 500 and not wrong, "name it in one wing, in pyproject.toml"


# Packages that say all: what a file in them is called may be called so elsewhere. ``model.py`` is its package's.
SAY_ALL = ("advice/fleet/", "advice/live/", "advice/trace/", "commands/", "doctor/", "profiler/kineto/",
           "profiler/xprof/", "simulation/", "sources/dcgm/", "sources/host/", "sources/nvml/", "trace/readers/chrome/",
           "trace/readers/xspace/", "tui/screens/", "replay/snapshot_document.py")
NAMED_ALIKE = {"__init__.py", "model.py"}
# Names that still stand for two things; they may only leave the list.
FILES_NAMED_ALIKE: frozenset[str] = frozenset()
CLASSES_NAMED_ALIKE = {"History"}  # of a node, and a list of values in the document of a fleet


def named_alike(names: Iterable[tuple[str, str]]) -> set[str]:
    """Names that stand in several files, by pairs of a name and the file."""
    count = Counter(name for name, file in names if not file.startswith(SAY_ALL) and name not in NAMED_ALIKE)
    return {name for name, times in count.items() if times > 1}


def test_no_two_files_or_public_classes_have_one_name():
    files = named_alike((Path(source.name).name, source.name) for source in sources())
    classes = named_alike((node.name, source.name) for source in sources() for node in source.tree.body
                          if isinstance(node, ast.ClassDef) and not node.name.startswith("_"))
    assert files == FILES_NAMED_ALIKE, "name it for what it holds; fewer: shorten the list"
    assert classes == CLASSES_NAMED_ALIKE, "name it for what it is; fewer: shorten the list"


LONG_LINES = 50
# Number of functions of more lines than that. It may only fall.
LONG_FUNCTIONS = 9


def test_few_functions_are_long():
    long = [(node.end_lineno - node.lineno + 1, f"{source.name}: {node.name}") for source in sources()
            for node in source.nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            and node.end_lineno is not None and node.end_lineno - node.lineno >= LONG_LINES]
    assert len(long) == LONG_FUNCTIONS, f"take a function apart by what it does: {sorted(long, reverse=True)}"
