"""The pages that are made from the code are those on disk, and say all of it. `make reference` makes them anew."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from gputop.advice.finding_pages import SECTIONS, page, prose, title
from gputop.advice.registry import FINDING_IDS
from gputop.commands.arguments import COMMANDS, parser
from gputop.text.markup import plain_lines
from tests.code_blocks import code_blocks
from tests.tool_modules import made_pages, tool

ROOT = Path(__file__).resolve().parents[1]
WORDS = ROOT / "tests" / "advice" / "words"
PROSE = sorted((ROOT / "gputop" / "advice" / "pages").glob("*.md"))


def test_the_pages_on_disk_are_those_that_are_made() -> None:
    kept = tool("make_reference").kept(made_pages())
    stale = [str(path) for path, text in kept.items()
             if not (ROOT / "docs" / path).is_file() or (ROOT / "docs" / path).read_text("utf-8") != text]
    assert not stale, f"make reference: {stale}"
    on_disk = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs" / "findings").glob("*.md")}
    assert on_disk == {path for path in kept if path.parts[0] == "findings"}
    only_on_the_site = made_pages().keys() - kept.keys()
    assert len(only_on_the_site) == 5 and not [path for path in only_on_the_site if (ROOT / "docs" / path).exists()]


def test_pages_of_another_checkout_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tool("make_reference")
    (tmp_path / "docs" / "findings").mkdir(parents=True)
    only_there = tmp_path / "docs" / "findings" / "of_that_checkout.md"
    only_there.write_text("x")
    monkeypatch.setattr(module, "DOCS", tmp_path / "docs")
    assert module.main() == 1 and [*only_there.parent.iterdir()] == [only_there]


def test_all_commands_keys_and_variables_are_in_them() -> None:
    module, commands = tool("make_reference"), made_pages()[Path("reference/commands.md")]
    assert all(f"## gputop {name}\n" in commands for name in COMMANDS)
    assert {*module.modules_with_keys()} == {*module._SCREENS}
    code = "\n".join(path.read_text() for path in (ROOT / "gputop").rglob("*.py"))
    read = {name for name in re.findall(r"GPUTOP_[A-Z]+(?:_[A-Z]+)*", code) if name != "GPUTOP_PROMETHEUS"}
    assert read == {name for name in module.ENVIRONMENT if name.startswith("GPUTOP_")}
    assert not [name for name in module.ENVIRONMENT if name.split("_")[-1] not in code]


def test_all_commands_that_print_json_are_listed() -> None:
    (listed,) = re.findall(r"messages on stderr: (.*?)\. \[JSON\]", made_pages()[Path("reference/commands.md")], re.S)
    assert re.findall(r"`(\w+)`", listed) == sorted(
        name for name, own in parser()._commands.choices.items()  # type: ignore[attr-defined]
        if "--json" in own._option_string_actions)


def test_their_links_lead_to_pages() -> None:
    docs = ROOT / "docs"
    for made, text in made_pages().items():
        for target in (target for target in re.findall(r"\]\(([^)#]+)", text) if "://" not in target):
            path = Path(os.path.normpath(docs / made.parent / target))
            assert path.exists() or path.relative_to(docs) in made_pages(), f"{made} links to {target}"


# -- the pages of findings --------------------------------------------------------------------------


def test_each_finding_has_a_page_and_each_page_a_finding() -> None:
    assert {path.stem for path in PROSE} == FINDING_IDS
    with pytest.raises(KeyError):
        prose("no_such")


@pytest.mark.parametrize("finding_id", sorted(FINDING_IDS))
def test_a_page_has_all_sections_and_the_example_is_what_the_rule_prints(finding_id: str) -> None:
    text = prose(finding_id)
    assert tuple(re.findall(r"^## (.+)$", text, re.M)) == SECTIONS
    sections = re.split(r"^## .+$", text, flags=re.M)[1:]
    assert all(len(section.split()) >= 6 for section in sections[:2] + sections[4:]) and sections[2].strip()
    assert title(finding_id) == text.splitlines()[0].removeprefix("# ")
    lines = list(plain_lines(page(finding_id), 72))
    assert "How gputop decides" in lines and not any("](" in line or "```" in line for line in lines)
    assert all(len(line) <= 72 or line.startswith("      ") or " " not in line.strip("- >") for line in lines)
    (example,) = re.findall(r"^> (.+)$", text, re.M)
    titles = [*_titles(finding_id), *(_plain(title_) for id_, title_ in _OTHER_TITLES.items() if id_ == finding_id)]
    best = max(difflib.SequenceMatcher(None, _plain(example), words).ratio() for words in titles)
    assert best >= 0.6, (example, titles)


def _titles(finding_id: str) -> Iterator[list[str]]:
    """The titles of the rules' golden words, without figures and names."""
    for path in WORDS.glob("*.txt"):
        own = path.stem.partition("-")[2]
        if finding_id == own or (own, finding_id) in (("tensor_cores_unused", "sixteen_bit_unused"),
                                                      ("replica_imbalance", "gpu0_oversubscribed")):
            yield from (_plain(text.splitlines()[0]) for text in path.read_text().split("\n----\n"))


def _plain(text: str) -> list[str]:
    return [word for word in re.sub(r"<[^>]*>|\S*\d\S*|[%×:,.()]", " ", text).lower().split()
            if word not in ("gpu", "gpus", "step", "steps", "window", "the", "of", "s", "min", "ms")]


# Titles that a verdict chooses among more than the golden words show.
_OTHER_TITLES = {"sixteen_bit_unused": "Matrix kernels in TF32 take 48% of the kernel time",
                 "hardware_error": "GPU 5 had memory errors that ECC could not correct"}


def test_the_languages_of_the_pages_are_known() -> None:
    assert {block.language for block in code_blocks(PROSE)} == {"c", "python", "sh"}
