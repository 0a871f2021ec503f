"""What the engine benchmark asks of every contender: how many tokens come when. NumPy only.

Lengths depend on the seed alone and token ids on the repetition, so that every repetition is the same work on text
that no cache has seen before, and a peer that compiles per shape compiles once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

MIN_TURN, MAX_TURN = 4, 128  # sampled tokens of one turn
MIN_OBSERVATION, MAX_OBSERVATION = 20, 200  # tokens of one observation
MIN_TURNS, MAX_TURNS = 2, 8
_FIRST_ID = 1  # 0 is every peer's padding


@dataclasses.dataclass(frozen=True)
class Turn:
    """One turn: what is appended to the sequence (prompt or observation), and how many tokens are then sampled."""

    given: np.ndarray  # i32[n]
    sampled: int


Episode = tuple[Turn, ...]


def prompts(repetition: int, count: int, length: int, vocab_size: int) -> np.ndarray:
    """Random prompts i32[count, length]."""
    return _text(np.random.default_rng((1, repetition)), count * length, vocab_size).reshape(count, length)


def static(repetition: int, count: int, prompt_tokens: int, new_tokens: int, vocab_size: int) -> list[Episode]:
    """Episodes of one turn, all of the same lengths."""
    return [(Turn(row, new_tokens),) for row in prompts(repetition, count, prompt_tokens, vocab_size)]


def ragged(
    repetition: int, count: int, prompt_tokens: int, vocab_size: int, seed: int = 0, max_turns: int = MAX_TURNS
) -> list[Episode]:
    """Episodes of 2 to `max_turns` turns: turn lengths from a heavy tail, observations of 20 to 200 tokens.

    Half of the turns are shorter than 24 tokens, one in twenty is longer than 120: a search call beside a long thought.
    """
    sizes = np.random.default_rng(seed)
    text = np.random.default_rng((2, repetition))
    episodes = []
    for _ in range(count):
        turns = int(sizes.integers(MIN_TURNS, max_turns + 1))
        sampled = np.clip(np.round(sizes.lognormal(np.log(24), 1.0, turns)), MIN_TURN, MAX_TURN).astype(int)
        given = sizes.integers(MIN_OBSERVATION, MAX_OBSERVATION + 1, turns)
        given[0] = prompt_tokens
        episodes.append(
            tuple(Turn(_text(text, int(g), vocab_size), int(s)) for g, s in zip(given, sampled, strict=True))
        )
    return episodes


def sampled_tokens(episodes: Sequence[Episode]) -> int:
    """Useful tokens: what a policy would have said."""
    return sum(turn.sampled for episode in episodes for turn in episode)


def lengths(episodes: Sequence[Episode]) -> list[int]:
    """Tokens of each whole sequence."""
    return [sum(len(turn.given) + turn.sampled for turn in episode) for episode in episodes]


def _text(rng: np.random.Generator, count: int, vocab_size: int) -> np.ndarray:
    return rng.integers(_FIRST_ID, vocab_size, count).astype(np.int32)
