"""The code of fixes. It stands once, in the pages of the findings, in fenced blocks with keys that the rules name::

    ```python pytorch ddp THREADS=8

is code for the keys "pytorch" and "ddp". A rule fills in its own value for THREADS; the page itself shows 8. Blocks
with the same key belong together, one below the other. A word with a colon stands for the code of another page: the
block ``input_bound:prefetch`` has no lines of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from msgspec import Struct

_BLOCK = re.compile(r"^```(\w+) *(.*)\n((?:(?!```).*\n)*)```$", re.MULTILINE)
_NAME = re.compile(r"\b[A-Z]{2,}\b")


class _Block(Struct, frozen=True):
    keys: frozenset[str]
    text: str
    shown: Mapping[str, str]  # values by their names in the text

    @classmethod
    def of(cls, match: re.Match[str]) -> _Block:
        shown = dict(word.split("=", 1) for word in match[2].split() if "=" in word)
        words = [word for word in match[2].split() if "=" not in word]
        texts = [code(*word.split(":")) or "" for word in words if ":" in word] or [match[3].removesuffix("\n")]
        return cls(frozenset(word for word in words if ":" not in word), "\n".join(texts), shown)

    def filled(self, values: Mapping[str, object]) -> str:
        return _NAME.sub(lambda name: str(values[name[0]] if name[0] in self.shown.keys() & values.keys() else
                                          self.shown.get(name[0], name[0])), self.text)


@cache
def source_of_page(finding_id: str) -> str:
    """The prose of a finding as it is stored; raises FileNotFoundError for an id that has none."""
    return Path(__file__).with_name("pages").joinpath(f"{finding_id}.md").read_text(encoding="utf-8")


@cache
def _blocks(finding_id: str) -> tuple[_Block, ...]:
    return tuple(map(_Block.of, _BLOCK.finditer(source_of_page(finding_id))))


def code(finding_id: str, *keys: str, **values: object) -> str | None:
    """The code under the first of these keys that the finding's page has, with these values; None: it has none."""
    for key in keys:
        texts = [block.filled(values) for block in _blocks(finding_id) if key in block.keys]
        if texts:
            return "\n".join(texts)
    return None


def code_for(framework: str, finding_id: str, kind: str = "", **values: object) -> str:
    """The code of a fix for a job of this framework; where that is not known TensorFlow's, called so."""
    return code(finding_id, kind + framework, **values) or (
        f"# in TensorFlow:\n{code(finding_id, kind + 'tensorflow', **values)}")


def joined(*codes: str | None) -> str | None:
    """Join pieces of code, one below the other, without those that are None or empty."""
    return "\n".join(filter(None, codes)) or None


def as_shown(source: str) -> str:
    """The prose of a page with its code filled in, and the keys left out."""
    return _BLOCK.sub(lambda match: "```{}\n{}\n```".format(match[1], _Block.of(match).filled({}).strip("\n")), source)
