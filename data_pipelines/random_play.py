"""Demonstrations of random play, for environments of the Gymnasium interface: the form of an action, and no skill.

A policy of random weights writes no action that can be read, so RL has nothing to compare. After a warm start on these
episodes it plays at random, and RL goes on from there. `config.data.source=seeds` writes them, with
`config.data.source.num_demonstrations`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.envs.base import Opening
from jaxagent.envs.gymnasium import spaces
from jaxagent.envs.gymnasium.environment import Gymnasium, GymnasiumAttempt, as_action
from jaxagent.types import Task


def demonstrations(environment: Gymnasium, seeds: Iterable[int]) -> list[dict[str, Any]]:
    """A row of `full.jsonl` for each seed, which decides the actions too.

    Raises:
      ConfigError: the environment cannot be opened, or its actions are stacked objects, which are not written here.
    """
    opening = Opening(None, (), lambda coroutine, timeout_s: asyncio.run(coroutine), lambda line: None)

    async def play(attempt_at: Any) -> list[dict[str, Any]]:
        return [await _episode(environment, attempt_at, seed) for seed in seeds]

    with environment.open(opening) as attempt_at:
        return asyncio.run(play(attempt_at))


async def _episode(environment: Gymnasium, attempt_at: Any, seed: int) -> dict[str, Any]:
    task = Task(f"seed-{seed}", "Begin.", (), metadata={"seed": seed})
    attempt: GymnasiumAttempt = attempt_at(task)
    turns: list[Mapping[str, str]] = []
    try:
        prompt = [{"role": message.role, "content": message.content} for message in await attempt.start()]
        attempt.action_space.seed(seed)
        stop = None
        while stop is None:
            action = f"<action>{_written(environment, attempt.action_space)}</action>"
            step = await attempt.step(action)
            stop = step.stop_reason
            turns.append({"action": action, "observation": step.observation.text if step.observation else ""})
    finally:
        await attempt.close()
    return {"id": task.id, "prompt": prompt, "turns": turns, "kind": ""}


def _written(environment: Gymnasium, space: Any) -> str:
    action = space.sample()
    if environment.actions:
        return environment.actions[int(action) - int(getattr(space, "start", 0))]
    word = spaces.as_json(action)
    if as_action(space, (), f"<action>{word}</action>")[1]:
        raise ConfigError(f"data.source.num_demonstrations: an action such as {word:.100} cannot be read back.")
    return word
