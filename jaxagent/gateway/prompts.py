"""Completions in a session: a prompt that begins as a trajectory does goes on with the trajectory's own tokens.

prompt (text or ids) -> the longest turn that it begins with, and the tokens of what stands behind that turn. Texts are
compared byte for byte, ids one by one. A client appends the text that it was answered, and that lacks the stop string
and the EOS token, which the trajectory has: `Prompts.add` says which texts stand for a turn. See docs/gateway.md.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from jaxagent.data.tokenizer import Tokenizer
from jaxagent.gateway.chat import Answer, BadRequest
from jaxagent.gateway.contexts import Context
from jaxagent.gateway.threads import DIGEST_BYTES, End, Thread, is_tip
from jaxagent.types import TokenKind

ID_BYTES = 4


@dataclasses.dataclass(frozen=True)
class _Place:
    """A turn's end, as one beginning of a prompt says it."""

    thread: Thread
    end: End
    closed: bool  # the beginning lacks what closed the turn: so it is the turn only where more follows


class _Beginnings:
    """Finds the longest of many byte strings that another begins with, in one pass over it."""

    def __init__(self) -> None:
        self._places: dict[bytes, list[_Place]] = {}  # by the digest of the beginning
        self._sizes: set[int] = set()  # of all beginnings, in bytes

    def add(self, beginning: bytes, place: _Place) -> None:
        self._sizes.add(len(beginning))
        digest = hashlib.blake2b(beginning, digest_size=DIGEST_BYTES).digest()
        self._places.setdefault(digest, []).append(place)

    def longest(self, data: bytes, text: bool) -> _Place | None:
        """Of several trajectories, one that ends there and is idle comes first, and of these the youngest."""
        digest, at, found = hashlib.blake2b(digest_size=DIGEST_BYTES), 0, None
        for size in sorted(self._sizes):
            if size > len(data):
                break
            digest.update(data[at:size])
            at = size
            if text and 0x80 <= (data[size : size + 1] or b"\0")[0] < 0xC0:
                continue  # within a character: what is left would be no text
            places = [p for p in self._places.get(digest.digest(), ()) if size < len(data) or not p.closed]
            if places:
                found = next((p for p in reversed(places) if is_tip(p.thread, p.end)), places[0])
        return found


class Prompts:
    """The turns of a session's completions.

    Args:
      tokenizer: whose ids they are.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts, self._ids = _Beginnings(), _Beginnings()

    def match(self, prompt: str | tuple[int, ...]) -> tuple[Thread, End] | None:
        """The longest beginning of a prompt that is a trajectory's up to the end of a turn."""
        if isinstance(prompt, str):
            place = self._texts.longest(prompt.encode(), text=True)
        else:
            place = self._ids.longest(_id_bytes(prompt), text=False)
        return None if place is None else (place.thread, place.end)

    def add(self, thread: Thread, end: End, prompt: str | tuple[int, ...], answer: Answer) -> None:
        """Notes what the trajectory sampled for a prompt.

        Ids stand for the turn when they are all tokens up to its end. A text does when it is the prompt, as it was sent
        or as its tokens say it, and then the turn: the text of its tokens; or the text that was answered, with the
        stop string or without. An empty answer, or one that closed and has nothing behind it, is no sign of the turn.
        """
        ids = thread.tokens[: end.tokens]
        self._ids.add(_id_bytes(ids), _Place(thread, dataclasses.replace(end, taken=len(ids)), False))
        said, sampled = answer.text.encode(), self._tokenizer.decode_bytes(answer.tokens.tolist())
        turns = {said: answer.finish != "length"} if said else {}
        if answer.stop_string is not None:
            turns[said + answer.stop_string.encode()] = True
        turns[sampled] = False
        sent = prompt.encode() if isinstance(prompt, str) else b""
        seen = self._tokenizer.decode_bytes(answer.prompt_ids)
        for front in {sent, seen} if isinstance(prompt, str) else {seen}:
            for turn, closed in turns.items():
                beginning = front + turn
                self._texts.add(beginning, _Place(thread, dataclasses.replace(end, taken=len(beginning)), closed))


def behind(prompt: str | tuple[int, ...], base: tuple[Thread, End] | None) -> str | tuple[int, ...]:
    """What of a prompt is new."""
    taken = base[1].taken if base is not None else 0
    return prompt.encode()[taken:].decode() if isinstance(prompt, str) else prompt[taken:]


def build(tokenizer: Tokenizer, rest: str | Sequence[int], base: tuple[Thread, End] | None) -> Context:
    """The context of a prompt: the trajectory's tokens, and behind them what is new, which is an observation.

    Raises:
      BadRequest: there is no token, or one that the tokenizer does not have.
    """
    ids = tokenizer.encode(rest) if isinstance(rest, str) else list(rest)
    wrong = next((i for i in ids if not 0 <= i < tokenizer.vocab_size), None)
    if wrong is not None:
        raise BadRequest(f"'prompt' has the id {wrong}, the tokenizer has ids below {tokenizer.vocab_size}", "prompt")
    if base is not None:
        thread, end = base
        return Context(thread.tokens[: end.tokens], ids, [int(TokenKind.OBSERVATION)] * len(ids))
    ids = [*tokenizer.prefix_ids, *ids] if isinstance(rest, str) else ids
    if not ids:
        raise BadRequest("'prompt' must not be empty", "prompt")
    return Context((), ids, [int(TokenKind.PROMPT)] * len(ids))


def _id_bytes(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, f"<i{ID_BYTES}").tobytes()
