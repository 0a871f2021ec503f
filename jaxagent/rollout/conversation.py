"""`Conversation`: how a trajectory is made. Text becomes tokens once; sampled tokens stay as sampled.

Prompt messages, generations and observations in -> the tokens the engine needs next (`pending`) and, at the end, a
`types.Trajectory` whose tokens are the engine's tokens, one for one. Nothing that was sampled is ever encoded again:
the text of an action is decoded *for parsing only*, and a boundary between two turns is a boundary between tokens.
The gateway makes its trajectories of the same `Columns` (`gateway/threads.py`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from jaxagent.config import ConfigError
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.envs.base import Message, Observation, Transcript
from jaxagent.envs.cast import Spliced, Tokens
from jaxagent.rollout.templates import Plain, Spans, Template
from jaxagent.types import Generation, TokenKind, Trajectory, unrecorded


class Conversation:
    """One growing token sequence. `add_prompt` once, then actions and observations in turn.

    An observation is cut to `observation_tokens`, its head kept; template text does not count.
    """

    def __init__(self, tokenizer: Tokenizer, template: Template, observation_tokens: int):
        self._tokenizer = tokenizer
        self._template = template
        self._observation_tokens = observation_tokens
        self._columns = Columns()
        self._known = 0  # tokens that the engine has been given or has sampled
        self._prompt_text = ""
        self._texts: list[tuple[str, str]] = []  # (action, observation) of every turn so far
        self._action_tokens: list[int] = []  # of every turn so far
        self._ended_by = ""  # the EOS text that the last action ended with
        self._forced = ""  # what the next action must begin with

    def __len__(self) -> int:
        return len(self._columns)

    @property
    def turns(self) -> int:
        """Number of actions so far."""
        return len(self._texts)

    @property
    def pending(self) -> list[int]:
        """Context tokens that the engine has not seen: all that came after the last action."""
        return self._columns.tokens[self._known :]

    @property
    def transcript(self) -> Transcript:
        """The text of everything so far."""
        return Transcript(self._prompt_text, tuple(self._texts), tuple(self._action_tokens))

    def add_prompt(self, messages: Sequence[Message | Spliced]) -> None:
        """Encodes the prompt. With `Plain` it starts with the tokenizer's prefix (a BOS, where it wants one)."""
        if len(self._columns):
            raise ValueError("A conversation has one prompt, and it comes first.")
        prefix = self._tokenizer.prefix_ids if isinstance(self._template, Plain) else ()
        ids = [*prefix, *encode_prompt(self._tokenizer, self._template, messages)]
        self._prompt_text = "".join(message.content for message in messages)
        self._append(ids, [TokenKind.PROMPT] * len(ids))

    def add_action(self, generation: Generation) -> str:
        """Appends sampled tokens and returns their text, without EOS and without bytes past the stop string."""
        ids = generation.tokens.tolist()
        body = ids
        self._ended_by = ""
        if generation.finish == "eos" and ids and ids[-1] in self._tokenizer.eos_ids:
            body, self._ended_by = ids[:-1], self._tokenizer.decode(ids[-1:])
        raw = self._tokenizer.decode_bytes(body)
        raw = raw[: len(raw) - generation.overshoot_bytes]
        text, self._forced = self._forced + raw.decode("utf-8", errors="replace"), ""
        self._texts.append((text, ""))
        self._action_tokens.append(len(ids))
        self._columns.append_action(self._turn, generation)
        if ids:  # an empty generation means that the context was full: the engine did not take what was pending
            self._known = len(self._columns)
        return text

    def force(self, text: str, room: int) -> bool:
        """Begins the next action with words that the policy did not choose; False, and nothing, if they need `room`.

        They are context of kind PROMPT: no log-prob, no loss. The text of the action begins with them all the same. Of
        `room` free tokens one must stay for the policy.
        """
        ids = self._tokenizer.encode(text)
        if len(ids) >= room:
            return False
        self._append(ids, [TokenKind.PROMPT] * len(ids))
        self._forced = text
        return True

    def add_demonstration(self, text: str, stop_strings: Sequence[str]) -> None:
        """Appends a demonstrated action: encoded text that counts as ACTION, with log-prob 0 and no policy version.

        It ends where a generation would: behind the first stop string that is complete, or else with the token that
        ends a message.

        Raises:
          ConfigError: no stop string is complete, and the tokenizer has no token that ends a message.
        """
        text = self._tokenizer.normalize(text)
        ends = [at + len(stop) for stop in stop_strings if (at := text.find(stop)) >= 0]
        ids = self._tokenizer.encode(text[: min(ends, default=None)])
        eos_index = next((i for i, token in enumerate(ids) if token in self._tokenizer.eos_ids), None)
        if eos_index is not None:
            ids = ids[: eos_index + 1]
        elif not ends:
            ids.append(self._end_of_message())
        body = ids[:-1] if ids[-1] in self._tokenizer.eos_ids else ids
        self._ended_by = self._tokenizer.decode(ids[len(body) :])
        self._texts.append((self._tokenizer.decode(body), ""))
        self._action_tokens.append(len(ids))
        self._append(ids, [TokenKind.ACTION] * len(ids))
        self._known = len(self._columns)

    def add_observation(self, observation: Observation) -> str:
        """Encodes an observation once, cuts it to the limit, and returns the text that was kept."""
        if not self._texts or self._known != len(self._columns):
            raise ValueError("An observation follows an action.")
        ids, kinds = encode_spans(self._tokenizer, self._template.observation(observation, self._ended_by))
        text = observation.text
        body = [i for i, kind in enumerate(kinds) if kind != TokenKind.PROMPT]
        if len(body) > self._observation_tokens:
            cut = slice(body[self._observation_tokens], body[-1] + 1)
            text = self._tokenizer.decode([ids[i] for i in body[: self._observation_tokens]])
            del ids[cut], kinds[cut]
        self._texts[-1] = (self._texts[-1][0], text)
        self._append(ids, kinds)
        return text

    def copied(self) -> None:
        """Makes all so far context of another attempt's: nothing that this one has sampled, or the engine seen."""
        self._columns.unsample()
        self._known = 0

    def differing(self, other: Conversation) -> bool:
        """Whether its tokens are other ones than those that `other` begins with, or end before a turn of it does."""
        end, theirs = len(self), other._columns
        return self._columns.tokens != theirs.tokens[:end] or theirs.turns[end : end + 1] == [self.turns - 1]

    def trajectory(self) -> Trajectory:
        """Everything the engine has seen. An observation that no action followed was never shown, and is left out."""
        return self._columns.trajectory(self._known)

    def _end_of_message(self) -> int:
        """The EOS with which the template closes the policy's message; of a plain text, the tokenizer's own."""
        tokenizer = self._tokenizer
        texts = {i: tokenizer.decode([i]) for i in tokenizer.eos_ids}
        closing = [i for i, text in texts.items() if text and self._template.after_message.startswith(text)]
        own = tokenizer.id_of(tokenizer.special_strings.get("eos_token", ""))
        for token in (*closing, own, *tokenizer.eos_ids):
            if token in tokenizer.eos_ids:
                return token
        raise ConfigError("The tokenizer has no EOS, and a demonstrated action has no stop string: it has no end.")

    def _append(self, ids: Sequence[int], kinds: Sequence[int]) -> None:
        self._columns.append(self._turn, ids, kinds)

    @property
    def _turn(self) -> int:
        """The turn that the next tokens belong to."""
        return max(0, len(self._texts) - 1)


class Columns:
    """What a trajectory is made of, as it grows: one entry per token of each column, see `types.Trajectory`."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.kinds: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.turns: list[int] = []
        self._experts: np.ndarray | None = None  # of the first tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def append(
        self,
        turn: int,
        ids: Sequence[int],
        kinds: Sequence[int],
        logprobs: Sequence[float] | None = None,
        versions: Sequence[int] | None = None,
    ) -> None:
        """Appends tokens of a turn; those that were not sampled have neither log-probs nor policy versions."""
        count = len(ids)
        logprobs = [0.0] * count if logprobs is None else logprobs
        versions = [-1] * count if versions is None else versions
        if not count == len(kinds) == len(logprobs) == len(versions):
            raise ValueError(f"{count} tokens with {len(logprobs)} log-probs and {len(versions)} policy versions.")
        self.tokens.extend(ids)
        self.kinds.extend(kinds)
        self.logprobs.extend(logprobs)
        self.versions.extend(versions)
        self.turns.extend([turn] * count)

    def unsample(self) -> None:
        """Makes all so far context: of kind PROMPT, without log-probs or versions, with the experts that it had."""
        count = len(self)
        self.kinds[:], self.logprobs[:], self.versions[:] = [int(TokenKind.PROMPT)] * count, [0.0] * count, [-1] * count

    def append_action(self, turn: int, generation: Generation) -> None:
        """Appends what the policy sampled in a turn."""
        ids = generation.tokens.tolist()
        logprobs, versions = generation.logprobs.tolist(), generation.policy_versions.tolist()
        self.append(turn, ids, [TokenKind.ACTION] * len(ids), logprobs, versions)
        if generation.experts is not None:
            self._note(generation.experts)

    def _note(self, experts: np.ndarray) -> None:
        """Experts of the tokens before the last one; what is known of a token stays: so it was when it was used."""
        noted = self._told(len(self) - 1, experts)
        own = noted[len(noted) - len(experts) :]
        own[:] = np.where(own[:, :1] == np.iinfo(own.dtype).max, experts, own)
        self._experts = noted

    def _told(self, end: int, like: np.ndarray) -> np.ndarray:
        """What is known of the first `end` tokens, [end, W] like others."""
        known = like[:0] if self._experts is None else self._experts[:end]
        return np.concatenate([known, unrecorded(end - len(known), like.shape[1], like.dtype)])

    def trajectory(self, end: int) -> Trajectory:
        """The first `end` tokens."""
        return Trajectory(
            tokens=np.asarray(self.tokens[:end], np.int32),
            kinds=np.asarray(self.kinds[:end], np.uint8),
            logprobs=np.asarray(self.logprobs[:end], np.float32),
            policy_versions=np.asarray(self.versions[:end], np.int32),
            turns=np.asarray(self.turns[:end], np.int32),
            experts=None if self._experts is None else self._told(end, self._experts),
        )


def encode_spans(tokenizer: Tokenizer, spans: Spans) -> tuple[list[int], list[int]]:
    """The tokens of consecutive spans, encoded as one text, and the kind of each."""
    spans = [(tokenizer.normalize(text), kind) for text, kind in spans]
    ids = tokenizer.encode("".join(text for text, _ in spans))
    if all(kind == TokenKind.PROMPT for _, kind in spans):
        return ids, [int(TokenKind.PROMPT)] * len(ids)
    return ids, span_kinds(spans, tokenizer.byte_lengths[ids])


def span_kinds(spans: Spans, lengths: Sequence[int] | np.ndarray) -> list[int]:
    """The kind of every token, given each token's length in bytes: the kind of the span it lies in.

    A token across spans of different kinds is PROMPT if template text is in it, else WARNING: an OBSERVATION token
    holds nothing but the environment's words, which is what makes it a fair target of ECHO.
    """
    if not len(lengths):
        return []
    lengths = np.asarray(lengths)
    ends = np.cumsum(lengths)
    # Which spans each token touches: from the one with its first byte to the one with its last.
    borders = np.cumsum([len(text.encode()) for text, _ in spans])
    first = np.searchsorted(borders, ends - lengths, side="right")
    last = np.searchsorted(borders, ends - 1, side="right")
    of_span = [kind for _, kind in spans]
    kinds = np.asarray([*of_span, TokenKind.PROMPT], np.uint8)[first].tolist()
    for at in np.flatnonzero((first != last) | (lengths == 0)).tolist():
        within = spans[first[at] : last[at] + 1] if lengths[at] else []
        touched = {kind for text, kind in within if text}
        kinds[at] = touched.pop() if len(touched) == 1 else _mixed(touched)
    return kinds


def _mixed(touched: set[TokenKind]) -> TokenKind:
    return TokenKind.WARNING if touched and TokenKind.PROMPT not in touched else TokenKind.PROMPT


def encode_prompt(tokenizer: Tokenizer, template: Template, messages: Sequence[Message | Spliced]) -> list[int]:
    """The token ids of a prompt. A boundary between a text and spliced tokens is a boundary between tokens."""
    texts = [message for message in messages if isinstance(message, Message)]
    if len(texts) < len(messages):
        return _encode_spliced(tokenizer, template, messages)
    return tokenizer.encode(template.prompt(texts))


def _encode_spliced(tokenizer: Tokenizer, template: Template, messages: Sequence[Message | Spliced]) -> list[int]:
    """The template renders marks, and the tokens take the marks' places as they are.

    Raises ValueError where the template does not show a message's tokens, or shows them twice.
    """
    mark = _unused([message.content for message in messages])
    tokens: list[Tokens] = []

    def marked(message: Message | Spliced) -> Message:
        if isinstance(message, Message):
            return message
        parts = []
        for piece in message.pieces:
            if not isinstance(piece, str):
                tokens.append(piece)
                piece = f"{mark}{len(tokens) - 1}{mark}"
            parts.append(piece)
        return Message(message.role, "".join(parts))

    text = template.prompt([marked(message) for message in messages])
    # re.split keeps what stands in the group: text, number, text, number, ..., text
    pieces = re.split(f"{re.escape(mark)}([0-9]+){re.escape(mark)}", text)
    if [int(number) for number in pieces[1::2]] != list(range(len(tokens))):
        raise ValueError("The chat template does not show each spliced piece of the prompt once and in its place.")
    ids: list[int] = []
    for at, piece in enumerate(pieces):
        ids += tokens[int(piece)].ids if at % 2 else tokenizer.encode(piece)
    return ids


def _unused(texts: Sequence[str]) -> str:
    """Plain letters that occur in none of the texts: no template trims, escapes or strips them."""
    number = 0
    while any((mark := f"SPLICED{number}X") in text for text in texts):
        number += 1
    return mark
