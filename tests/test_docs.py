"""What the documents point at exists: files, modules, names in them, links and headings."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from gputop.commands.arguments import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", document.read_text()):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        file = (document.parent / path).resolve() if path else document
        assert file.exists(), f"{_name(document)} links to {target}"
        assert not anchor or anchor in _anchors(file), f"{_name(document)} links to {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_files_that_are_named_exist(document: Path) -> None:
    named = re.findall(r"`((?:gputop|tests|benchmarks|screenshots|docs)/[\w./-]+)`", document.read_text())
    absent = [path for path in named if "NAME" not in path and not (ROOT / path).exists()]
    assert not absent, f"{_name(document)} names {absent}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_modules_and_names_that_are_named_exist(document: Path) -> None:
    for dotted in set(re.findall(r"`(gputop(?:\.\w+)+)", document.read_text())):
        parts = dotted.split(".")
        if parts[-1] in ("json", "toml"):  # a file
            continue
        for length in range(len(parts), 0, -1):
            try:
                value = importlib.import_module(".".join(parts[:length]))
            except ModuleNotFoundError:
                continue
            for attribute in parts[length:]:
                assert hasattr(value, attribute), f"{_name(document)} names {dotted}"
                value = getattr(value, attribute)
            break


def test_the_examples_of_the_python_api_run(monkeypatch: pytest.MonkeyPatch,
                                            capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    examples = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "API.md").read_text(), re.M | re.S)
    for example in examples:
        exec(compile(example, "docs/API.md", "exec"), {})
    output = capsys.readouterr().out
    assert examples and "input_bound" in output


def test_the_table_of_packages_has_the_order_that_the_linter_holds() -> None:
    settings = (ROOT / "pyproject.toml").read_text()
    layers = re.search(r'name = "Packages in layers".*?layers = \[(.*?)\]', settings, re.S)
    assert layers is not None
    table = re.findall(r"^\| `gputop/(\w+)(?:\.py)?` \|", (ROOT / "docs" / "ARCHITECTURE.md").read_text(), re.M)
    assert table == re.findall(r'"gputop\.(\w+)"', layers[1])[::-1]


def test_the_readme_names_every_command() -> None:
    rows = re.findall(r"^\| (`gputop .*?) \|", (ROOT / "README.md").read_text(), re.M)
    assert {name for row in rows for name in re.findall(r"`gputop (\w+)", row)} == set(COMMANDS)


def test_comments_cite_only_documents_that_exist() -> None:
    for file in (ROOT / "gputop").rglob("*.py"):
        for cited in re.findall(r"docs/[A-Z_]+\.md", file.read_text()):
            assert (ROOT / cited).exists(), f"{_name(file)} cites {cited}"


def test_the_readme_can_be_read_in_two_minutes() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
