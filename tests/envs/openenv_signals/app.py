"""A small game as an OpenEnv server, made of the real package's classes: which way does a colour point?

Three signals, one after the other: a colour and a number that means nothing. The right direction pays 1. `crash_at`,
`slow_s` and `late_reward` of a reset are for tests of failures, deadlines and rewards.
"""

import os
import random
import time
from enum import StrEnum
from typing import Any

from openenv.core.env_server import Environment, create_app
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field

WAYS = {"red": "north", "blue": "south", "green": "east", "white": "west"}
ROUNDS = int(os.environ.get("SIGNALS_ROUNDS", "3"))
SIZES = {"train": 2000, "test": 64}


class Way(StrEnum):
    NORTH = "north"
    SOUTH = "south"
    EAST = "east"
    WEST = "west"


class SignalAction(Action):
    way: Way = Field(..., description="where the signal points")


class SignalObservation(Observation):
    signal: str = ""


class SignalState(State):
    right: int = 0


def signals(split: str, index: int) -> list[str]:
    draw = random.Random(f"{split}/{index}")
    return [f"{draw.choice(list(WAYS))} {draw.randrange(100, 1000)}" for _ in range(ROUNDS)]


class Signals(Environment[SignalAction, SignalObservation, SignalState]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._signals, self._more = signals("train", 0), {}
        self._state = SignalState()

    def reset(self, seed=None, episode_id=None, split="train", index=0, **more: Any) -> SignalObservation:
        self._signals, self._more = signals(split, index if seed is None else seed), more
        self._state = SignalState(episode_id=episode_id)
        return SignalObservation(signal=self._signals[0])

    def step(self, action: SignalAction, timeout_s=None, **more: Any) -> SignalObservation:
        at = self._state.step_count
        if self._more.get("crash_at") == at:
            raise RuntimeError("the lamp is broken")
        time.sleep(self._more.get("slow_s", 0))
        right = WAYS[self._signals[at].split()[0]] == action.way.value
        self._state.right += right
        self._state.step_count += 1
        done = self._state.step_count == ROUNDS
        reward: float | None = float(right)
        if self._more.get("late_reward"):
            reward = float(self._state.right) if done else None
        return SignalObservation(signal="" if done else self._signals[at + 1], reward=reward, done=done)

    @property
    def state(self) -> SignalState:
        return self._state

    def list_splits(self) -> list[str]:
        return list(SIZES)

    def num_tasks(self, split: str) -> int:
        return SIZES[split]

    def list_tasks(self, split: str) -> list[dict]:
        return [self.get_task(split, index) for index in range(SIZES[split])]

    def get_task(self, split: str, index: int) -> dict:
        return {"id": f"{split}/{index}", "prompt": "Follow the signals."}

    def get_task_range(self, split: str, start=None, stop=None) -> list[dict]:
        return self.list_tasks(split)[start:stop]


app = create_app(
    Signals,
    SignalAction,
    SignalObservation,
    env_name="signals",
    max_concurrent_envs=int(os.environ.get("MAX_CONCURRENT_ENVS", "1")),
    state_cls=SignalState,
)
