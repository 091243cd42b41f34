"""The names in a timeline's file, by number: read one by one, and searched all at once."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

_NAMES_KEPT = 20_000


class Texts:
    """The names of ranges and ops. Those read last are kept as strings, and what the last search found."""

    def __init__(self, columns: Mapping[str, npt.NDArray]) -> None:
        self._text, self._ends = columns["text"], columns["text_end"]
        self._folded, self._folded_ends = columns["folded"], columns["folded_end"]
        self._kept: dict[int, str] = {}
        self._search: tuple[str, npt.NDArray[np.bool_]] = "", np.empty(0, np.bool_)

    def __getitem__(self, name: int) -> str:
        """The name of that number; of a negative one empty."""
        if name < 0:
            return ""
        text = self._kept.get(name)
        if text is None:
            first = int(self._ends[name - 1]) if name else 0
            text = self._text[first:int(self._ends[name]) - 1].tobytes().decode("utf-8", "replace")
            if len(self._kept) >= _NAMES_KEPT:
                self._kept.clear()
            self._kept[name] = text
        return text

    def containing(self, text: str) -> npt.NDArray[np.bool_]:
        """Mask of the names that contain this text, in any case; the last entry, False, answers for no name."""
        folded = text.casefold()
        if self._search[0] != folded or not len(self._search[1]):
            ends = self._folded_ends
            mask = np.zeros(len(ends) + 1, np.bool_)
            if folded and "\n" not in folded and len(ends):
                # One match for each name: the rest of the name is part of the match.
                sought = re.compile(re.escape(folded.encode("utf-8", "replace")) + rb"[^\n]*")
                hits = [match.start() for match in sought.finditer(self._folded.data)]
                mask[np.searchsorted(ends, hits, side="right")] = True
            self._search = folded, mask
        return self._search[1]
