"""Warm-start demonstrations: a jsonl file of episodes -> trajectories, made by the same `Conversation` as rollouts.

A row is {"prompt": question or messages, "turns": [{"action": text, "observation": text or ""}, ...]};
other columns are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grain

from jaxagent.config import ConfigError
from jaxagent.data import files
from jaxagent.envs.base import Environment, Message
from jaxagent.rollout.conversation import Conversation
from jaxagent.types import Trajectory


def load(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a file of demonstrations. Raises ConfigError: no file or rows, a malformed row; names its column."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"There is no file '{path}' of demonstrations.")
    rows = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            row = files.from_json(line, f"{path}, row {number}")
            if problem := _problem(row):
                raise ConfigError(f"{path}, row {number}: {problem}")
            rows.append(row)
    if not rows:
        raise ConfigError(f"{path} has no rows.")
    return rows


def trajectory(row: dict[str, Any], conversation: Conversation, environment: Environment) -> Trajectory:
    """One demonstration as the trajectory that an episode with these texts would have been, token by token.

    A question becomes the environment's prompt; messages are taken as they stand. The conversation is an empty one.
    """
    prompt = row["prompt"]
    if isinstance(prompt, str):
        conversation.add_prompt(environment.messages(prompt))
    else:
        conversation.add_prompt([Message(message["role"], message["content"]) for message in prompt])
    for turn in row["turns"]:
        conversation.add_demonstration(turn["action"], environment.stop_strings)
        if turn["observation"]:
            action = conversation.transcript.turns[-1][0]
            conversation.add_observation(environment.observation(action, turn["observation"]))
    return conversation.trajectory()


def stream(
    rows: Sequence[dict[str, Any]],
    to_trajectory: Callable[[dict[str, Any]], Trajectory],
    batch: int,
    pack: Callable[[list[Trajectory]], Any] = lambda trajectories: trajectories,
):
    """An endless grain iterator over lists of `batch` trajectories, in file order: the writer balances the kinds.

    Its state is one integer, so a resumed run sees the same batches. A thread of grain's makes them, and what `pack`
    makes of them, while the device works on the ones before.
    """
    dataset = grain.MapDataset.source(rows).repeat(None).map(to_trajectory).batch(batch, batch_fn=list).map(pack)
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)))


def _problem(row: Any) -> str:
    if not isinstance(row, dict):
        return f"expected an object, got {type(row).__name__}."
    prompt = row.get("prompt")
    messages = isinstance(prompt, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in prompt
    )
    if not isinstance(prompt, str) and not (messages and prompt):
        return "column 'prompt' must be text, or a list of messages with 'role' and 'content'."
    turns = row.get("turns")
    if not isinstance(turns, list) or not turns:
        return "column 'turns' must be a list with at least one turn."
    for i, turn in enumerate(turns):
        for column in ("action", "observation"):
            if not isinstance(turn, dict) or not isinstance(turn.get(column), str):
                return f"column 'turns[{i}].{column}' must be text."
        if not turn["action"]:
            return f"column 'turns[{i}].action' is empty."
        if not turn["observation"] and i + 1 < len(turns):
            return f"column 'turns[{i}].observation' is empty, but a turn follows."
    return ""
