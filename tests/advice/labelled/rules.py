"""Which finding ids have a rule today, told by the rules themselves."""

from __future__ import annotations

import inspect
from functools import cache

from gputop.advice.trace.advise import RULES
from tests.advice.labelled.case import TRACE_IDS


@cache
def ids_with_rules() -> frozenset[str]:
    """A rule is named after its id; a rule that tells several causes apart names the others in its code."""
    return frozenset(id_ for rule in RULES for id_ in TRACE_IDS
                     if id_ == rule.__name__ or f'"{id_}"' in inspect.getsource(rule))
