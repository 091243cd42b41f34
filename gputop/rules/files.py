"""Where rules of one's own stand, and reading them: the user's file, those given by --rules, and a project's.

Expressions can do no harm, but a file can set limits, and its advice is read as advice. So a file that gputop finds by
itself is read only if no other user could have written it (:func:`gputop.core.files.open_trusted`): the ``gputop.toml``
of the folder gputop was started in may be anybody's, and with sudo -E so may the user's own. A file that the user names
is read whoever owns it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from gputop.core.files import UnsafeFile, open_regular, open_trusted

if TYPE_CHECKING:
    from gputop.rules.rule_file import RuleFile

PROJECT_FILE = "gputop.toml"
USER_FILE = "rules.toml"  # beside the file of settings


class RulePath(NamedTuple):
    """``by``: why it is read: the user's own, of the project, or named by the user."""

    path: str
    by: Literal["user", "project", "named"]


def rule_paths(settings: Path | None, named: Iterable[str]) -> tuple[RulePath, ...]:
    """The files that there are, in the order in which they count: the user's, the project's, those that are named.

    ``settings`` is the file of settings. One that is named is among them, whether it exists or not.
    """
    found = [RulePath(str(settings.with_name(USER_FILE)), "user")] if settings is not None else []
    found.append(RulePath(PROJECT_FILE, "project"))
    there = [own for own in found if os.path.lexists(own.path)]
    return (*there, *(RulePath(path, "named") for path in named))


def load_rules(paths: Sequence[RulePath]) -> tuple[list[RuleFile], list[str]]:
    """The files as far as they can be read, and a sentence for each that cannot."""
    from gputop.rules.rule_file import MAX_BYTES, read_rules  # no file, as mostly: the first frame does without

    files, unread = [], []
    for own in paths:
        try:
            with (open_regular(own.path, MAX_BYTES) if own.by == "named" else
                  open_trusted(Path(own.path), MAX_BYTES, follow_links=own.by != "project")) as file:
                owner, text = os.fstat(file.fileno()).st_uid, file.read(MAX_BYTES).decode("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            mend = f"; --rules {own.path} reads it anyway" if own.by != "named" and isinstance(
                error, UnsafeFile) else ""
            unread.append(f"{own.path} is not read: {why}{mend}")
        else:
            files.append(read_rules(text.replace("\r\n", "\n"), own.path))
            files[-1].owner = owner
    return files, unread
