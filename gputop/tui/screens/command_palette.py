"""The commands of the palette: in the order of their use, found by any word of what they do."""

from __future__ import annotations

from textual.command import DiscoveryHit, Hit, Hits
from textual.system_commands import SystemCommandsProvider

_SENTENCE_SCORE = 0.1  # score of a word in the sentence, below any match of the title


class Commands(SystemCommandsProvider):
    """Commands in their own order; Textual's sorts by the alphabet and searches titles alone."""

    async def discover(self) -> Hits:
        for title, sentence, run, discover in self.app.get_system_commands(self.screen):
            if discover:
                yield DiscoveryHit(title, run, help=sentence)

    async def search(self, query: str) -> Hits:
        matcher, words = self.matcher(query), query.casefold().split()
        for title, sentence, run, _ in self.app.get_system_commands(self.screen):
            score = matcher.match(title)
            if score <= 0 and all(word in sentence.casefold() for word in words):
                score = _SENTENCE_SCORE
            if score > 0:
                yield Hit(score, matcher.highlight(title), run, help=sentence)
