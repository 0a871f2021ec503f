"""What a turn says, as its tokens come in: ids -> text up to a stop string -> text, reasoning and calls."""

from __future__ import annotations

import codecs
import dataclasses
import hashlib
from collections.abc import Callable, Collection, Sequence

import numpy as np

from jaxagent.data.tokenizer import Tokenizer
from jaxagent.engine.requests import SampledTokens
from jaxagent.gateway.chat import Answer, Call, Delta, Reasoning
from jaxagent.tools import ToolParser
from jaxagent.types import Generation


@dataclasses.dataclass(frozen=True)
class Begun:
    """The request's context is known and its generation begins."""

    prompt_tokens: int


Event = Begun | Delta


class Cut:
    """The text of one choice as its tokens come in, up to the first of the request's own stop strings.

    The engine's automaton knows the stop strings it was started with. Those of a request are found here, between two
    dispatches, and what was sampled beyond one is thrown away. A stop string's own text is left out, as OpenAI does;
    its tokens are kept. Tokens that are `silent`, such as EOS, have no text.

    Attributes:
      stop: the stop string that was found; None: none yet.
      characters: of all tokens so far.
    """

    def __init__(self, stops: Sequence[str], token_bytes: Sequence[bytes], silent: Collection[int] = ()) -> None:
        self.stop: str | None = None
        self._silent = silent
        self._stops = {stop.encode(): stop for stop in stops}
        self._token_bytes = token_bytes
        self._unsure = b""  # might be the beginning of a stop string
        self._text, self._all = (codecs.getincrementaldecoder("utf-8")(errors="replace") for _ in range(2))
        self.characters = 0

    def feed(self, tokens: Sequence[int]) -> tuple[str, list[int]]:
        """Text that the tokens complete, and where each token begins, up to the one that completes a stop string."""
        text, offsets = "", []
        for token in tokens:
            if self.stop is not None:
                break
            # Ids without an entry (padded vocabulary rows) have no bytes.
            seen = token < len(self._token_bytes) and token not in self._silent
            data = self._token_bytes[token] if seen else b""
            offsets.append(self.characters)
            self.characters += len(self._all.decode(data))
            text += self._text.decode(self._advance(data))
        return text, offsets

    def flush(self) -> str:
        """The rest of the text: no token follows."""
        rest, self._unsure = self._unsure, b""
        return self._text.decode(b"" if self.stop is not None else rest, final=True)

    def _advance(self, data: bytes) -> bytes:
        """Takes the bytes of a token; returns what of the unsure ones is certainly text."""
        self._unsure += data
        places = [(at + len(stop), at, stop) for stop in self._stops if (at := self._unsure.find(stop)) >= 0]
        if places:  # the one that ends first; of several, the longest
            _, at, stop = min(places)
            self.stop = self._stops[stop]
            return self._unsure[:at]
        longest = min(len(self._unsure), max(map(len, self._stops), default=1) - 1)
        ends = (n for n in range(longest, 0, -1) for stop in self._stops if stop.startswith(self._unsure[-n:]))
        keep = next(ends, 0)
        sure = self._unsure[: len(self._unsure) - keep]
        self._unsure = self._unsure[len(self._unsure) - keep :]
        return sure


class Reading:
    """Fed with the tokens of one turn.

    Args:
      tokenizer: whose ids they are.
      parser: finds reasoning and calls in the text; a fresh one.
      stops: of the request.
      call_key: what the ids of calls are made of: other turns have others.
      tell: called with what the tokens add to the answer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        parser: ToolParser,
        stops: Sequence[str],
        call_key: str,
        tell: Callable[..., None],
    ) -> None:
        self._tokenizer, self._parser, self._call_key, self._tell = tokenizer, parser, call_key, tell
        self.stops = tuple(stops)
        self._cut = Cut(stops, tokenizer.token_bytes(), tokenizer.eos_ids)
        self._text, self._reasoning = [], []
        self._calls: list[Call] = []
        self._offsets: list[int] = []

    @property
    def taken(self) -> int:
        """How many tokens belong to the turn: all, up to the one that completes a stop string."""
        return len(self._offsets)

    @property
    def stop(self) -> str | None:
        """The stop string of the request that was found, or None."""
        return self._cut.stop

    def feed(self, ids: Sequence[int]) -> None:
        """Reads more tokens. Behind a stop string none counts: it was sampled before the engine heard of that."""
        text, offsets = self._cut.feed(ids)
        self._offsets += offsets
        if text:
            self._take(self._parser.feed(text))

    def end(self) -> None:
        """Reads the rest: no token follows."""
        rest = self._cut.flush()
        self._take([*(self._parser.feed(rest) if rest else ()), *self._parser.end()])

    def answer(self, prompt_ids: Sequence[int], generation: Generation, complete: bool) -> Answer:
        """The whole answer, after `end`. Of a turn that was cut at a stop string, nobody knows what was cached."""
        ids = generation.tokens.tolist()
        finish = "tool_calls" if self._calls else "stop"
        if self.stop is not None:
            finish = "stop_sequence"
        elif generation.finish == "length":
            finish = "length"
        return Answer(
            text="".join(self._text),
            reasoning="".join(self._reasoning),
            calls=tuple(self._calls),
            finish=finish,
            stop_string=self.stop,
            prompt_ids=prompt_ids,
            tokens=generation.tokens,
            logprobs=generation.logprobs,
            token_texts=tuple(self._tokenizer.decode([i]) for i in ids),
            cached_tokens=generation.cached_tokens if complete else None,
            text_offsets=tuple(self._offsets),
        )

    def _take(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            if isinstance(delta, Call):
                digest = hashlib.blake2b(f"{self._call_key}\0{len(self._calls)}".encode(), digest_size=12)
                delta = dataclasses.replace(delta, id=f"call_{digest.hexdigest()}")
                self._calls.append(delta)
            else:
                (self._reasoning if isinstance(delta, Reasoning) else self._text).append(delta.text)
            self._tell(delta)


def generation_of(pieces: Sequence[SampledTokens], count: int) -> Generation:
    """The first `count` tokens of a turn, which ended there with a stop string that the engine did not know."""
    columns = [np.concatenate([getattr(p, name) for p in pieces]) for name in ("tokens", "logprobs", "versions")]
    tokens, logprobs, versions = (column[:count] for column in columns)
    return Generation(tokens, logprobs, versions, "stop")
