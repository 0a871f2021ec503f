"""What a turn says, as its tokens come in: ids -> text up to a stop string -> text, reasoning and calls."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from jaxagent.data.tokenizer import Tokenizer
from jaxagent.engine.requests import Sampled
from jaxagent.gateway.chat import Answer, Call, Delta, Reasoning
from jaxagent.gateway.cut import Cut
from jaxagent.tools import ToolParser
from jaxagent.types import Generation


@dataclasses.dataclass(frozen=True)
class Begun:
    """The request's context is known and its generation begins."""

    prompt_tokens: int


Event = Begun | Delta


class Reading:
    """Fed with the tokens of one turn.

    Args:
      tokenizer: whose ids they are.
      parser: finds reasoning and calls in the text; a fresh one.
      stops: of the request.
      call_key: what the ids of calls are made of: other turns have others.

    Attributes:
      stop: the stop string of the request that was found, or None.
      taken: how many tokens belong to the turn: all, up to the one that completes a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, parser: ToolParser, stops: Sequence[str], call_key: str) -> None:
        self._tokenizer, self._parser, self._call_key = tokenizer, parser, call_key
        self._cut = Cut(stops, tokenizer.token_bytes())
        self._text, self._reasoning = [], []
        self._calls: list[Call] = []
        self._offsets: list[int] = []
        self.taken = 0

    @property
    def stop(self) -> str | None:
        """The stop string of the request that was found, or None."""
        return self._cut.stop

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        """What the tokens add to the answer. The token that ends a turn has no text."""
        if self.stop is not None:  # sampled before the engine heard of it
            return []
        text = ""
        for token in ids:
            self.taken += 1
            self._offsets.append(self._cut.characters)
            if token not in self._tokenizer.eos_ids:
                text += self._cut.feed([token])[0]
                if self.stop is not None:
                    break
        return self._take(self._parser.feed(text)) if text else []

    def end(self) -> list[Delta]:
        """The rest: no token follows."""
        rest = self._cut.flush()
        return self._take([*(self._parser.feed(rest) if rest else ()), *self._parser.end()])

    def answer(self, prompt_ids: Sequence[int], generation: Generation, whole: bool) -> Answer:
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
            cached_tokens=generation.cached_tokens if whole else None,
            text_offsets=tuple(self._offsets),
        )

    def _take(self, deltas: Sequence[Delta]) -> list[Delta]:
        taken: list[Delta] = []
        for delta in deltas:
            if isinstance(delta, Call):
                delta = dataclasses.replace(delta, id=self._call_id())
                self._calls.append(delta)
            elif isinstance(delta, Reasoning):
                self._reasoning.append(delta.text)
            else:
                self._text.append(delta.text)
            taken.append(delta)
        return taken

    def _call_id(self) -> str:
        text = f"{self._call_key}\0{len(self._calls)}"
        return f"call_{hashlib.blake2b(text.encode(), digest_size=12).hexdigest()}"


def generation_of(pieces: Sequence[Sampled], count: int) -> Generation:
    """The first `count` tokens of a turn, which ended there with a stop string that the engine did not know."""
    columns = [np.concatenate([getattr(p, name) for p in pieces]) for name in ("tokens", "logprobs", "versions")]
    tokens, logprobs, versions = (column[:count] for column in columns)
    return Generation(tokens, logprobs, versions, "stop")
