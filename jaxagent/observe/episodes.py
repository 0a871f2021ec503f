"""Episodes as records of `episodes.jsonl`: every token with its kind and log-prob, for the report and for people.

Episode in -> a JSON-ready dict. Token texts are cut from the bytes the tokenizer gives, so that a character
split over two tokens is shown with the token that completes it.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from jaxagent.types import Episode, TokenKind, Trajectory


def episode_record(
    episode: Episode, token_bytes: Sequence[bytes], *, stage: str, step: int, split: str
) -> dict[str, Any]:
    """One line of `episodes.jsonl`. `token_bytes[id]` are a token's bytes; `split` is e.g. "train" or "eval"."""
    return {
        "stage": stage,
        "step": step,
        "split": split,
        "task": episode.task.id,
        "kind": episode.task.kind,
        "prompt": episode.task.prompt,
        "answers": list(episode.task.answers),
        "sample": episode.sample,
        "reward": episode.reward,
        "rewards": dict(episode.rewards),
        "turn_rewards": list(episode.turn_rewards),
        "stop_reason": str(episode.stop_reason),
        "error": episode.error,
        "turns": episode.turns,
        "metrics": dict(episode.metrics),
        "trajectories": [_tokens(trajectory, token_bytes) for trajectory in episode.trajectories],
    }


def token_texts(tokens: Sequence[int], token_bytes: Sequence[bytes]) -> list[str]:
    """The text of every token; a character of several tokens is the last one's."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    texts = [decoder.decode(token_bytes[token]) for token in tokens]
    if texts:
        texts[-1] += decoder.decode(b"", final=True)
    return texts


def _tokens(trajectory: Trajectory, token_bytes: Sequence[bytes]) -> dict[str, list[Any]]:
    """Columns, one entry per token: text, kind, log-prob (null where not sampled), turn, policy version."""
    sampled = trajectory.kinds == TokenKind.ACTION
    return {
        "text": token_texts(trajectory.tokens.tolist(), token_bytes),
        "kind": trajectory.kinds.tolist(),
        "logprob": [
            round(value, 5) if action else None
            for value, action in zip(trajectory.logprobs.tolist(), sampled.tolist(), strict=True)
        ],
        "turn": trajectory.turns.tolist(),
        "version": trajectory.policy_versions.tolist(),
    }
