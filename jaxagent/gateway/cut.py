"""The text of one choice as its tokens come in, up to the first of the request's own stop strings.

tokens of a dispatch -> text that is certain, and where each token begins in it. The engine's automaton knows the stop
strings it was started with. Those of a request are found here, between two dispatches, and what was sampled beyond one
is thrown away. A stop string's own text is left out, as OpenAI does; its tokens are kept.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class Cut:
    """Fed token by token.

    Attributes:
      stop: the stop string that was found; None: none yet.
      characters: of all tokens so far.
    """

    def __init__(self, stops: Sequence[str], token_bytes: Sequence[bytes]) -> None:
        self.stop: str | None = None
        self._stops = {stop.encode(): stop for stop in stops}
        self._token_bytes = token_bytes
        self._held = b""  # might be the beginning of a stop string
        self._text, self._all = (codecs.getincrementaldecoder("utf-8")(errors="replace") for _ in range(2))
        self.characters = 0

    def feed(self, tokens: Sequence[int]) -> tuple[str, list[int]]:
        """Text that the tokens complete, and where each token begins, up to the one that completes a stop string."""
        text, offsets = "", []
        for token in tokens:
            if self.stop is not None:
                break
            # Ids without an entry (padded vocabulary rows) have no bytes.
            data = self._token_bytes[token] if token < len(self._token_bytes) else b""
            offsets.append(self.characters)
            self.characters += len(self._all.decode(data))
            text += self._text.decode(self._advance(data))
        return text, offsets

    def flush(self) -> str:
        """The rest of the text: no token follows."""
        held, self._held = self._held, b""
        return self._text.decode(b"" if self.stop is not None else held, final=True)

    def _advance(self, data: bytes) -> bytes:
        """Takes the bytes of a token; returns what of the held ones is certainly text."""
        self._held += data
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:  # the one that ends first; of several, the longest
            _, at, stop = min(found)
            self.stop = self._stops[stop]
            return self._held[:at]
        longest = min(len(self._held), max(map(len, self._stops), default=1) - 1)
        keep = next((n for n in range(longest, 0, -1) if self._begins(self._held[-n:])), 0)
        sure = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return sure

    def _begins(self, data: bytes) -> bool:
        return any(stop.startswith(data) for stop in self._stops)
