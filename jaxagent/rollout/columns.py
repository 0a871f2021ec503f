"""What trajectories are made of: columns that grow token by token, and text whose every token gets a kind."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxagent.data.tokenizer import Tokenizer
from jaxagent.rollout.templates import Spans
from jaxagent.types import Generation, TokenKind, Trajectory


class Columns:
    """What a trajectory is made of, token by token, as it grows.

    Attributes:
      tokens, kinds, logprobs, versions, turns: one entry per token each, see `types.Trajectory`.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.kinds: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.turns: list[int] = []

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

    def append_action(self, turn: int, generation: Generation) -> None:
        """Appends what the policy sampled in a turn."""
        ids = generation.tokens.tolist()
        logprobs, versions = generation.logprobs.tolist(), generation.policy_versions.tolist()
        self.append(turn, ids, [TokenKind.ACTION] * len(ids), logprobs, versions)

    def trajectory(self, end: int) -> Trajectory:
        """The first `end` tokens."""
        return Trajectory(
            tokens=np.asarray(self.tokens[:end], np.int32),
            kinds=np.asarray(self.kinds[:end], np.uint8),
            logprobs=np.asarray(self.logprobs[:end], np.float32),
            policy_versions=np.asarray(self.versions[:end], np.int32),
            turns=np.asarray(self.turns[:end], np.int32),
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
