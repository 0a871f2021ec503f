"""Episodes as the page shows them: a line of a list, a window of tokens with their texts, and full-text search.

From a run's logs (episode_store.py) to values of JSON. All that can be long is cut here, and says how long it was: what
an agent or a server wrote may be of any size, and of any bytes.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxagent.config import ConfigError
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.observe.earlier_episodes import EARLIER
from jaxagent.observe.episode_store import INDEX, Learnt, StoredEpisodes
from jaxagent.types import Episode, TokenKind, Trajectory, UntrainedConversation

HEAD_TOKENS, TAIL_TOKENS = 1200, 2400  # of a trajectory that is longer, unless a window is asked for
MOST_TOKENS = 6000  # of a window
HEAD_CHARS, TAIL_CHARS = 4000, 8000  # of any other text
PREVIEW_CHARS = 240

Table = Sequence[bytes] | None  # the bytes of every token of the run's tokenizer; None: it is not there


def logs(folder: Path) -> list[str]:
    """The names of the logs of episodes in a folder, those of earlier versions last."""
    names = [path.name.removesuffix(INDEX) for path in folder.glob(f"*{INDEX}")]
    return sorted(names, key=lambda name: (name.startswith(EARLIER), name))


def token_table(workdir: Path, config: Mapping[str, Any]) -> Table:
    """The bytes of the run's tokens; None where its tokenizer is not found."""
    named = [(config.get(section) or {}).get("path", "") for section in ("tokenizer", "model")]
    for folder in (*filter(None, named), workdir / "tokenizer", workdir / "policy"):
        try:
            return Tokenizer.load(folder).token_bytes()
        except (ConfigError, OSError):
            continue
    return None


def token_texts(tokens: Sequence[int], table: Table) -> list[str]:
    """The text of every token, the number where it is not known; a character of several tokens is the last one's."""
    if table is None or max(tokens, default=-1) >= len(table):
        return [f" {token}" for token in tokens]
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    texts = [decoder.decode(table[token]) for token in tokens]
    if texts:
        texts[-1] += decoder.decode(b"", final=True)
    return texts


def cut(text: str, head: int = HEAD_CHARS, tail: int = TAIL_CHARS) -> list[Any]:
    """[text], or [head, characters left out, tail] of a longer one."""
    if len(text) <= head + tail:
        return [text]
    return [text[:head], len(text) - head - tail, text[len(text) - tail :]]


def preview(text: str, prompt: str) -> dict[str, str]:
    """A line of a list: how the task begins, and what was written last."""
    return {"prompt": prompt[:PREVIEW_CHARS], "end": text[-PREVIEW_CHARS:]}


def previews(log: StoredEpisodes, rows: Sequence[int]) -> dict[int, dict[str, str] | None]:
    """Previews by row; None where the text was given up. Raises ConfigError: no such row, or damage."""
    out: dict[int, dict[str, str] | None] = {}
    texts: dict[int, list[list[str]] | None] = {}
    for row in rows:
        block = log.block_of(row)
        if block["first"] not in texts:
            texts[block["first"]] = log.texts(block)
        own = texts[block["first"]]
        out[row] = None if own is None else preview(*own[row - block["first"]][:2])
    return out


def search(log: StoredEpisodes, words: str) -> list[int]:
    """The rows in whose texts all the words stand, whatever their case. Raises ConfigError: damage."""
    wanted = words.lower().split()
    rows = []
    for block in log.blocks:
        texts = log.texts(block)
        for row, parts in enumerate(texts or ()):
            text = "\n".join(parts).lower()
            if all(word in text for word in wanted):
                rows.append(block["first"] + row)
    return rows


def shown(log: StoredEpisodes, row: int, table: Table) -> dict[str, Any] | None:
    """One episode; None where it was given up. Raises ConfigError: no such row, or damage."""
    block = log.block_of(row)
    episodes = log.with_learnt(block)
    if episodes is None:
        return None
    episode, learnt = episodes[row - block["first"]]
    return {"step": block["step"], **episode_values(episode, learnt, table)}


def window(log: StoredEpisodes, row: int, number: int, first: int, table: Table) -> dict[str, Any]:
    """The tokens of trajectory `number` from `first` on, MOST_TOKENS at most. Raises ConfigError: there is none."""
    block = log.block_of(row)
    episodes = log.with_learnt(block)
    episode, learnt = episodes[row - block["first"]] if episodes else (None, [])
    if episode is None or not (0 <= number < len(learnt) and 0 <= first < len(episode.trajectories[number])):
        raise ConfigError(f"{log.name}, episode {row}: no token {first} of trajectory {number}.")
    return tokens_of(episode.trajectories[number], learnt[number], slice(first, first + MOST_TOKENS), table)


def episode_values(episode: Episode, learnt: Sequence[Learnt | None], table: Table) -> dict[str, Any]:
    """An episode as values of JSON, none of them longer than the bounds above."""
    task = episode.task
    failed = episode.stop_reason.is_failure
    return {
        "task": task.id,
        "kind": task.kind,
        "prompt": cut(task.prompt),
        "answers": [cut(answer, 400, 400) for answer in task.answers[:20]],
        "sample": episode.sample,
        "reward": None if failed else episode.total_reward,
        "rewards": {name: number(value) for name, value in episode.rewards.items()},
        "turn_rewards": [number(value) for value in episode.turn_rewards[:1000]],
        "stop": str(episode.stop_reason),
        "error": cut(episode.error, 2000, 2000),
        "turns": episode.turns,
        "metrics": {name: number(value) for name, value in list(episode.metrics.items())[:200]},
        "trajectories": [
            _trajectory(trajectory, own, table) for trajectory, own in zip(episode.trajectories, learnt, strict=True)
        ],
        "heard": [_heard(conversation) for conversation in episode.heard],
        **({} if episode.trajectories else {"text": cut(episode.text)}),
    }


def number(value: Any) -> float | None:
    """What JSON has of a number."""
    return float(value) if np.isfinite(value) else None


def _heard(conversation: UntrainedConversation) -> dict[str, Any]:
    turns = list(conversation.turns)
    return {
        "role": conversation.role,
        "after": conversation.after,
        "turns": [[cut(message), cut(reply)] for message, reply in turns[:200]],
        "more": max(0, len(turns) - 200),
    }


def _trajectory(trajectory: Trajectory, learnt: Learnt | None, table: Table) -> dict[str, Any]:
    """Its length and one or two windows."""
    length = len(trajectory)
    whole = length <= HEAD_TOKENS + TAIL_TOKENS
    parts = [slice(0, length)] if whole else [slice(0, HEAD_TOKENS), slice(length - TAIL_TOKENS, length)]
    return {"length": length, "windows": [tokens_of(trajectory, learnt, part, table) for part in parts]}


def tokens_of(trajectory: Trajectory, learnt: Learnt | None, part: slice, table: Table) -> dict[str, Any]:
    """A window of tokens: texts and kinds of each, and of sampled ones what engine and trainer say of them.

    "logprob", "version", "gap", "advantage" and "mask" have an entry per sampled token. "gap" is the trainer's log-prob
    less the engine's, null where it was not kept; the three of the trainer are not there of what was not trained.
    """
    kinds = trajectory.kinds[part]
    actions = kinds == TokenKind.ACTION
    logprobs = trajectory.logprobs[part][actions]
    values: dict[str, Any] = {
        "first": part.start,
        "text": token_texts(trajectory.tokens[part].tolist(), table),
        "kind": "".join(map(str, kinds.tolist())),
        "turn": list(runs(trajectory.turns[part].tolist())),
        "logprob": _rounded(logprobs, 4),
        "version": list(runs(trajectory.policy_versions[part][actions].tolist())),
    }
    if learnt is not None:
        gaps = learnt.logprobs[part][actions] - logprobs
        values |= {
            "advantage": _rounded(learnt.advantages[part][actions], 5),
            "mask": "".join("01"[int(counts)] for counts in learnt.mask[part][actions]),
        }
        if np.isfinite(gaps).any():
            values["gap"] = _rounded(gaps, 7)
    return values


def _rounded(values: np.ndarray, digits: int) -> list[float | None]:
    return [round(value, digits) if np.isfinite(value) else None for value in values.tolist()]


def runs(values: Sequence[int]) -> Iterator[int]:
    """count, value, count, value, ..."""
    at = 0
    while at < len(values):
        end = at
        while end < len(values) and values[end] == values[at]:
            end += 1
        yield from (end - at, values[at])
        at = end


def embedded(value: Any) -> str:
    """A value as JSON that can stand in a script of a page: no tag can begin in it."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
