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
from jaxagent.gateway.renderer import Context
from jaxagent.gateway.threads import DIGEST_BYTES, End, Thread, idle_or_first
from jaxagent.types import TokenKind

ID_BYTES = 4


class Prompts:
    """The turns of a session's completions."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Trajectory, end of a turn, and whether what stands for it lacks what closed the turn: then it is the turn only
        # where more follows. By (is it text, digest of the beginning of a prompt).
        self._places: dict[tuple[bool, bytes], list[tuple[Thread, End, bool]]] = {}
        self._sizes: dict[bool, set[int]] = {True: set(), False: set()}  # of the texts and of the ids, in bytes

    def match(self, prompt: str | tuple[int, ...]) -> tuple[Thread, End] | None:
        """The longest beginning of a prompt that is a trajectory's up to the end of a turn, found in one pass.

        Of several trajectories, one that ends there and is idle comes first, and of these the youngest.
        """
        text = isinstance(prompt, str)
        data = prompt.encode() if isinstance(prompt, str) else _id_bytes(prompt)
        digest, at, base = hashlib.blake2b(digest_size=DIGEST_BYTES), 0, None
        for size in sorted(self._sizes[text]):
            if size > len(data):
                break
            digest.update(data[at:size])
            at = size
            if text and 0x80 <= (data[size : size + 1] or b"\0")[0] < 0xC0:
                continue  # within a character: what is left would be no text
            places = self._places.get((text, digest.digest()), ())
            ends = [(thread, end) for thread, end, is_closed in places if size < len(data) or not is_closed]
            if ends:
                base = idle_or_first(ends)
        return base

    def add(self, thread: Thread, end: End, prompt: str | tuple[int, ...], answer: Answer) -> None:
        """Notes what the trajectory sampled for a prompt.

        Ids stand for the turn when they are all tokens up to its end. A text does when it is the prompt, as it was sent
        or as its tokens say it, and then the turn: the text of its tokens; or the text that was answered, with the
        stop string or without. An empty answer, or one that closed and has nothing behind it, is no sign of the turn.
        """

        def note(beginning: bytes, prefix_size: int, text: bool, is_closed: bool) -> None:
            self._sizes[text].add(len(beginning))
            digest = hashlib.blake2b(beginning, digest_size=DIGEST_BYTES).digest()
            place = (thread, dataclasses.replace(end, prefix_size=prefix_size), is_closed)
            self._places.setdefault((text, digest), []).append(place)

        note(_id_bytes(thread.tokens[: end.tokens]), end.tokens, False, False)
        reply_bytes, sampled = answer.text.encode(), self._tokenizer.decode_bytes(answer.tokens.tolist())
        turns = {reply_bytes: answer.finish != "length"} if reply_bytes else {}
        if answer.stop_string is not None:
            turns[reply_bytes + answer.stop_string.encode()] = True
        turns[sampled] = False
        fronts = {self._tokenizer.decode_bytes(answer.prompt_ids)}
        for front in fronts | {prompt.encode()} if isinstance(prompt, str) else fronts:
            for turn, is_closed in turns.items():
                note(front + turn, len(front + turn), True, is_closed)


def behind(prompt: str | tuple[int, ...], base: tuple[Thread, End] | None) -> str | tuple[int, ...]:
    """What of a prompt is new."""
    prefix_size = base[1].prefix_size if base is not None else 0
    return prompt.encode()[prefix_size:].decode() if isinstance(prompt, str) else prompt[prefix_size:]


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
        return Context(ids, [int(TokenKind.OBSERVATION)] * len(ids), thread.tokens[: end.tokens])
    ids = [*tokenizer.prefix_ids, *ids] if isinstance(rest, str) else ids
    if not ids:
        raise BadRequest("'prompt' must not be empty", "prompt")
    return Context(ids, [int(TokenKind.PROMPT)] * len(ids))


def _id_bytes(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, f"<i{ID_BYTES}").tobytes()
