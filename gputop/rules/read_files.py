"""Files with the user's own rules, and reading them: the user's file, those given by --rules, and a project's.

Expressions can do no harm, but a file can set limits, and its advice is read as advice. So a file that gputop finds by
itself is read only if no other user could have written it (:func:`gputop.core.files.open_trusted`): the ``gputop.toml``
of the folder gputop was started in may be anybody's, and with sudo -E so may the user's own. A file that the user names
is read whoever owns it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from gputop.core.files import UnsafeFile, open_regular, open_trusted

if TYPE_CHECKING:
    from gputop.rules.rule_file import RuleFile

PROJECT_FILE = "gputop.toml"
USER_FILE = "rules.toml"  # beside the file of settings


class RulePath(Struct, frozen=True):
    """``by``: why it is read: the user's own, of the project, or named by the user."""

    path: str
    by: Literal["user", "project", "named"]


def rule_paths(settings: Path | None, named: Iterable[str]) -> tuple[RulePath, ...]:
    """The files that there are, in the order in which they count: the user's, the project's, those that are named.

    ``settings`` is the file of settings. One that is named is among them, whether it exists or not.
    """
    candidates = [RulePath(str(settings.with_name(USER_FILE)), "user")] if settings is not None else []
    candidates.append(RulePath(PROJECT_FILE, "project"))
    existing = [path for path in candidates if os.path.lexists(path.path)]
    return (*existing, *(RulePath(path, "named") for path in named))


def load_rules(paths: Sequence[RulePath]) -> tuple[list[RuleFile], list[str]]:
    """The files as far as they can be read, and a sentence for each that cannot."""
    from gputop.rules.rule_file import MAX_BYTES, read_rules  # no file, as mostly: the first frame does without

    files, unread = [], []
    for rule_path in paths:
        try:
            with (open_regular(rule_path.path, MAX_BYTES) if rule_path.by == "named" else
                  open_trusted(Path(rule_path.path), MAX_BYTES, follow_links=rule_path.by != "project")) as file:
                owner, text = os.fstat(file.fileno()).st_uid, file.read(MAX_BYTES).decode("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            fix = f"; to use it anyway: --rules {rule_path.path}" if rule_path.by != "named" and isinstance(
                error, UnsafeFile) else ""
            unread.append(f"{rule_path.path} is not read: {reason}{fix}")
        else:
            files.append(read_rules(text.replace("\r\n", "\n"), rule_path.path))
            files[-1].owner = owner
    return files, unread
