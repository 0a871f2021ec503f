"""Records of `episodes.jsonl` (data/codec.py, with the text of every token beside it), and how the report shows them.

Token texts are cut from the bytes the tokenizer gives, so that a character split over two tokens is shown with the
token that completes it.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from typing import Any

from jaxagent.data import codec
from jaxagent.types import Episode, TokenKind

Record = dict[str, Any]


def episode_record(episode: Episode, token_bytes: Sequence[bytes], *, stage: str, step: int, split: str) -> Record:
    """One line of `episodes.jsonl`. `token_bytes[id]` are a token's bytes; `split` is e.g. "train" or "eval"."""
    record = {"stage": stage, "step": step, "split": split, **codec.encode_episode(episode)}
    for trajectory in record["trajectories"]:
        trajectory["texts"] = token_texts(trajectory["tokens"], token_bytes)
    return record


def token_texts(tokens: Sequence[int], token_bytes: Sequence[bytes]) -> list[str]:
    """The text of every token; a character of several tokens is the last one's."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    texts = [decoder.decode(token_bytes[token]) for token in tokens]
    if texts:
        texts[-1] += decoder.decode(b"", final=True)
    return texts


def report_record(record: Record, token_bytes: Sequence[bytes] | None = None) -> Record:
    """A line of a log as the report shows it: the task's fields beside the episode's, trajectories as texts.

    A trajectory's columns have one entry per token: text, kind, log-prob (None where not sampled), turn, version. Lines
    of `episodes.jsonl` had this form in earlier versions; those of data/episode_log.py get their texts from
    `token_bytes`, or show the ids. "heard" are the conversations that are not trained, as texts.
    """
    if isinstance(record["task"], str):
        return record
    task = record["task"]
    return {
        "split": "train",
        **record,
        **{key: task[key] for key in ("kind", "prompt", "answers")},
        "task": task["id"],
        "reward": math.fsum((record["reward"], *record.get("turn_rewards", ()))),  # `Episode.total_reward`
        "trajectories": [_columns(t, token_bytes) for t in record["trajectories"]],
        "heard": [
            {key: conversation[key] for key in ("role", "after", "turns")} for conversation in record.get("heard", ())
        ],
    }


def _columns(trajectory: Record, token_bytes: Sequence[bytes] | None) -> dict[str, Sequence[Any]]:
    tokens, kinds = trajectory["tokens"], trajectory["kinds"]
    texts = trajectory.get("texts")
    if texts is None:
        if token_bytes is not None and max(tokens, default=-1) < len(token_bytes):
            texts = token_texts(tokens, token_bytes)
        else:
            texts = [f" {token}" for token in tokens]
    logprobs, versions = iter(trajectory["logprobs"]), iter(trajectory["policy_versions"])
    sampled = [kind == TokenKind.ACTION for kind in kinds]
    return {
        "text": texts,
        "kind": kinds,
        "logprob": [next(logprobs) if action else None for action in sampled],
        "turn": trajectory["turns"],
        "version": [next(versions) if action else -1 for action in sampled],
    }
