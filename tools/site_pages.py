"""Copies docs to build/pages for the site, with the pages that come from the code: `make docs`. Links that leave docs
lead to copies, or to the repository.

Pages in docs are plain Markdown whose links and alerts hold in a clone. The generator only knows what is below its
folder. Its settings, ``build/zensical.toml``, are zensical.toml and all findings in the navigation.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

import make_reference

from gputop.advice.finding_pages import title
from gputop.advice.registry import RULES

ROOT = Path(__file__).parents[1]
DOCS, PAGES = ROOT / "docs", ROOT / "build" / "pages"
SETTINGS = ROOT / "build" / "zensical.toml"
REPOSITORY = "https://github.com/gputop/gputop-tf/blob/main/"
# Files and folders beyond docs that the site has as well, and where.
COPIED = {"CONTRIBUTING.md": "contributing/README.md", "screenshots": "screenshots"}
REFERENCE = Path("docs/reference/README.md")
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")
_ALERT = re.compile(r"^> \[!(\w+)\]\n((?:>.*\n?)+)", re.M)  # of GitHub: the generator has admonitions
_IMAGE = re.compile(r"^!\[([^\]]*)\]\(([^)\s]+)\)$", re.M)
ALL_FINDINGS = '    { "All findings" = "findings/README.md" },\n'  # in zensical.toml


def rewritten(text: str, source: Path, target: Path) -> str:
    """The text of a page with its links as they hold at ``target``, a path below the pages; ``source`` is its file."""
    def link(found: re.Match[str]) -> str:
        path, hash_, anchor = found[2].partition("#")
        if not path or "://" in path:
            return found[0]
        to = Path(os.path.normpath(source.parent / path)).relative_to(ROOT)
        first = to.parts[0]
        if to == REFERENCE and hash_:  # the page that says where to look in a terminal: the site has what it names
            place, hash_, anchor = Path("reference", f"{anchor}.md"), "", ""
        elif first == "docs":
            place = to.relative_to("docs")
        elif first in COPIED:
            place = Path(COPIED[first], *to.parts[1:])
        else:
            return f"{found[1]}{REPOSITORY}{to}{hash_}{anchor}{found[3]}"
        return f"{found[1]}{os.path.relpath(place, target.parent)}{hash_}{anchor}{found[3]}"

    return _LINK.sub(link, text)


def for_the_site(text: str) -> str:
    """The text of a page with alerts as admonitions, and each picture a link to itself: a phone can enlarge it."""
    def admonition(found: re.Match[str]) -> str:
        body = re.sub(r"^> ?", "    ", found[2], flags=re.M)
        return f"!!! {found[1].lower()}\n\n{body}"

    return _IMAGE.sub(r"[![\1](\2)](\2)", _ALERT.sub(admonition, text))


def settings() -> str:
    """The generator's settings: zensical.toml with each finding in the navigation, by where it comes from."""
    origins: dict[str, str] = {}
    for rule in RULES:
        for id_ in rule.ids:
            origins.setdefault(id_, rule.origin)
    lines = "".join(
        f"    {{ {json.dumps(heading)} = [\n" + "".join(
            f"      {{ {json.dumps(title(id_))} = \"findings/{id_}.md\" }},\n"
            for id_ in origins if origins[id_] == origin) + "    ] },\n"
        for origin, heading, _ in make_reference.ORIGINS)
    text = (ROOT / "zensical.toml").read_text("utf-8")
    assert ALL_FINDINGS in text, "zensical.toml lacks the page of all findings"
    return text.replace(ALL_FINDINGS, ALL_FINDINGS + lines)


def refuse_links(folder: Path) -> None:
    """A link in a patch would put a file of whoever builds the site on it. Ends the program."""
    for path in (folder, *folder.rglob("*")):
        if path.is_symlink():
            sys.exit(f"{path} is a symbolic link: the site has copies alone")


def main() -> int:
    for name in ("docs", *COPIED):
        refuse_links(ROOT / name)
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.copytree(DOCS, PAGES)
    for path, text in make_reference.pages().items():
        (PAGES / path).parent.mkdir(parents=True, exist_ok=True)
        (PAGES / path).write_text(text, "utf-8")
    for name, place in COPIED.items():
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, PAGES / place, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
        else:
            shutil.copy(ROOT / name, PAGES / place)
    for page in PAGES.rglob("*.md"):
        target = page.relative_to(PAGES)
        source = next((ROOT / name for name, place in COPIED.items() if Path(place) == target), DOCS / target)
        page.write_text(for_the_site(rewritten(page.read_text("utf-8"), source, target)), "utf-8")
    SETTINGS.write_text(settings(), "utf-8")
    print(f"{PAGES}: {sum(1 for _ in PAGES.rglob('*.md'))} pages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
