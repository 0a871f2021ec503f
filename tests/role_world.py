"""A world with roles, small enough for tests: attempts that play themselves, and users that misbehave."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import pathlib
import zlib
from typing import ClassVar, Literal

from jaxagent.config.ranges import PositiveInt
from jaxagent.data.dataset import Generated
from jaxagent.envs.base import Environment, Message, Verdict
from jaxagent.roles.base import Reply, TextRole
from jaxagent.types import StopReason
from tests import tiny_run

WORDS = ["red", "green", "blue", "black", "white", "one", "two", "three", "four", "five"]
FLAGS = (
    "--config.stages=rl --config.data.source=tests.role_world:Names --config.data.num_eval=4 "
    "--config.tokenizer.vocab_size=300 --config.engine.slots=8 --config.engine.prefill_tokens=64 "
    "--config.rl.batch.row_tokens=128 --config.rl.tasks_per_step=2 --config.rl.group_size=4 "
    "--config.rl.advantage.drop_zero_signal=false --config.episodes.learn=true --config.checkpoint.every=1 "
    "--config.engine.pages=64 --config.engine.page_tokens=16"
)
MODEL = [flag for flag in tiny_run.FLAGS.split() if flag.startswith("--config.model.")]
CONFIG = f"--config={tiny_run.ROOT / 'configs' / 'search_r1.py'}"


def argv(workdir: pathlib.Path, env: str, *extra: str) -> list[str]:
    """argv of a tiny run in a world of this file; `extra` flags come last and win."""
    return [
        "main", CONFIG, f"--config.workdir={workdir}", f"--config.env=tests.role_world:{env}", *FLAGS.split(), *MODEL,
        *extra,
    ]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Names(Generated):
    """Words to talk about."""

    count: PositiveInt = 24

    def write(self, folder, seed, env):
        folder.mkdir(parents=True, exist_ok=True)
        for split, first in (("train", 0), ("heldout", 500)):
            numbers = range(first, first + self.count)
            prompts = [" ".join(WORDS[i // 10**k % 10] for k in range(3)) + ": " for i in numbers]
            rows = [{"id": f"{split}-{i}", "prompt": text, "answers": ["x"]} for i, text in enumerate(prompts)]
            (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Talking(Environment):
    """Two conversations of the policy, one that is only shown, a guide and a critic."""

    score = "even"
    rollout = "jaxagent.rollout.play:Play"
    roles: ClassVar = ("guide", "critic")
    turn_tokens: PositiveInt = 6
    observation_tokens: PositiveInt = 24
    context_tokens: PositiveInt = 96
    episode_timeout_s: float = 60.0

    def attempt(self, task, cast):
        return Conversations(task, cast)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selling(Talking):
    """A guide who wants money."""

    priced_roles: ClassVar = ("guide",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Taken(Talking):
    """A role whose seconds would be written over the policy's: engine_s."""

    roles: ClassVar = ("engine",)


class Conversations:
    def __init__(self, task, cast):
        self._task, self._cast, self.counters = task, cast, {}
        self._said = ""

    async def play(self):
        policy, guide, critic = self._cast.talk("policy"), self._cast.talk("guide"), self._cast.talk("critic")
        hint = await guide.say(Message("user", self._task.prompt))
        first = await policy.say(Message("user", self._task.prompt + hint.text))
        told = await critic.say(Message("user", first.text + "?"))
        second = await policy.say(Message("user", told.text + "!"))
        await guide.say(Message("user", second.text + "?"))
        other = await self._cast.talk("policy").say(Message("user", "again: " + self._task.prompt))
        await self._cast.talk("policy", trained=False).say(Message("user", other.text + "."))
        self._said = second.text + other.text
        return StopReason.ANSWER

    async def verify(self, ended):
        even = sum(letter in "aeiou " for letter in self._said) % 2 == 0
        return Verdict(float(even), {"even": float(even)})

    async def close(self):
        pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serving(Environment):
    """A customer who is asked until it says STOP, or the turns are over."""

    score = "even"
    rollout = "jaxagent.rollout.play:Play"
    roles: ClassVar = ("user",)
    max_turns: PositiveInt = 3
    turn_tokens: PositiveInt = 4
    observation_tokens: PositiveInt = 24
    context_tokens: PositiveInt = 96
    episode_timeout_s: float = 60.0

    def attempt(self, task, cast):
        return Service(task, cast, self.max_turns)


class Service(Conversations):
    def __init__(self, task, cast, turns):
        super().__init__(task, cast)
        self._turns = turns

    async def play(self):
        policy, user = self._cast.talk("policy"), self._cast.talk("user")
        shown = self._task.prompt
        for _ in range(self._turns):
            said = await policy.say(Message("user", shown))
            self._said += said.text
            answer = await user.say(Message("user", said.text))
            if "STOP" in answer.text:
                return StopReason.ANSWER
            shown = answer.text
        return StopReason.TURN_LIMIT


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wild(TextRole):
    """A customer who is well, fails, hangs or never stops, by task and attempt."""

    how: Literal["any", "well", "fail"] = "any"

    def speaker(self, task, sample, number):
        return WildSpeaker(self.how, zlib.crc32(f"{task.id} {sample}".encode()) % 4)


class WildSpeaker:
    def __init__(self, how, mood):
        self.mood = {"any": mood, "well": 0, "fail": 1}[how]

    async def reply(self, messages, stop_strings, max_tokens):
        if self.mood == 1:
            raise ConnectionError("the line is dead")
        if self.mood == 2:
            await asyncio.Event().wait()
        return Reply("go on " if self.mood == 3 else "STOP")
